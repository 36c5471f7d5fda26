"""Messages to a worker fit the methods that they go to."""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
from typing import Any

import numpy as np
import pytest

from dshuffle.errors import WorkerLost
from dshuffle.exchange.comms import Later
from dshuffle.exchange.mailboxes import MessageId
from dshuffle.runtime.messages import replying
from dshuffle.runtime.worker import worker_plugin
from dshuffle.runtime.worker.worker_plugin import OF_SESSION, OPERATIONS, WorkerSessions

COLLECTIVE: dict[str, Any] = {"session_id": "a", "number": 3}

MESSAGES: list[tuple[str, dict[str, Any]]] = [
    ("open", {"spec": "S", "number": 1, "last_run": 2, "epoch": None, "restore": False}),
    ("status", {"session_id": "a"}),
    ("commit", {"session_id": "a", "run_id": 4}),
    ("close", {"session_id": "a", "number": 7, "cause": None}),
    ("close", {"session_id": "a", "number": 7}),
    ("mean", {**COLLECTIVE, "size": 4, "step": 0, "rank": 2, "weight": 1.0, "values": np.zeros(3)}),
    ("end_collective", {**COLLECTIVE, "reason": "rank 2 has failed"}),
    ("end_collective", {**COLLECTIVE, "reason": "rank 2 has failed", "transient": False}),
    ("kept", {"directory": "/scratch", "dataset": "d"}),
    ("rows", {"session_id": "a", "epoch": 2, "sample_ids": np.arange(3)}),
    ("block", {"session_id": "a", "load": "run 1", "owner": 2, "n_owners": 3, "block": 7, "numbers": np.arange(3)}),
    ("members", {"session_id": "a", "addresses": {0: "tcp://x", -1: "tcp://y"}, "number": 8}),
    ("begin", {"session_id": "a", "run_id": 4, "epoch": 2, "delivery": "peer", "rate": None}),
    ("begin", {"session_id": "a", "run_id": 4, "epoch": 2, "delivery": "peer", "rate": 1e9}),
    ("plan_ahead", {"session_id": "a", "run_id": 4, "delivery": "peer"}),
    ("abort", {"session_id": "a", "run_id": 4}),
    ("training", {"session_id": "a"}),
    ("trained", {"session_id": "a", "epoch": 2}),
    ("fetch", {"session_id": "a", "message": MessageId(5, 1, 0, 2), "acknowledged": [], "host": "h"}),
    ("acknowledge", {"session_id": "a", "acknowledged": [MessageId(5, 1, 0, 2)]}),
]
"""Messages as the scheduler and other workers send them."""


@pytest.mark.parametrize(("operation", "message"), MESSAGES, ids=str)
def test_the_fields_of_a_message_reach_its_method(
    monkeypatch: pytest.MonkeyPatch, operation: str, message: dict[str, Any]
) -> None:
    table = OPERATIONS if operation in OPERATIONS else OF_SESSION
    method, called, expected = table[operation], dict[str, Any](), dict(message)

    def note(owner: object, /, **arguments: Any) -> None:
        inspect.signature(method).bind(owner, **arguments)  # a TypeError if they do not fit
        called.update(arguments)

    monkeypatch.setitem(table, operation, note)
    sessions: Any = types.SimpleNamespace(session=lambda session_id: None)
    worker_plugin._carry_out(lambda: sessions, operation, **message)
    if operation in OF_SESSION:
        del expected["session_id"]
    assert called == expected


def test_every_operation_has_a_message() -> None:
    assert {operation for operation, _ in MESSAGES} == OPERATIONS.keys() | OF_SESSION.keys()


class Session:
    """A session that has no message ready."""

    def __init__(self) -> None:
        self.acknowledged: list[MessageId] = []
        self.acknowledge = self.acknowledged.append

    async def serve(self, message: MessageId, *, shared: bool) -> Later:
        assert message == MessageId(5, 1, 0, 2)
        return Later()


class Sessions(dict[str, Session]):
    """The sessions of a worker."""

    acknowledge, fetch, _note = WorkerSessions.acknowledge, WorkerSessions.fetch, WorkerSessions._note

    worker = types.SimpleNamespace(address="tcp://here")


def test_requests_and_acknowledgements_of_rows() -> None:
    sessions: Any = Sessions(a=Session())
    fetch = replying("fetch", functools.partial(worker_plugin._carry_out, lambda: sessions, "fetch"))
    request = {"session_id": "a", "message": (5, 1, 0, 2), "acknowledged": [(4, 1, 0, 0), (4, 1, 0, 1)], "host": ""}
    assert asyncio.run(fetch(**request)) == {"status": "later"}
    assert sessions["a"].acknowledged == [MessageId(4, 1, 0, 0), MessageId(4, 1, 0, 1)]
    refused = asyncio.run(fetch(**{**request, "session_id": "b"}))
    assert refused == {"status": "refused", "reason": "the session is not open on this worker", "again": False}


def test_a_worker_without_the_plugin_says_so() -> None:
    worker: Any = types.SimpleNamespace(plugins={}, address="tcp://here")
    with pytest.raises(WorkerLost, match="no longer has the dshuffle plugin"):
        worker_plugin._sessions_of(worker, lambda: None)  # type: ignore[arg-type]
