"""How a server that sends packets shares its window."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dshuffle.exchange.transports import PacketTransport
from dshuffle.planning import SERVER, Choices


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
