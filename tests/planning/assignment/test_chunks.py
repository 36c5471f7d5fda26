"""The assignment ``chunks``: whole chunks to workers, balanced to within one, and nothing that is not needed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import SHARDINGS, Choices, Chunks, ShuffleSpec, first_ranks
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


def test_a_fraction_that_holds_no_more_than_the_largest_share_is_no_excess():
    spec = ShuffleSpec(1000, 4, Choices(Chunks(200), "leftover", cache_fraction=0.3))
    assert (spec.capacity, spec.largest_share, spec.most_workers) == (400, 400, 5)


def test_fewer_chunks_than_workers_are_refused():
    message = r"chunk_rows=34 .*at most 33, for 100 samples and 4 workers.*The number of chunks is 3,"
    with pytest.raises(InvalidParameter, match=message):
        next_ranks(Chunks(34), np.zeros(100, int), 4, seed=0, epoch=1)
    assert len(set(first_ranks("random", 100, 4, seed=0, chunk_rows=33).tolist())) == 4
