"""Exchanges between slots: traced samples are where a plain simulation puts them, and draws are uniform."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.planning import Partial
from dshuffle.planning.assignment.slots import ORDERS, Blocks, SlotExchange
from dshuffle.planning.randomness import LARGEST_TABLES, ROUNDS, Bijection


@given(
    sizes=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    word=st.integers(0, 2**64 - 1),
    largest_tables=st.sampled_from([0, LARGEST_TABLES]),
)
def test_every_member_of_a_family_is_a_bijection(sizes, word, largest_tables):
    family = Bijection.family(np.array(sizes), np.uint64(word), largest_tables=largest_tables)
    for member, size in enumerate(sizes):
        members, points = np.full(size, member), np.arange(size)
        mapped = family.forward(points, members)
        assert np.sort(mapped).tolist() == points.tolist()
        assert family.inverse(mapped, members).tolist() == points.tolist()


def simulated(slots, epochs):
    """The samples of all slots, by moving one sample at a time: ``[worker][slot]``, for each epoch."""
    first = slots.first
    held = [first.samples_at(np.full(m, w), np.arange(m)).tolist() for w, m in enumerate(first.sizes.tolist())]
    yield held
    for epoch in range(1, epochs):
        exchange = slots.exchange(slots.last, epoch)
        sent = {}
        for i in range(slots.last.count):
            for worker in range(first.n_workers):
                place = int(exchange.emptied(np.array([worker]), np.array([i]))[0])
                receiver = int(exchange.shifted(np.array([worker]), np.array([i]), 1)[0])
                assert (receiver, i) not in sent
                sent[receiver, i] = held[worker][place]
        held = [list(samples) for samples in held]
        for (receiver, i), sample in sent.items():
            held[receiver][int(exchange.emptied(np.array([receiver]), np.array([i]))[0])] = sample
        yield held


@given(st.data())
def test_traces_lead_to_the_samples_of_a_simulation(data):
    n = data.draw(st.integers(2, 6))
    q = data.draw(st.integers(n, 60))
    partial = Partial(data.draw(st.sampled_from([0.2, 0.5, 1.0])), data.draw(st.booleans()))
    drawn, seed = data.draw(st.booleans()), data.draw(st.integers())
    first = Blocks.drawn(q, n, 1, "test", seed) if drawn else Blocks.contiguous(q, n)
    slots = partial.slots(first, seed)
    for epoch, held in enumerate(simulated(slots, 5)):
        for worker in range(n):
            assert slots.samples_of(worker, epoch).tolist() == held[worker]
        assert sorted(sample for samples in held for sample in samples) == list(range(q))


def leaving_pairs(size, offset, rounds, draws=400, **options):
    """How far two slots at a distance leave together more or less often than by chance, in deviations."""
    count, together = size // 10, 0
    members, points = np.zeros(size, int), np.arange(size)
    for word in range(draws):
        family = Bijection.family(np.array([size]), np.uint64(word * 977 + 1), rounds=rounds, **options)
        leaves = family.forward(points, members) < count
        together += int((leaves[offset:] & leaves[:-offset]).sum())
    chance = count * (count - 1) / (size * (size - 1))
    total = draws * (size - offset)
    return (together - total * chance) / np.sqrt(total * chance * (1 - chance))


SMALLEST = LARGEST_TABLES + 1
OFFSETS = [1, 16, 17, 18, SMALLEST // 2]  # neighbours; rows of the network's rectangle; halves


@pytest.mark.slow
@pytest.mark.parametrize("offset", OFFSETS)
def test_slots_leave_independently_in_the_smallest_networks(offset):
    assert abs(leaving_pairs(SMALLEST, offset, ROUNDS)) < 5


@pytest.mark.slow
@pytest.mark.parametrize("n_workers", [2, 3, 7])
@pytest.mark.parametrize("fixed_points", [False, True])
def test_destinations_are_uniform_over_workers(n_workers, fixed_points):
    counts = np.zeros((n_workers, n_workers))
    for seed in range(400):
        exchange = SlotExchange.drawn(np.full(n_workers, 64), 64, fixed_points, seed, 1)
        for worker in range(n_workers):
            found = exchange.shifted(np.full(64, worker), np.arange(64), 1)
            counts[worker] += np.bincount(found, minlength=n_workers)
    assert (counts.sum(axis=0) == counts.sum(axis=1)).all()
    expected = counts[~np.eye(n_workers, dtype=bool)]
    if fixed_points:
        # Rounds are shifts, so a round has all fixed points or none: 1/n of them, give or take that of 400 * 64 rounds.
        assert np.diag(counts).mean() == pytest.approx(400 * 64 / n_workers, rel=0.05)
    else:
        assert np.diag(counts).tolist() == [0] * n_workers
    # Rounds of the same order and distance are alike, which widens the spread of counts by at most 64 / ORDERS.
    statistic = ((expected - expected.mean()) ** 2 / expected.mean()).sum() / (64 / ORDERS)
    assert statistic < scipy.stats.chi2.ppf(1 - 1e-6, max(1, expected.size - 1))


@pytest.mark.slow
def test_many_exchanges_mix_like_a_uniform_draw():
    """After enough epochs, block-to-block counts and neighbours are those of independent uniform assignments."""
    q, n, epochs = 6000, 4, 12
    assert Partial(0.5).return_probability(n, epochs) == pytest.approx(1 / n, rel=0.01)
    squared, neighbours, total = [], 0, 0
    for seed in range(30):
        slots = Partial(0.5).slots(Blocks.contiguous(q, n), seed)
        ranks = np.empty(q, int)
        for worker in range(n):
            ranks[slots.samples_of(worker, epochs)] = worker
        counts = np.histogram2d(np.arange(q) * n // q, ranks, bins=n)[0]
        squared.append(((counts - q / n**2) ** 2 / (q / n**2)).sum())
        neighbours += int((ranks[1:] == ranks[:-1]).sum())
        total += q - 1
    assert np.mean(squared) / (n - 1) ** 2 == pytest.approx(1, abs=0.6)
    assert neighbours / total == pytest.approx((q / n - 1) / (q - 1), abs=5 * np.sqrt(0.1875 / total))
