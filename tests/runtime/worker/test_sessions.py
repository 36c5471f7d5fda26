"""A worker carries out overlapping orders to open and close a session, and keeps nothing of those that fail."""

from __future__ import annotations

import asyncio
import functools
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dshuffle.errors import ClusterError
from dshuffle.runtime.messages import OpenOrder
from dshuffle.runtime.worker import worker_plugin as module
from dshuffle.runtime.worker.worker_plugin import WorkerSessions


class Session:
    """A session that takes a while to open and to close."""

    is_loading, rank, epoch = False, 0, 0

    def __init__(self) -> None:
        self.number = -1
        self.end = asyncio.Event()
        self.closed = False

    async def abort(self, run_id: int) -> None:
        """Do nothing: no exchange is under way."""

    async def close(self, cause: object = None) -> None:
        await self.end.wait()
        self.closed = True


@pytest.fixture
def reserved() -> dict[str, int]:
    return {}


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch, reserved: dict[str, int]) -> WorkerSessions:
    """No sessions. The spec of an order to open is the id and the rank of this worker."""

    def unpacked(spec: bytes) -> Any:
        session_id, _, rank = spec.decode().partition(":")
        return types.SimpleNamespace(session_id=session_id, addresses={int(rank): "tcp://here"})

    worker: Any = types.SimpleNamespace(address="tcp://here")

    def reserve(self: WorkerSessions, spec: Any, rank: int | None) -> Any:
        self._reserved[spec.session_id] = 1
        return spec

    async def give_no_signs(*_: Any) -> None:
        """Say nothing."""

    monkeypatch.setattr(module, "SessionSpec", types.SimpleNamespace(unpacked=unpacked))
    monkeypatch.setattr(WorkerSessions, "_reserve", reserve)
    monkeypatch.setattr(WorkerSessions, "_give_signs", give_no_signs)
    sessions = WorkerSessions(worker)
    sessions._reserved = reserved
    return sessions


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """The sessions that have been opened."""
    made: list[Session] = []

    async def make(*_: Any) -> Session:
        made.append(Session())
        return made[-1]

    monkeypatch.setattr(WorkerSessions, "_made", make)
    return made


async def turns() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_an_order_to_close_that_comes_while_an_earlier_session_closes_counts(
    made: list[Session], sessions: WorkerSessions, reserved: dict[str, int]
) -> None:
    """The worker gets rank 1, and closes its session as rank 0 for that. Then the session ends."""

    async def run() -> None:
        await sessions.open(OpenOrder(number=1), b"a:0")
        opening = asyncio.create_task(sessions.open(OpenOrder(number=6, restore=True, epoch=0), b"a:1"))
        await turns()
        closing = asyncio.create_task(sessions.close("a", 6))
        await turns()
        assert not closing.done()
        made[0].end.set()
        await closing
        with pytest.raises(ClusterError, match="was closed on this worker"):
            await opening

    asyncio.run(asyncio.wait_for(run(), 30))
    assert made[0].closed
    assert len(made) == 1
    assert not sessions
    assert not sessions.ids
    assert not reserved


def test_a_session_opens_after_an_earlier_opening_has_been_cancelled(
    monkeypatch: pytest.MonkeyPatch, sessions: WorkerSessions, reserved: dict[str, int]
) -> None:
    """The end of the cancelled one takes a while, and must not undo the next one."""
    made: list[Session] = []
    may_end, n_openings = asyncio.Event(), 0

    async def make(*_: Any) -> Session:
        nonlocal n_openings
        n_openings += 1
        if n_openings == 1:
            try:
                await asyncio.sleep(3600)
            finally:
                await may_end.wait()
        made.append(Session())
        return made[-1]

    async def run() -> None:
        first = asyncio.create_task(sessions.open(OpenOrder(number=6, restore=True, epoch=0), b"a:0"))
        await turns()
        closing = asyncio.create_task(sessions.close("a", 6))
        await turns()
        second = asyncio.create_task(sessions.open(OpenOrder(number=7, restore=True, epoch=0), b"a:0"))
        await turns()
        assert n_openings == 1
        may_end.set()
        await closing
        with pytest.raises(ClusterError, match="was closed while it was being opened"):
            await first
        await second
        assert sessions["a"].number == 7
        assert reserved == {"a": 1}
        await sessions.close("a", 5)  # an order that comes late
        assert sessions.ids == ["a"]
        made[0].end.set()
        await sessions.close("a", 7)

    monkeypatch.setattr(WorkerSessions, "_made", make)
    asyncio.run(asyncio.wait_for(run(), 30))
    assert made[0].closed
    assert not sessions.ids
    assert not reserved


def test_closing_goes_on_if_whoever_asked_for_it_goes_away(
    made: list[Session], sessions: WorkerSessions, reserved: dict[str, int]
) -> None:
    async def run() -> None:
        await sessions.open(OpenOrder(number=1), b"a:0")
        closing = asyncio.create_task(sessions.close("a", 1))
        await turns()
        closing.cancel()
        again = asyncio.create_task(sessions.close("a", 2))
        await turns()
        assert not again.done()
        assert reserved
        made[0].end.set()
        await again

    asyncio.run(asyncio.wait_for(run(), 30))
    assert made[0].closed
    assert not reserved


class Maker:
    """Makes something once it may, and counts what is open."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.made: list[str] = []
        self.open: list[str] = []

    def make(self, name: str) -> str:
        self.begun.set()
        assert self.may_end.wait(10)
        if name == "nothing":
            raise ZeroDivisionError
        self.made.append(name)
        self.open.append(name)
        return name


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.mark.parametrize("name", ["it", "nothing"])
def test_it_is_closed_if_the_caller_is_cancelled(executor: ThreadPoolExecutor, name: str) -> None:
    maker = Maker()

    async def main() -> None:
        sessions = types.SimpleNamespace(executor=executor)
        first, waiting = [
            asyncio.ensure_future(
                WorkerSessions._made_in_thread(
                    sessions,  # type: ignore[arg-type]
                    functools.partial(maker.make, what),
                    close=maker.open.remove,
                )
            )
            for what in (name, "never")
        ]
        assert await asyncio.to_thread(maker.begun.wait, 10)
        for task in (first, waiting):
            task.cancel()
        await asyncio.wait([first, waiting])  # although the thread is not done
        assert first.cancelled()
        assert waiting.cancelled()
        maker.may_end.set()

    asyncio.run(main())
    executor.shutdown()
    assert maker.open == []
    assert maker.made == ([name] if name == "it" else [])
