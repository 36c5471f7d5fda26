"""What the scheduler's side of a session says of members that do not answer."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import pytest

from dshuffle.errors import WorkerLost
from dshuffle.planning import SERVER
from dshuffle.records import Measures
from dshuffle.runtime.scheduler.coordinator import Coordinator, _next_rate, _rate_of

ADDRESSES = {0: "tcp://first", 1: "tcp://second", SERVER: "tcp://server"}


def coordinator_where(address, op):
    """A coordinator of two ranks and a server, of which the member at `address` is gone when `op` is called.

    All others answer at once, and vote ready.
    """

    class Member:
        def __init__(self, where):
            self.where = where

        def __getattr__(self, name):
            async def answer(**message):
                if self.where == address and name == op:
                    raise OSError("Connection reset by peer")
                if name == "dshuffle_begin":
                    vote = {"digest": "same", "expected": 0, "rows": 0}
                    coordinator.report(message["run_id"], self.who, None, vote)
                return {"status": "OK"}

            return answer

        @property
        def who(self):
            return next(who for who, where in ADDRESSES.items() if where == self.where)

    spec = SimpleNamespace(session_id="s", addresses=ADDRESSES, shuffle=SimpleNamespace(n_workers=2, first_epoch=0))
    scheduler = SimpleNamespace(rpc=Member, _ongoing_background_tasks=SimpleNamespace(call_soon=lambda *_: None))
    deliveries = SimpleNamespace(choose=lambda: "clique", observe=lambda *_: None)
    coordinator = Coordinator(scheduler, SimpleNamespace(spec=spec, server_role="dedicated"), "client", deliveries)
    return coordinator


@pytest.mark.parametrize("op", ["dshuffle_begin", "dshuffle_commit"])
@pytest.mark.parametrize(("address", "who"), [("tcp://server", "the server"), ("tcp://second", "rank 1")])
def test_a_call_that_notices_first_names_the_member_and_what_to_do(op, address, who):
    """A call can fail on a dead member before the scheduler has removed it."""
    coordinator = coordinator_where(address, op)
    with pytest.raises(WorkerLost) as caught:
        asyncio.run(coordinator.advance(0))
    assert str(caught.value).startswith(f"{who} ({address}) cannot be reached (OSError: Connection reset by peer)")
    assert "If it has left the cluster, make a new Shuffler" in str(caught.value)
    assert coordinator.epoch == -1


def measures(nbytes, seconds):
    return Measures(wire_received_bytes=(nbytes,), transfer_seconds=seconds)


@pytest.mark.parametrize(
    ("measured", "cpu_idle", "rate"),
    [
        ([measures(10**6, 1.0), measures(10**6, 0.5), measures(10**6, 0.1)], 0.6, 2e6),
        ([measures(10**6, 1.0), measures(0, 0.0)], 0.6, 1e6),  # a server receives nothing
        ([measures(10**6, 1.0)], 0.1, math.inf),  # the processors were busy, so the link may be faster
        ([measures(1000, 1.0)], 0.6, None),
        ([], 1.0, None),
    ],
)
def test_the_rate_of_the_links_is_what_workers_received(measured, cpu_idle, rate):
    assert _rate_of(measured, cpu_idle) == rate


@pytest.mark.parametrize(
    ("before", "measured", "rate"),
    [(None, None, None), (None, 5.0, 5.0), (5.0, None, 5.0), (8.0, 1.0, 4.0), (8.0, 9.0, 9.0), (math.inf, 9.0, 9.0)],
)
def test_the_rate_falls_by_half_at_most(before, measured, rate):
    assert _next_rate(before, measured) == rate
