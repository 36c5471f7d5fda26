"""Packets and held rows that are damaged: no row that is decoded from them counts as right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import ChecksumMismatch, ExchangeError
from dshuffle.planning import RELAYS

from ..conftest import at_most
from .coded_world import DELIVERIES, Message, World, pair, random_world


def damage(world: World, rows: np.ndarray, checksums: np.ndarray, item: int) -> None:
    """Flip a bit of an item or of its checksum."""
    bit = int(world.rng.integers(8 * rows.shape[1] + 32))
    if bit < 32:
        checksums[item] ^= np.uint32(1 << bit)
    else:
        rows[item, bit // 8 - 4] ^= 1 << bit % 8


def carry_until_damage_shows(world: World, target: int) -> tuple[Message, str]:
    """Carry messages, component ``target`` damaged on its way; the message with which that shows, and the words."""
    world.damaged = int(world.hops.packets[target])
    while message := world.next():
        rows, checksums = world.pack(message)
        for item in np.flatnonzero(world.items(message) == target).tolist():
            damage(world, rows, checksums, item)
        try:
            world.unpack(message, rows, checksums)
        except ChecksumMismatch as error:
            return message, str(error)
        world.arrived(message)
    raise AssertionError(f"component {target} was damaged, and all went well")


def verified_alone(world: World) -> list[int]:
    """The components that are decoded from one packet, and kept."""
    kept = np.flatnonzero(world.assignment[world.plan.samples] == world.plan.destinations)
    return [component for component in kept.tolist() if world.made_of(component).total() == 1]


@at_most(60)
@given(
    seed=st.integers(0, 2**32),
    delivery=st.sampled_from(DELIVERIES),
    relay=st.sampled_from(sorted(RELAYS)),
    excess=st.booleans(),
)
@pytest.mark.slow
def test_a_damaged_packet_is_named_at_once_and_the_right_one_taken_afterwards(
    seed: int, delivery: str, relay: str, excess: bool
) -> None:
    rng = np.random.default_rng(seed)
    world = random_world(delivery, rng, excess=excess and delivery != "leftover", relay=relay)
    if alone := verified_alone(world):
        target = int(rng.choice(alone))
        message, words = carry_until_damage_shows(world, target)
        assert target in world.items(message)
        assert f"the row of sample {world.plan.samples[target]} was decoded incorrectly" in words
        world.damaged = -1  # nobody has kept it
        world.finish(again=0.1)
        world.check()


@at_most(60)
@given(
    seed=st.integers(0, 2**32), delivery=st.sampled_from(["clique", "leftover"]), relay=st.sampled_from(sorted(RELAYS))
)
def test_a_damaged_packet_of_several_for_a_row_is_found_with_the_last_of_them(
    seed: int, delivery: str, relay: str
) -> None:
    rng = np.random.default_rng(seed)
    world = random_world(delivery, rng, excess=False, relay=relay)
    if several := sorted(set(range(world.plan.n_components)) - set(verified_alone(world))):
        message, words = carry_until_damage_shows(world, int(rng.choice(several)))
        victims = world.victims(world.damaged, message[1])
        assert any(f"the row of sample {sample} was decoded incorrectly" in words for sample in victims)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("damaged", [0, 1])
def test_a_row_of_several_packets_that_came_out_wrong_never_counts_as_right(last: int, damaged: int) -> None:
    world = pair()
    rank = world.ranks[0]
    assert rank.wanted.tolist() == [0]

    def unpack(item: int, flipped: int = 0) -> None:
        rows, checksums = world.truth.packets[[item]], world.truth.packet_sums[[item]]
        rows[0, 5] ^= flipped
        rank.decoder.unpack(item, item + 1, rows, checksums)

    unpack(1 - last, 4 * (damaged != last))
    with pytest.raises(ChecksumMismatch, match="the row of sample 0 was decoded incorrectly"):
        unpack(last, 4 * (damaged == last))
    for _ in range(2):  # asked for again, the message arrives as it should
        try:
            unpack(last)
        except ChecksumMismatch:
            continue
        np.testing.assert_array_equal(rank.cache.rows[rank.slots], world.truth.rows[[0]])


def test_a_message_of_another_shape_is_refused() -> None:
    with pytest.raises(ExchangeError, match=r"rows \(2, 21\) and checksums \(1,\); 1 rows of 21 bytes were expected"):
        pair().ranks[0].decoder.unpack(0, 1, np.zeros((2, 21), np.uint8), np.zeros(1, np.uint32))
