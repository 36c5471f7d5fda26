"""For how long a scheduler has not answered a session."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dshuffle.errors import ClusterError
from dshuffle.runtime.client import session_client
from dshuffle.runtime.client.session_client import SessionClient


def test_a_connection_that_came_back_between_two_attempts_ends_the_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer may still take long, because the scheduler waits for workers."""
    monkeypatch.setattr(session_client, "LOOK", 0.01)
    silences = []

    async def begin(session_id: str) -> Any:
        if not silences:
            silences.append(None)
            client.status = "connecting"
            raise OSError("not connected")
        client.status = "running"
        silences.append(calls.silence.seconds)
        while calls.silence.seconds:
            await asyncio.sleep(0.01)
        return {"status": "OK"}

    client: Any = SimpleNamespace(
        status="running",
        sync=lambda function, *args: asyncio.run(asyncio.wait_for(function(*args), 30)),
        scheduler=SimpleNamespace(address="tcp://scheduler:1", dshuffle_begin=begin),
    )
    calls = SessionClient(client, "0")
    calls.tell("begin")
    assert len(silences) == 2
    assert silences[1] > 0


@pytest.mark.slow
def test_attempts_that_fail_late_do_not_end_the_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is connected, and other connections to the scheduler fail after some time."""
    monkeypatch.setattr(session_client, "LOOK", 0.01)
    monkeypatch.setattr(session_client, "RECONNECT", 1.0)

    async def begin(session_id: str) -> Any:
        await asyncio.sleep(0.1)
        raise OSError("timed out")

    client: Any = SimpleNamespace(
        status="running",
        sync=lambda function, *args: asyncio.run(asyncio.wait_for(function(*args), 30)),
        scheduler=SimpleNamespace(address="tcp://scheduler:1", dshuffle_begin=begin),
    )
    with pytest.raises(ClusterError, match=r"does not answer \(timed out\): it has died"):
        SessionClient(client, "0").tell("begin")


@pytest.mark.parametrize(("statuses", "is_closed"), [(("connecting", "running"), True), (("closed",), False)])
def test_a_session_is_closed_in_the_background_once_the_client_is_connected_again(
    statuses: tuple[str, ...], is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_client, "CLOSE_AGAIN_AFTER", 0.0)
    following, closed = iter(statuses), []

    async def close(session_id: str) -> None:
        if client.status != "running" or not closed:
            closed.append(session_id)
            client.status = next(following, client.status)
            raise OSError("not connected")
        closed.append("answered")

    works: list[Any] = []
    client: Any = SimpleNamespace(
        status="connecting",
        loop=SimpleNamespace(add_callback=works.append),
        scheduler=SimpleNamespace(dshuffle_close=close),
    )
    SessionClient(client, "0").close_soon()
    [work] = works
    asyncio.run(asyncio.wait_for(work(), 30))
    assert closed[0] == "0"
    assert (closed[-1] == "answered") == is_closed
