"""Addresses go to each participant once, and afterwards only those that have changed."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np

from dshuffle.planning import SERVER, Choices, Remainder, ShuffleSpec
from dshuffle.rows import RowLayout
from dshuffle.runtime.scheduler.participants import Participants
from dshuffle.runtime.session_spec import DatasetReference, PartitionSources, SessionOptions, SessionSpec
from dshuffle.runtime.settings import Settings
from dshuffle.runtime.worker.session import MemberAddresses


def spec_of(addresses: dict[int, str], former: PartitionSources | None = None) -> SessionSpec:
    layout = RowLayout.of({"x": (np.dtype("f8"), ())})
    return SessionSpec(
        "session", DatasetReference(9, layout, "identity", "ends", b"dataset"), ShuffleSpec(9, 3, Choices("global")),
        ("peer",), SessionOptions(), Settings(), Remainder(0, ()), addresses, former=former,
    )  # fmt: skip


def participants_of(spec: SessionSpec) -> Participants:
    scheduler: Any = SimpleNamespace()
    return Participants(scheduler, spec)


def test_whoever_misses_orders_knows_all_addresses_after_the_last_one() -> None:
    first = {0: "a", 1: "b", 2: "c", SERVER: "s"}
    participants = participants_of(spec_of(first))
    assert participants.moved == {}
    orders = []
    for rank, address in ((0, "d"), (2, "e"), (0, "a"), (2, "f")):  # rank 0 comes back to where it was
        participants.move(rank, address)
        orders.append(participants.moved)
    assert [len(order) for order in orders] == [1, 2, 2, 2]
    last = {0: "a", 1: "b", 2: "f", SERVER: "s"}
    assert participants.addresses == last
    for heard in itertools.product((False, True), repeat=3):
        known = MemberAddresses(first)
        for order in itertools.compress(orders, (*heard, True)):
            known.update(order)
        assert {participant: known[participant] for participant in first} == last
    assert participants.drop(SERVER) == "s"
    assert SERVER not in participants.moved


def test_all_get_the_same_bytes_until_somebody_moves() -> None:
    sources = PartitionSources(0, {0: ("z", "before")})
    participants = participants_of(spec_of({0: "a", 1: "b", 2: "c"}, sources))
    packed = participants.packed_spec(0, None)
    assert participants.packed_spec(2, None) is packed
    assert SessionSpec.unpacked(packed).addresses == {0: "a", 1: "b", 2: "c"}
    assert SessionSpec.unpacked(packed).former == sources
    restored = SessionSpec.unpacked(participants.packed_spec(1, 3))  # from the dataset: those sources are too old
    assert restored.former is None
    participants.move(1, "d")
    assert SessionSpec.unpacked(participants.packed_spec(0, None)).addresses == {0: "a", 1: "d", 2: "c"}


def test_thousands_of_addresses_are_short() -> None:
    addresses = {rank: f"tcp://10.0.{rank >> 8}.{rank & 255}:{40000 + rank % 7}" for rank in range(4096)}
    assert len(participants_of(spec_of(addresses)).packed_spec(0, None)) < 30_000


def test_epochs_share_the_addresses_that_they_had() -> None:
    participants = participants_of(spec_of({0: "a", 1: "b", 2: "c"}))
    before = participants.snapshot
    assert participants.snapshot is before
    participants.move(1, "d")
    assert (before[1], participants.snapshot[1]) == ("b", "d")


def test_a_worker_at_the_address_of_one_that_has_retired_is_another_one() -> None:
    """As with fixed ports."""
    participants = participants_of(spec_of({0: "a", 1: "b", 2: "c"}))
    participants.retires("a", [0, 1, 2], 1.0)
    assert participants.has_retired(0, 2.0, recently=False)
    assert participants.handed_over == {0: ("a", "session")}
    participants.move(0, "a")
    assert not participants.has_retired(0, 2.0, recently=False)
    assert not participants.handed_over
    assert not participants.is_read("a", [], 2.0)
