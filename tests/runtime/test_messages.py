"""Messages are the same when they arrive, or are refused."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import zlib
from typing import Any

import msgspec
import pytest
from distributed.protocol import dumps, loads

from dshuffle.errors import ClusterError, ExchangeError
from dshuffle.exchange import comms as replies
from dshuffle.planning import WorkerHistory
from dshuffle.planning.remainder import SampleDigest
from dshuffle.records import Measures
from dshuffle.runtime import messages, session_spec
from dshuffle.runtime import messages as orders
from dshuffle.runtime.messages import (
    CommitReply,
    Counts,
    EpochExchange,
    MemberChanges,
    MemberState,
    OpenedSession,
    OpenOrder,
    Report,
    Together,
    TrainedSamples,
    TrainingTime,
    UnfinishedTask,
    Vote,
    from_fields,
    to_fields,
)
from dshuffle.runtime.scheduler import scheduler_plugin, snapshot
from dshuffle.runtime.scheduler.snapshot import Participant, SessionSnapshot
from dshuffle.runtime.session_spec import PROTOCOL
from dshuffle.runtime.worker import worker_plugin

MESSAGES_OF = (37, 2145463698)
"""The protocol, and the checksum of its messages. If they change, so does the number: see the failure of the test."""

SPOKEN = (messages, orders, replies, worker_plugin, snapshot, session_spec)
"""Modules whose dataclasses and structs travel between processes, and those that these contain."""

DIGEST = SampleDigest(5, 2**63, 2**64 - 1, 0)

COUNTS = Counts(digest=2**32 - 1, expected=3, leaving=1, rows=3, drawn=DIGEST, due=DIGEST)

MESSAGES = [
    DIGEST,
    Vote(counts=COUNTS),
    Vote(reason="no store", again=True),
    MemberState(open=False),
    MemberState(open=True, run_id=3, arrived=0.5, vote=Vote(counts=COUNTS)),
    CommitReply(busy="1 task still running"),
    CommitReply(
        report=Report(
            measures=Measures(wire_sent_bytes=(7,), wire_received_bytes=(9,), cpu_idle=0.25),
            training=TrainingTime(seconds=1.5, waiting=0.25),
            held=10,
        )
    ),
    OpenedSession(
        addresses={0: "tcp://a:1", -1: "tcp://b:1"},
        left_out=("tcp://c:1",),
        history=WorkerHistory(3).changed([0, 2], epoch=5, carried=4, weights=(1000, 250)),
    ),
    EpochExchange(
        epoch=3,
        run_id=4,
        delivery="peer",
        needed=10,
        packets=9,
        components=10,
        exchange_seconds=0.5,
        waited_seconds=0.0,
        measures=Measures(wire_sent_bytes=(1, 2), wire_received_bytes=(2, 1)),
        addresses={0: "tcp://a:1", 1: "tcp://b:1"},
        training_before=(TrainingTime(seconds=1.0), TrainingTime(seconds=2.0, waiting=0.5)),
    ),
    OpenOrder(number=1, last_run=2, epoch=3, restore=True, digest=DIGEST, together=Together(ranks=[1], readers=["a"])),
    MemberChanges(joined=("tcp://d:1",), leaving=(), n_available=3),
    TrainedSamples(epoch=3, counts=(5, 0), digest=DIGEST),
    UnfinishedTask(2, 1, "cancelled"),
    SessionSnapshot(
        session_id="s",
        way="global + peer",
        n_samples=10,
        row_nbytes=8,
        epoch=3,
        phase="idle",
        waiting_for="",
        participants=(Participant(name="rank 0", address="tcp://a:1", state="ready", held=None),),
        epochs=(),
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_that_dask_carries_is_the_same(message: Any) -> None:
    arrived = loads(dumps({"op": "dshuffle_report", "vote": to_fields(message)}))["vote"]
    assert from_fields(type(message), arrived, "rank 0") == message


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (None, "Expected `object`, got `null`"),
        ([1], "Expected `object`, got `array`"),
        ({"reason": 5}, "Expected `str | null`, got `int` - at `$.reason`"),
        ({"again": "yes"}, "Expected `bool`, got `str` - at `$.again`"),
        ({"counts": {"digest": 1, "expected": 3}}, "Object missing required field `rows` - at `$.counts`"),
        ({"counts": {"digest": "1", "expected": 3, "rows": 3}}, "Expected `int`, got `str` - at `$.counts.digest`"),
        ({"counts": {"digest": 1, "expected": 3, "rows": 2.5}}, "Expected `int`, got `float` - at `$.counts.rows`"),
    ],
)
def test_what_is_not_a_message_is_refused(fields: object, reason: str) -> None:
    with pytest.raises(ClusterError) as caught:
        from_fields(Vote, fields, "rank 3 (tcp://10.0.0.3:40000)")
    text = f"rank 3 (tcp://10.0.0.3:40000) sent what is not a message of the type Vote ({reason}). Install the same"
    assert str(caught.value).startswith(text)
    assert not caught.value.transient


def test_messages_of_rows_with_unknown_fields_are_refused() -> None:
    """Structs check this themselves."""
    session = {"session_id": "a", "acknowledged": []}
    with pytest.raises(ClusterError, match="Object contains unknown field `urgent`"):
        from_fields(worker_plugin.Request, {**session, "message": (1, 0, 1, 0), "host": "", "urgent": True}, "rank 1")
    for reply in ({"status": "refused", "reason": "closed"}, {"status": "later"}, {"status": "OK"}):
        with pytest.raises(ExchangeError, match="unknown field `urgent`"):
            replies.from_fields({**reply, "urgent": True}, "rank 1")


def kinds_spoken() -> dict[str, type]:
    """Every type of a message, and the types of their fields."""
    found: dict[str, type] = {}
    unread = [kind for module in SPOKEN for kind in vars(module).values() if isinstance(kind, type)]
    while unread:
        kind = unread.pop()
        is_message = dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct)
        if is_message and kind.__module__.startswith("dshuffle") and kind.__qualname__ not in found:
            found[kind.__qualname__] = kind
            names = vars(sys.modules[kind.__module__])
            words = re.findall(r"\w+", " ".join(map(str, annotations_of(kind).values())))
            unread += [names[word] for word in words if isinstance(names.get(word), type)]
    return found


def annotations_of(kind: type) -> dict[str, Any]:
    """The fields of a type, as they are written in its source and those of its bases: the same on every Python."""
    bases = reversed(kind.__mro__)
    return {name: text for base in bases for name, text in inspect.get_annotations(base).items()}


def test_the_number_of_the_protocol_changes_with_the_messages() -> None:
    kinds = kinds_spoken()
    assert {"Vote", "OpenOrder", "Request", "Refusal", "SessionRequest", "Measures", "WorkerHistory"} <= kinds.keys()
    texts = [f"{name} {sorted(annotations_of(kind).items())}" for name, kind in sorted(kinds.items())]
    for plugin in (scheduler_plugin, worker_plugin):
        for table in (plugin.OPERATIONS, plugin.OF_SESSION):
            texts += [f"{name} {inspect.signature(method)}" for name, method in sorted(table.items())]
    now = PROTOCOL, zlib.crc32("\n".join(texts).encode())
    assert now == MESSAGES_OF, f"messages changed: count PROTOCOL up, and write MESSAGES_OF = {now[0] + 1, now[1]}"
