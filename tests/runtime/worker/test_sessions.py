"""A worker carries out overlapping orders to open and close a session, and keeps nothing of those that fail."""

from __future__ import annotations

import asyncio
import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from dshuffle.errors import ClusterError, DatasetError, WorkerLost
from dshuffle.runtime.worker import sessions as module
from dshuffle.runtime.worker.sessions import WorkerSessions


class Rows:
    """What a session holds."""


class Session:
    """A session that takes a while to open and to close."""

    is_loading, rank, epoch = False, 0, 0

    def __init__(self) -> None:
        self.number = -1
        self.end = asyncio.Event()
        self.closed = False

    async def abort(self, run_id: int) -> None:
        """Do nothing: no exchange is under way."""

    async def close(self, cause: object) -> None:
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

    monkeypatch.setattr(module, "SessionSpec", types.SimpleNamespace(unpacked=unpacked))
    memory = types.SimpleNamespace(check=lambda spec, trains: (None, 1))
    shared: Any = types.SimpleNamespace(
        worker=types.SimpleNamespace(address="tcp://here"),
        reserved=types.SimpleNamespace(
            memory=lambda loaded: memory,
            reserve=reserved.__setitem__,
            release=lambda session_id: reserved.pop(session_id, None),
        ),
        kept=types.SimpleNamespace(close=lambda session_id: None),
    )
    return WorkerSessions(shared)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """The sessions that have been opened."""
    made: list[Session] = []

    async def open_session(*_: Any) -> tuple[Session, Any]:
        made.append(Session())
        return made[-1], types.SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(module, "open_session", open_session)
    return made


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def turns() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.usefixtures("no_collection")
def test_rows_of_a_session_that_does_not_open_are_free_at_once(
    monkeypatch: pytest.MonkeyPatch, sessions: WorkerSessions, closed: bool
) -> None:
    """Without a collection."""
    held: list[weakref.ref[Rows]] = []

    async def open_session(*_: Any) -> None:
        rows = Rows()
        held.append(weakref.ref(rows))
        await asyncio.sleep(3600 if closed else 0)
        raise DatasetError("the dataset is away")

    async def run() -> None:
        opening = asyncio.create_task(sessions.open(b"a:0", 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert held[0]() is not None
        if closed:
            await sessions.close("a", 1)
        with pytest.raises(ClusterError if closed else DatasetError):
            await opening
        del opening  # its error has this frame in its traceback

    monkeypatch.setattr(module, "open_session", open_session)
    asyncio.run(asyncio.wait_for(run(), 30))
    assert held[0]() is None


def test_an_order_to_close_that_comes_while_an_earlier_session_closes_counts(
    made: list[Session], sessions: WorkerSessions, reserved: dict[str, int]
) -> None:
    """The worker gets rank 1, and closes its session as rank 0 for that. Then the session ends."""

    async def run() -> None:
        await sessions.open(b"a:0", 1)
        opening = asyncio.create_task(sessions.open(b"a:1", 6, restore=True, epoch=0))
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

    async def open_session(*_: Any) -> tuple[Session, Any]:
        nonlocal n_openings
        n_openings += 1
        if n_openings == 1:
            try:
                await asyncio.sleep(3600)
            finally:
                await may_end.wait()
        made.append(Session())
        return made[-1], types.SimpleNamespace(close=lambda: None)

    async def run() -> None:
        first = asyncio.create_task(sessions.open(b"a:0", 6, restore=True, epoch=0))
        await turns()
        closing = asyncio.create_task(sessions.close("a", 6))
        await turns()
        second = asyncio.create_task(sessions.open(b"a:0", 7, restore=True, epoch=0))
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

    monkeypatch.setattr(module, "open_session", open_session)
    asyncio.run(asyncio.wait_for(run(), 30))
    assert made[0].closed
    assert not sessions.ids
    assert not reserved


def test_an_order_to_close_that_comes_late_does_not_cancel_a_later_opening(
    monkeypatch: pytest.MonkeyPatch, sessions: WorkerSessions
) -> None:
    may_open = asyncio.Event()

    async def open_session(*_: Any) -> tuple[Session, Any]:
        await may_open.wait()
        return Session(), types.SimpleNamespace(close=lambda: None)

    async def run() -> None:
        opening = asyncio.create_task(sessions.open(b"a:0", 7, restore=True, epoch=0))
        await turns()
        await sessions.close("a", 6)
        may_open.set()
        await opening
        assert sessions["a"].number == 7

    monkeypatch.setattr(module, "open_session", open_session)
    asyncio.run(asyncio.wait_for(run(), 30))


def test_closing_goes_on_if_whoever_asked_for_it_goes_away(
    made: list[Session], sessions: WorkerSessions, reserved: dict[str, int]
) -> None:
    async def run() -> None:
        await sessions.open(b"a:0", 1)
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


def test_a_worker_that_closes_opens_nothing_that_waits(made: list[Session], sessions: WorkerSessions) -> None:
    async def run() -> None:
        await sessions.open(b"a:0", 1)
        closing = asyncio.create_task(sessions.close("a", 1))
        await turns()
        opening = asyncio.create_task(sessions.open(b"a:0", 2, restore=True, epoch=0))
        await turns()
        made[0].end.set()
        ending = asyncio.create_task(sessions.end())
        await closing
        with pytest.raises(WorkerLost, match="worker tcp://here closes"):
            await opening
        await ending

    asyncio.run(asyncio.wait_for(run(), 30))
    assert len(made) == 1
