"""The registry of transports, and which of them an exchange gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dshuffle.exchange.transports import TRANSPORTS, transport_of
from dshuffle.planning import DELIVERIES, SERVER, Choices


def test_every_delivery_names_a_transport():
    assert {delivery.transport for delivery in DELIVERIES.values()} == set(TRANSPORTS)
    assert all(transport_of(name).name == delivery.transport for name, delivery in DELIVERIES.items())


def test_those_that_pass_rows_on_have_forwarders():
    """The memory that planning sets aside, and the forwarders of the exchange, belong together."""
    for name, delivery in DELIVERIES.items():
        kept = delivery.passed_on(9, relay="unicast", in_chunks=False, most_incoming=100)
        assert (kept > 0) == transport_of(name).forwards, name


@pytest.mark.parametrize(
    ("relay", "n_workers", "each"),
    [("pipelined", 2, 2), ("pipelined", 3, 1), ("pipelined", 9, 1), ("ring", 4, None), ("unicast", 2, None)],
)
def test_a_server_sends_equally_many_messages_at_a_time_to_workers_that_pass_them_on(relay, n_workers, each):
    spec = SimpleNamespace(n_workers=n_workers, choices=Choices(relay=relay))
    transport = SimpleNamespace(plan=SimpleNamespace(limits=SimpleNamespace(window=4), spec=spec))
    answered = TRANSPORTS["packets"].answered_to_one_by
    assert answered(transport, SERVER) == each
    assert answered(transport, 0) is None
