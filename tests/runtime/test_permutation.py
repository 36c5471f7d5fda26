"""Rows in a random order, or by their indices: what NumPy gives, whatever the chunks and the workers."""

from __future__ import annotations

from collections import Counter

import dask.array
import numpy as np
import pytest
from distributed import futures_of, wait
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dshuffle
from dshuffle.errors import InvalidParameter
from dshuffle.runtime.gather import row_gather

from ..conftest import at_most

pytestmark = pytest.mark.slow  # real clusters

DTYPES = ["u1", "<f4", ">i8", "M8[s]", "S3", [("a", "u1"), ("b", "<f8", (2,))]]


def made(n_rows, shape, dtype):
    """An array of which no two rows are alike, as far as their bytes allow."""
    n_bytes = n_rows * int(np.prod(shape)) * np.dtype(dtype).itemsize
    filled = np.random.default_rng(n_rows).integers(1, 100, n_bytes, dtype=np.uint8)
    return filled.view(dtype).reshape(n_rows, *shape)


@settings(at_most(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chunks=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    shape=st.sampled_from([(), (1,), (3,), (2, 3)]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(-3, 3),
    persisted=st.booleans(),
)
def test_an_array_is_permuted_as_numpy_would(threads, chunks, shape, dtype, seed, persisted):
    x = made(sum(chunks), shape, dtype)
    array = dask.array.from_array(x, chunks=(tuple(chunks), *(1 for _ in shape)))
    result = dshuffle.permute(threads, threads.persist(array) if persisted else array, seed)
    assert (result.shape, result.dtype, result.chunks[0]) == (x.shape, x.dtype, tuple(chunks))
    found = threads.compute(result, sync=True)  # not by whichever client was made last
    assert found.tobytes() == x[dshuffle.row_permutation(len(x), seed)].tobytes()


def test_groups_of_several_chunks_and_rows_between_processes(processes, monkeypatch):
    monkeypatch.setattr(row_gather, "GROUP_BYTES", 4000)
    x = np.random.default_rng(0).random((1000, 5))
    array = processes.persist(dask.array.from_array(x, chunks=(37, -1)))
    result = dshuffle.permute(processes, array, 7)
    futures = futures_of(result)
    assert {future.key for future in futures} == {(result.name, chunk, 0) for chunk in range(28)}
    wait(futures)
    counts = Counter(worker for there in processes.who_has(futures).values() for worker in there)
    assert sorted(counts.values()) == [9, 9, 10]
    assert np.array_equal(processes.compute(result, sync=True), x[dshuffle.row_permutation(1000, 7)])
    assert np.array_equal(processes.compute(array, sync=True), x)


def test_an_error_of_the_input_comes_back(threads):
    def fail(block):
        raise ZeroDivisionError("no such chunk")

    array = dask.array.ones((10, 2), chunks=(5, 2)).map_blocks(fail, dtype=float, meta=np.empty((0, 0)))
    with pytest.raises(ZeroDivisionError, match="no such chunk"):
        dshuffle.permute(threads, array, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.ones(3), "data is not allowed: it is of type ndarray.*from_array"),
        (dask.array.from_array(np.array(3)), r"data.shape=\(\)"),
        (dask.array.ones(9, chunks=3)[dask.array.ones(9, chunks=3) > 0], "data.chunks=.*compute_chunk_sizes"),
        (dask.array.from_array(np.array([None, 1]), chunks=1), "data.dtype='object'"),
        (dask.array.ma.masked_array(dask.array.ones(3)), "data is not allowed: its chunks are of type MaskedArray"),
    ],
)
def test_what_cannot_be_permuted_is_refused(threads, data, message):
    with pytest.raises(InvalidParameter, match=message):
        dshuffle.permute(threads, data, 0)


@settings(at_most(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chunks=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum),
    shape=st.sampled_from([(), (3,), (2, 3)]),
    dtype=st.sampled_from(["u1", "<f8", ">i4", "M8[s]", "S3"]),
    data=st.data(),
)
def test_rows_are_those_that_numpy_takes(threads, chunks, shape, dtype, data):
    whole = (sum(chunks), *shape)
    x = np.random.default_rng(1).integers(0, 100, whole).astype("i8").view("M8[s]" if dtype == "M8[s]" else "i8")
    x = x if dtype == "M8[s]" else x.astype(dtype)
    indices = data.draw(st.lists(st.integers(-sum(chunks), sum(chunks) - 1), max_size=30))
    array = dask.array.from_array(x, chunks=(tuple(chunks), *(2 for _ in shape)))
    given = data.draw(st.sampled_from([list, np.array, lambda i: dask.array.from_array(np.array(i, int), chunks=4)]))
    result = dshuffle.take(threads, array, given(indices))
    expected = x[np.array(indices, int)]
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert threads.compute(result, sync=True).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0, 10], r"indices=10 is not allowed; it must be in \[-10, 10\)"),
        ([-11, 10], r"indices=-11 is not allowed"),
        ([0.0], "indices.dtype='float64' is not allowed; it must be integers"),
        ([True] * 10, r"For a mask, take numpy.flatnonzero\(mask\)"),
        ([[0, 1]], r"indices.shape=\(1, 2\) is not allowed"),
        (3, r"indices.shape=\(\) is not allowed"),
    ],
)
def test_what_cannot_be_taken(threads, indices, message):
    with pytest.raises(InvalidParameter, match=message):
        dshuffle.take(threads, dask.array.ones((10, 2), chunks=5), indices)
