"""How many messages there are, and how a server that sends packets shares its window."""

from __future__ import annotations

import numpy as np
import pytest

from dshuffle.exchange.transports import PacketTransport, Transport
from dshuffle.planning import SERVER, Choices, EpochPlanner, ShuffleSpec
from dshuffle.planning.planner import OwnPlanner
from dshuffle.rows import RowLayout

LAYOUT = RowLayout.of({"x": (np.dtype("u1"), (1000,))})


@pytest.mark.parametrize(
    ("relay", "n_workers", "each"),
    [("pipelined", 2, 2), ("pipelined", 3, 1), ("pipelined", 9, 1), ("ring", 4, None), ("unicast", 2, None)],
)
def test_a_server_sends_equally_many_messages_at_a_time_to_workers_that_pass_them_on(relay, n_workers, each):
    planner = EpochPlanner(ShuffleSpec(400, n_workers, Choices(delivery="coded", relay=relay)))
    planner.load()
    plan = planner.advance()
    parts = {SERVER: plan.for_worker(SERVER)}
    assert PacketTransport(planner.spec, parts, plan, LAYOUT, 2**20, 2**22).routed().messages.of_server == (4, each)


@pytest.mark.parametrize("rate", [None, 1e6, 1e9])
def test_a_pair_of_workers_has_one_request_where_rows_are_few(rate):
    spec = ShuffleSpec(3200, 32, Choices())
    transport = Transport(spec, {3: OwnPlanner(spec, 3).plan(1, "peer")}, None, LAYOUT, 2**23, 2**25)
    flows = transport.with_messages(rate).messages
    assert {flow.n_messages for _, each in (flows.sends[3], flows.receives[3]) for flow in each.values()} == {1}
