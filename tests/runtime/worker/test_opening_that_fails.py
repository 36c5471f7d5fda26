"""A session that does not open, or that is closed before it is open, leaves nothing that waits for a collection."""

from __future__ import annotations

import asyncio
import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from dshuffle.errors import ClusterError, DatasetError
from dshuffle.runtime.worker import sessions as module
from dshuffle.runtime.worker.sessions import WorkerSessions


class Rows:
    """What a session holds while it opens."""


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> WorkerSessions:
    spec = types.SimpleNamespace(session_id="a", addresses={0: "tcp://here"})
    monkeypatch.setattr(module, "SessionSpec", types.SimpleNamespace(unpacked=lambda packed: spec))
    memory = types.SimpleNamespace(check=lambda spec, trains: (None, 0))
    shared: Any = types.SimpleNamespace(
        worker=types.SimpleNamespace(address="tcp://here"),
        reserved=types.SimpleNamespace(
            memory=lambda loaded: memory, reserve=lambda session_id, nbytes: None, release=lambda session_id: None
        ),
        kept=types.SimpleNamespace(close=lambda session_id: None),
    )
    return WorkerSessions(shared)


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.usefixtures("no_collection")
def test_its_rows_are_free_at_once(monkeypatch: pytest.MonkeyPatch, sessions: WorkerSessions, closed: bool) -> None:
    held: list[weakref.ref[Rows]] = []

    async def open_session(*_: Any) -> None:
        rows = Rows()
        held.append(weakref.ref(rows))
        await asyncio.sleep(3600 if closed else 0)
        raise DatasetError("the dataset is away")

    async def run() -> None:
        opening = asyncio.create_task(sessions.open(b"", 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert held[0]() is not None
        if closed:
            await sessions.close("a", 1)
        with pytest.raises(ClusterError if closed else DatasetError):
            await opening
        del opening  # its error has this frame in its traceback

    monkeypatch.setattr(module, "open_session", open_session)
    asyncio.run(run())
    assert held[0]() is None
