"""Exchanges between slots: traced samples are where a plain simulation puts them, and draws are uniform."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.planning import Partial
from dshuffle.planning.assignment.slots import ORDERS, Blocks, SlotExchange


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
