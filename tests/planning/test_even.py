import numpy as np
import pytest

from dshuffle.planning import CACHINGS, Aligned, Global, Local, Partial, first_ranks
from dshuffle.planning.types import held_by

from ..draws import next_ranks

ASSIGNMENTS = [Local(), Partial(0.3), Global(), Aligned()]


def epochs(q, n, capacity, assignment, count, seed=0):
    """(assignment, holders) of epoch 0 and each after it."""
    policy = CACHINGS["even"](n, capacity, seed)
    ranks = first_ranks("random", q, n, seed=seed)
    holders = policy.first(ranks)
    yield ranks, holders
    for epoch in range(1, count):
        ranks = next_ranks(assignment, ranks, n, seed=seed, epoch=epoch, holders=holders)
        holders = policy.evolve(holders, ranks, epoch)
        yield ranks, holders


def loads(holders, n):
    return np.array([held_by(holders, worker).sum() for worker in range(n)])


def sizes(holders):
    return np.bitwise_count(holders).sum(axis=1)


@pytest.mark.parametrize("assignment", ASSIGNMENTS, ids=str)
@pytest.mark.parametrize(
    ("n", "q", "capacity", "expected"),
    [
        (10, 2000, 600, {3}),
        (20, 4000, 800, {4}),
        (8, 2000, 625, {2, 3}),
        (100, 5000, 150, {3}),
    ],
)
def test_every_sample_has_as_many_holders(assignment, n, q, capacity, expected):
    for _, holders in epochs(q, n, capacity, assignment, 8):
        counts = sizes(holders)
        # All but a few samples that wait for a holder.
        assert np.isin(counts, list(expected)).mean() > 0.99
        assert counts.max() <= max(expected)
        assert counts.sum() >= 0.998 * n * capacity
        assert loads(holders, n).max() <= capacity
    if len(expected) == 2:
        assert abs((counts == 2).mean() - 0.5) < 0.02
