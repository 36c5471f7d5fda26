"""Whole coded exchanges without a network: messages in any order that gates allow, against the store's rows."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from dshuffle.planning import RELAYS

from .coded_world import DELIVERIES, ROW_SIZES, World, packets_of, random_world


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """Rows that took several packets, by delivery and relay."""
    return Counter()


@pytest.mark.parametrize("relay", sorted(RELAYS))
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("seed", range(16))
def test_every_rank_gets_the_rows_of_the_store(seed: int, delivery: str, relay: str, seen: Counter[str]) -> None:
    rng = np.random.default_rng(seed)
    nbytes, excess = ROW_SIZES[seed % 3], delivery != "leftover" and seed % 2 == 0
    world = random_world(delivery, rng, excess=excess, relay=relay, nbytes=nbytes)
    wanted = np.flatnonzero(world.assignment[world.plan.samples] == world.plan.destinations)
    seen[f"{delivery}, {relay}"] += sum(world.made_of(component).total() > 1 for component in wanted.tolist())
    world.finish(again=0.3)
    world.check()


@pytest.mark.slow
def test_some_rows_took_several_packets(seen: Counter[str]) -> None:
    """The tests above are worth less if all packets could be decoded one by one."""
    for delivery in ("clique", "leftover"):
        for relay in RELAYS:
            assert seen[f"{delivery}, {relay}"] >= 10, seen


def chain(length: int, rng: np.random.Generator, *, relay: str, nbytes: int = 21) -> World:
    """A world where worker 0 wants sample 0 alone, and needs all packets for it.

    They have the samples 0 and 1, 1 and 2, and so on, the last by itself, each together with one that worker 0 holds.
    """
    packets = [[(i, 0), (i + 1, 1 + i % 2), (length + i, 3)] for i in range(length - 1)] + [[(length - 1, 0)]]
    holders = [0b1100 if sample % 2 else 0b1010 for sample in range(length)] + [0b0111] * (length - 1)
    assignment = [0, *(1 if sample % 2 else 2 for sample in range(1, length)), *[3] * (length - 1)]
    return World(4, packets_of(*packets), holders, assignment, rng, relay=relay, nbytes=nbytes)


@pytest.mark.parametrize("relay", sorted(RELAYS))
def test_a_long_chain(relay: str) -> None:
    world = chain(80, np.random.default_rng(1), relay=relay)
    assert world.made_of(0).total() == 80
    world.finish(again=0.3)
    world.check()
