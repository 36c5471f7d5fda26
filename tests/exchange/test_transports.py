"""How many messages there are, and how a server that sends packets shares its window."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dshuffle.exchange.transports import PacketTransport, Transport
from dshuffle.planning import SERVER, Choices, ShuffleSpec
from dshuffle.planning.planner import OwnPlanner
from dshuffle.rows import RowLayout


@pytest.mark.parametrize(
    ("relay", "n_workers", "each"),
    [("pipelined", 2, 2), ("pipelined", 3, 1), ("pipelined", 9, 1), ("ring", 4, None), ("unicast", 2, None)],
)
def test_a_server_sends_equally_many_messages_at_a_time_to_workers_that_pass_them_on(relay, n_workers, each):
    spec = SimpleNamespace(n_workers=n_workers, choices=Choices(relay=relay))
    transport = SimpleNamespace(limits=SimpleNamespace(window=4), spec=spec)
    answered = PacketTransport.answered_to_one_by
    assert answered(transport, SERVER) == each
    assert answered(transport, 0) is None


@pytest.mark.parametrize("rate", [None, 1e6, 1e9])
def test_a_pair_of_workers_has_one_request_where_rows_are_few(rate):
    spec, limits = ShuffleSpec(3200, 32, Choices()), SimpleNamespace(message_bytes=2**23, window_bytes=2**25, window=4)
    layout = RowLayout.of({"x": (np.dtype("u1"), (1000,))})
    transport = Transport(spec, {3: OwnPlanner(spec, 3).plan(1, "peer")}, None, layout, limits)
    flows = transport.with_messages(rate).messages
    assert {flow.n_messages for _, each in (flows.sends[3], flows.receives[3]) for flow in each.values()} == {1}
