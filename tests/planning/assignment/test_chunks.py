"""The assignment ``chunks``: whole chunks to workers, balanced to within one, and nothing that is not needed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import CACHINGS, SHARDINGS, Choices, Chunks, EpochPlanner, ShuffleSpec
from dshuffle.planning.assignment.initial import first_ranks
from dshuffle.planning.exchange_epochs import largest_share

from ...draws import next_ranks


@st.composite
def shapes(draw):
    """Samples, workers, and rows of a chunk such that there are enough chunks."""
    n = draw(st.integers(1, 9))
    q = draw(st.integers(n, 90))
    return q, n, draw(st.integers(1, q if n == 1 else (q - 1) // (n - 1)))


def draws(q, n, rows, seed):
    """The first assignments, and those of some epochs."""
    firsts = [first_ranks(sharding, q, n, seed=seed, chunk_rows=rows) for sharding in sorted(SHARDINGS)]
    return [*firsts, *(next_ranks(Chunks(rows), firsts[0], n, seed=seed, epoch=epoch) for epoch in (1, 2, 3))]


@given(shapes(), st.integers())
def test_chunks_stay_whole_and_sizes_differ_by_one_chunk_at_most(shape, seed):
    q, n, rows = shape
    for ranks in draws(q, n, rows, seed):
        assert ranks.dtype == np.int32
        for start in range(0, q, rows):
            assert len(set(ranks[start : start + rows].tolist())) == 1
        sizes = np.bincount(ranks, minlength=n)
        assert len(sizes) == n
        assert sizes.min() > 0
        assert np.ptp(sizes) <= rows
        assert sizes.max() == largest_share(q, n, rows)


def test_every_chunk_goes_everywhere_and_nobody_is_favoured():
    q, n, rows, epochs = 68, 3, 10, 3000  # six whole chunks and one of eight rows
    start = np.zeros(q, dtype=int)
    counts, sizes = np.zeros((7, n)), np.zeros(n)
    together = 0
    for epoch in range(epochs):
        ranks = next_ranks(Chunks(rows), start, n, seed=0, epoch=epoch)
        counts[np.arange(7), ranks[::rows]] += 1
        sizes += np.bincount(ranks)
        together += ranks[0] == ranks[10]
    # 1000 of each with a standard deviation of 26; two whole chunks share a worker with probability 1/5.
    assert np.abs(counts - 1000).max() < 130
    assert np.abs(sizes / epochs - q / n).max() < 0.5
    assert abs(together / epochs - 1 / 5) < 0.04


@pytest.mark.parametrize("caching", CACHINGS)
def test_with_excess_caches_are_full(caching):
    spec = ShuffleSpec(
        1003,
        4,
        Choices(assignment=Chunks(64), delivery="peer", caching=caching, cache_fraction=0.5, sharding="random", seed=0),
    )
    planner = EpochPlanner(spec)
    planner.load()
    for _ in range(5):
        plan = planner.advance()
        for rank in range(4):
            held = len(plan.for_worker(rank).held)
            assert held <= spec.capacity == 501
            assert held >= 0.95 * spec.capacity


def test_a_fraction_that_holds_no_more_than_the_largest_share_is_no_excess():
    spec = ShuffleSpec(
        1000, 4, Choices(assignment=Chunks(200), delivery="leftover", cache_fraction=0.3, sharding="random", seed=0)
    )
    assert (spec.capacity, spec.largest_share, spec.most_workers) == (400, 400, 5)


def test_fewer_chunks_than_workers_are_refused():
    message = r"chunk_rows=34 .*at most 33, for 100 samples and 4 workers.*There are only 3 chunks,"
    with pytest.raises(InvalidParameter, match=message):
        first_ranks("random", 100, 4, seed=0, chunk_rows=34)
    with pytest.raises(InvalidParameter, match=message):
        next_ranks(Chunks(34), np.zeros(100, int), 4, seed=0, epoch=1)
    assert len(set(first_ranks("random", 100, 4, seed=0, chunk_rows=33).tolist())) == 4
