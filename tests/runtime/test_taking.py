"""Rows by their indices: what NumPy's `take` gives, whatever the chunks, the workers and the axis."""

from __future__ import annotations

import dask.array
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dshuffle
from dshuffle.errors import InvalidParameter
from dshuffle.runtime.gather import row_gather

from ..conftest import at_most

pytestmark = pytest.mark.slow  # real clusters


@settings(at_most(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chunks=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum),
    shape=st.sampled_from([(), (3,), (2, 3)]),
    axis=st.integers(-3, 2),
    dtype=st.sampled_from(["u1", "<f8", ">i4", "M8[s]", "S3"]),
    data=st.data(),
)
def test_rows_are_those_that_numpy_takes(threads, chunks, shape, axis, dtype, data):
    ndim = 1 + len(shape)
    axis = max(-ndim, min(axis, ndim - 1))
    place = axis % ndim
    whole = (*shape[:place], sum(chunks), *shape[place:])
    x = np.random.default_rng(1).integers(0, 100, whole).astype("i8").view("M8[s]" if dtype == "M8[s]" else "i8")
    x = x if dtype == "M8[s]" else x.astype(dtype)
    indices = data.draw(st.lists(st.integers(-sum(chunks), sum(chunks) - 1), max_size=30))
    array = dask.array.from_array(x, chunks=(*(1 for _ in shape[:place]), tuple(chunks), *(2 for _ in shape[place:])))
    given = data.draw(st.sampled_from([list, np.array, lambda i: dask.array.from_array(np.array(i, int), chunks=4)]))
    result = dshuffle.take(threads, array, given(indices), axis)
    expected = np.take(x, np.array(indices, int), axis)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert threads.compute(result, sync=True).tobytes() == expected.tobytes()


def test_a_permutation_is_what_permute_gives(processes, monkeypatch):
    monkeypatch.setattr(row_gather, "GROUP_BYTES", 4000)
    x = processes.persist(dask.array.random.default_rng(0).random((1000, 5), chunks=(37, -1)))
    permuted = dshuffle.permute(processes, x, 7)
    taken = dshuffle.take(processes, x, dshuffle.row_permutation(1000, 7))
    assert taken.chunks == permuted.chunks
    assert np.array_equal(*processes.gather(processes.compute([taken, permuted])))


def test_samples_of_a_dataset_with_all_its_arrays(processes, small, monkeypatch):
    monkeypatch.setattr(row_gather, "CHUNK_BYTES", 2_000)
    indices = np.random.default_rng(0).integers(-1000, 1000, 300)
    result = dshuffle.take(processes, small, indices)
    expected = small.read_rows(indices % 1000)
    assert set(result) == {"x", "y"}
    for name, array in result.items():
        assert len(array.chunks[0]) == -(-300 * small.row_nbytes // 2_000)
        assert np.array_equal(processes.compute(array, sync=True), expected[name])


def test_only_chunks_that_are_wanted_are_read(threads, tmp_path):
    """Broken chunks show what was read."""
    dshuffle.create_dataset(tmp_path / "d.zarr", {"x": np.arange(100.0)}, chunk_rows=10)
    for number in range(10):
        if number not in (2, 7):
            (tmp_path / "d.zarr" / "x" / "c" / str(number)).write_bytes(b"broken")
    dataset = dshuffle.open_dataset(tmp_path / "d.zarr")
    taken = dshuffle.take(threads, dataset, [75, 20, 75, 29])["x"]
    assert threads.compute(taken, sync=True).tolist() == [75, 20, 75, 29]


@pytest.mark.parametrize(
    ("indices", "axis", "message"),
    [
        ([0, 10], 0, r"indices=10 is not allowed; it must be in \[-10, 10\)"),
        ([-11, 10], 0, r"indices=-11 is not allowed"),
        ([0.0], 0, "indices.dtype='float64' is not allowed; it must be integers"),
        ([True] * 10, 0, r"For a mask, take numpy.flatnonzero\(mask\)"),
        ([[0, 1]], 0, r"indices.shape=\(1, 2\) is not allowed"),
        (3, 0, r"indices.shape=\(\) is not allowed"),
        ([0], 2, "axis=2 is not allowed; it must be an axis of an array with 2 axes"),
        ([0], "x", "axis='x' is not allowed"),
    ],
)
def test_what_cannot_be_taken(threads, indices, axis, message):
    with pytest.raises(InvalidParameter, match=message):
        dshuffle.take(threads, dask.array.ones((10, 2), chunks=5), indices, axis)


def test_what_cannot_be_taken_from_a_dataset(threads, small):
    with pytest.raises(InvalidParameter, match="axis=1 is not allowed; it must be 0 for a dataset"):
        dshuffle.take(threads, small, [0], 1)
    with pytest.raises(InvalidParameter, match="at least one index of a dataset"):
        dshuffle.take(threads, small, [])
    with pytest.raises(InvalidParameter, match="it is of type ndarray"):
        dshuffle.take(threads, np.arange(3), [0])
