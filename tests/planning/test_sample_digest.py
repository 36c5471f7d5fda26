"""Digests of samples: equal for the same samples however they are divided, and different for any others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.planning import Choices, GivenSharding, ShuffleSpec
from dshuffle.planning.randomness import random_words
from dshuffle.planning.remainder import SampleDigest, due_in_an_epoch, training_orders

WAYS = [
    Choices("global", seed=-3),
    Choices("partial:0.3"),
    Choices("local", sharding="round-robin"),
    Choices("chunks:7"),
    Choices("global", cache_fraction=0.8),
    Choices("aligned", "leftover"),
    Choices("global", "coded", cache_fraction=0.8),
]

IDS = st.integers(0, 2**63 - 1)


def splitmix64(word: int) -> int:
    """The finaliser of SplitMix64 in arithmetic without overflow, as printed in the paper."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def by_hand(samples: list[int], seed: int) -> list[int]:
    first, second = random_words(2, "digest", seed).tolist()
    hashes = [[splitmix64((sample + key) % 2**64) for sample in samples] for key in (first, second)]
    return [len(samples), sum(samples) % 2**64, sum(hashes[0]) % 2**64, sum(hashes[1]) % 2**64]


def digest(samples: list[int], seed: int = 0) -> SampleDigest:
    return SampleDigest.of(np.array(samples, np.int64), seed)


def total(digests: list[SampleDigest]) -> SampleDigest:
    return SampleDigest.summed(each.fields for each in digests)


@given(st.lists(IDS, max_size=30), st.integers(-(2**70), 2**70))
def test_a_digest_is_the_sums_that_it_says(samples: list[int], seed: int) -> None:
    assert digest(samples, seed).fields == by_hand(samples, seed)


@given(st.data(), st.integers(1, 300), st.integers(1, 12))
def test_every_partition_of_all_samples_passes_and_no_other_one(data: st.DataObject, q: int, n: int) -> None:
    spec = ShuffleSpec(q, min(q, n), Choices("global", seed=5))
    due = total([due_in_an_epoch(spec, rank) for rank in range(spec.n_workers)])
    ranks = data.draw(st.lists(st.integers(0, n - 1), min_size=q, max_size=q))
    shares = [[sample for sample in range(q) if ranks[sample] == rank] for rank in range(n)]
    assert total([digest(share, 5) for share in shares]) == due
    place = data.draw(st.sampled_from([(rank, i) for rank, share in enumerate(shares) for i in range(len(share))]))
    share, i = shares[place[0]], place[1]
    instead = data.draw(st.integers(0, q).filter(lambda sample: sample != share[i]))
    for wrong in (
        share[:i] + share[i + 1 :],  # one is left out
        [*share, instead],  # one is trained on twice, or does not exist
        [*share[:i], instead, *share[i + 1 :]],  # with the same number
    ):
        changed = [wrong if rank == place[0] else other for rank, other in enumerate(shares)]
        assert total([digest(each, 5) for each in changed]) != due


@pytest.mark.parametrize("choices", WAYS, ids=lambda choices: choices.label)
def test_all_ranks_draw_what_is_due_with_every_assignment(choices: Choices) -> None:
    spec = ShuffleSpec(61, 4, choices)
    due = total([due_in_an_epoch(spec, rank) for rank in range(4)])
    assert due.fields == by_hand(list(range(61)), choices.seed)
    for epoch in range(4):
        assert total([SampleDigest.of(order, choices.seed) for order in training_orders(spec, epoch)]) == due


def test_samples_that_all_train_on_are_due_once_for_each_rank() -> None:
    ranks = np.arange(60, dtype=np.int32) % 3
    spec = ShuffleSpec(60, 3, Choices("local", sharding=GivenSharding.of("mine", ranks, broadcast=[6, 10, 14])))
    due = total([due_in_an_epoch(spec, rank) for rank in range(3)])
    assert due.fields == by_hand([*range(60), *[6, 10, 14] * 2], 0)
    assert due == total([SampleDigest.of(order, 0) for order in training_orders(spec, 2)])
