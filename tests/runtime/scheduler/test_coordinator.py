"""What the scheduler says to participants, and what it makes of their measurements."""

from __future__ import annotations

import asyncio
import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dshuffle.planning import SERVER, AutoDelivery, Choices, Remainder, ShuffleSpec
from dshuffle.records import Measures
from dshuffle.rows import RowLayout
from dshuffle.runtime.scheduler.coordinator import Coordinator
from dshuffle.runtime.scheduler.machine import PhaseOrder
from dshuffle.runtime.scheduler.snapshot import next_rate, rate_of
from dshuffle.runtime.session_spec import DatasetReference, PartitionSources, SessionOptions, SessionSpec
from dshuffle.runtime.settings import Settings
from dshuffle.runtime.worker.session import MemberAddresses


def spec_of(addresses: dict[int, str], former: PartitionSources | None = None) -> SessionSpec:
    layout = RowLayout.of({"x": (np.dtype("f8"), ())})
    return SessionSpec(
        "session", DatasetReference(9, layout, "identity", b"dataset"), ShuffleSpec(9, 3, Choices("global")),
        ("peer",), SessionOptions(), Settings(), Remainder(0, ()), addresses, former=former,
    )  # fmt: skip


def coordinator_of(spec: SessionSpec) -> Coordinator:
    async def made() -> Coordinator:
        scheduler: Any = SimpleNamespace(workers={})
        return Coordinator(scheduler, spec, "client", AutoDelivery({"peer": 1.0}))

    return asyncio.run(made())


def moved(session: Coordinator) -> dict[int, str]:
    """What an order says of those that have moved."""
    message = session._message_of(PhaseOrder("members", 0, 0))
    assert message is not None
    return message["addresses"]


def test_whoever_misses_orders_knows_all_addresses_after_the_last_one() -> None:
    first = {0: "a", 1: "b", 2: "c", SERVER: "s"}
    session = coordinator_of(spec_of(first))
    assert moved(session) == {}
    orders = []
    for rank, address in ((0, "d"), (2, "e"), (0, "a"), (2, "f")):  # rank 0 comes back to where it was
        session.move(rank, address)
        orders.append(moved(session))
    assert [len(order) for order in orders] == [1, 2, 2, 2]
    last = {0: "a", 1: "b", 2: "f", SERVER: "s"}
    assert session.addresses == last
    for heard in itertools.product((False, True), repeat=3):
        known = MemberAddresses(first)
        for order in itertools.compress(orders, (*heard, True)):
            known.update(order)
        assert {participant: known[participant] for participant in first} == last


def test_all_get_the_same_bytes_until_somebody_moves() -> None:
    sources = PartitionSources(0, {0: ("z", "before")})
    session = coordinator_of(spec_of({0: "a", 1: "b", 2: "c"}, sources))
    packed = session.packed_spec(0, None)
    assert session.packed_spec(2, None) is packed
    assert SessionSpec.unpacked(packed).addresses == {0: "a", 1: "b", 2: "c"}
    assert SessionSpec.unpacked(packed).former == sources
    restored = SessionSpec.unpacked(session.packed_spec(1, 3))  # from the dataset: those sources are too old
    assert restored.former is None
    session.move(1, "d")
    assert SessionSpec.unpacked(session.packed_spec(0, None)).addresses == {0: "a", 1: "d", 2: "c"}


def test_a_worker_at_the_address_of_one_that_has_retired_is_another_one() -> None:
    """As with fixed ports."""
    session = coordinator_of(spec_of({0: "a", 1: "b", 2: "c"}))
    before = session.addresses
    session.handed_over = {0: "a"}
    session.move(0, "a")
    assert not session.handed_over
    session.move(1, "d")
    assert (before[1], session.addresses[1]) == ("b", "d")  # epochs keep the addresses that they had


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
    assert rate_of(measured, cpu_idle) == rate


@pytest.mark.parametrize(
    ("before", "measured", "rate"),
    [(None, None, None), (None, 5.0, 5.0), (5.0, None, 5.0), (8.0, 1.0, 4.0), (8.0, 9.0, 9.0), (math.inf, 9.0, 9.0)],
)
def test_the_rate_falls_by_half_at_most(before, measured, rate):
    assert next_rate(before, measured) == rate
