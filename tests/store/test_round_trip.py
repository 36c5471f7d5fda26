"""What is written is read back, compared with plain NumPy indexing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.store import create_dataset, open_dataset, verify_dataset

from ..conftest import at_most

NAMES = "? i1 u2 <i4 <u8 <f2 <f4 <f8 <c8 <c16 S5 <U3 <M8[ns] <m8[s]"
DTYPES = [*map(np.dtype, NAMES.split())]


def values(dtype: np.dtype[Any], shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Arrays with different bytes everywhere, NaN payloads and not-a-time included."""
    rng = np.random.default_rng(seed)
    if dtype.kind in "SU":
        return rng.integers(0, 10 ** (dtype.itemsize // (4 if dtype.kind == "U" else 1)), shape).astype(dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    return rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8).view(dtype)[..., 0]


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@st.composite
def datasets(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], int | None, int | None, np.ndarray]:
    n = draw(st.integers(1, 30))
    chunk_rows = draw(st.none() | st.integers(1, n + 2))
    n_chunks = 0 if chunk_rows is None else draw(st.integers(0, 9))  # of a shard
    arrays = {}
    for i in range(draw(st.integers(1, 3))):
        shape = (n, *draw(st.lists(st.integers(0, 3), max_size=2)))
        arrays[f"array {i}"] = values(draw(st.sampled_from(DTYPES)), shape, draw(st.integers(0, 99)))
    ids = np.array(draw(st.lists(st.integers(0, n - 1), max_size=40)), dtype=draw(st.sampled_from(["i8", "u2"])))
    return arrays, chunk_rows, n_chunks * (chunk_rows or 0) or None, ids


@given(datasets(), st.integers(1, 300), st.randoms(use_true_random=False))
@at_most(60)
def test_rows_are_those_of_numpy(
    drawn: tuple[dict[str, np.ndarray], int | None, int | None, np.ndarray], memory_budget: int, random: Any
) -> None:
    arrays, chunk_rows, shard_rows, ids = drawn
    options: dict[str, Any] = {"chunk_rows": chunk_rows, "shard_rows": shard_rows}
    dataset = create_dataset("memory://round-trip", arrays, overwrite=True, **options)
    n = len(next(iter(arrays.values())))
    assert dataset.n_samples == n
    assert dataset.row_nbytes == sum(array[:1].nbytes for array in arrays.values())
    for name, info in dataset.arrays.items():
        assert (info.dtype, info.shape) == (arrays[name].dtype, arrays[name].shape[1:])
        assert 1 <= info.chunk_rows <= n
        assert chunk_rows is None or info.chunk_rows == min(chunk_rows, n)
        assert (info.shard_rows is None) == (shard_rows is None)
        assert info.shard_rows is None or (info.shard_rows % info.chunk_rows, info.shard_rows <= shard_rows) == (0, 1)

    read = dataset.read_rows(ids, memory_budget=memory_budget)
    assert set(read) == set(arrays)
    for name in arrays:
        assert same_bytes(read[name], arrays[name][ids])

    slots = random.sample(range(len(ids) + 3), len(ids))
    rows = np.full((len(ids) + 3, dataset.row_nbytes), 7, np.uint8)
    dataset.read_into(rows, slots, ids, memory_budget=memory_budget)
    for name in arrays:
        assert same_bytes(dataset.layout.column(rows, name)[slots], arrays[name][ids])
    untouched = np.setdiff1d(np.arange(len(rows)), slots)
    assert (rows[untouched] == 7).all()
    assert verify_dataset(dataset).bad == ()


@pytest.mark.parametrize(("given_dtype", "stored"), [(">f8", "<f8"), (">U3", "<U3")])
@pytest.mark.parametrize("as_given", [np.asarray, da.from_array])
def test_what_zarr_cannot_express_is_kept_by_value(given_dtype: Any, stored: Any, as_given: Callable[..., Any]) -> None:
    array = np.arange(12).astype(given_dtype)
    dataset = create_dataset("memory://by-value", {"x": as_given(array)}, chunk_rows=5, overwrite=True)
    assert dataset.arrays["x"].dtype == np.dtype(stored)
    np.testing.assert_array_equal(dataset.read_rows(np.arange(12))["x"], array.astype(stored))


def test_array_likes_and_the_default_chunk() -> None:
    wide = np.zeros((10, 1 << 18), np.float64)  # 2 MiB a row
    dataset = create_dataset("memory://likes", {"x": [[1, 2]] * 10, "y": range(10), "w": wide}, overwrite=True)
    assert dataset.arrays["w"].chunk_rows == 2
    assert dataset.arrays["x"].chunk_rows == 10
    assert dataset.read_rows([3, 9])["y"].tolist() == [3, 9]


@pytest.mark.parametrize(("chunk_rows", "shard_rows"), [(7, None), (None, None), (5, 15)])
def test_dask_arrays_are_written_block_by_block(tmp_path: Any, chunk_rows: int | None, shard_rows: int | None) -> None:
    x = np.arange(1000.0).reshape(50, 20)
    largest = 0

    def watch(block: np.ndarray) -> np.ndarray:
        nonlocal largest
        largest = max(largest, block.nbytes)
        return block + 1

    lazy = da.from_array(x, chunks=(3, 8)).map_blocks(watch, meta=np.empty((0, 0)))
    arrays = {"x": lazy, "y": da.arange(50, chunks=11)}
    with dask.config.set(scheduler="threads"):  # in this process, whatever client another test has open
        dataset = create_dataset(tmp_path / "d", arrays, chunk_rows=chunk_rows, shard_rows=shard_rows)
    assert 0 < largest <= 3 * 8 * 8
    read = dataset.read_rows(np.arange(50)[::-1])
    np.testing.assert_array_equal(read["x"], x[::-1] + 1)
    np.testing.assert_array_equal(read["y"], np.arange(50)[::-1])
    assert dataset.arrays["x"].chunk_rows == (chunk_rows or 50)


def test_stores_through_fsspec(tmp_path: Any) -> None:
    url, options = f"local://{tmp_path}/x.zarr", {"auto_mkdir": True}
    x = np.arange(40).reshape(20, 2)
    create_dataset(url, {"x": x, "old": x}, chunk_rows=3, storage_options=options)
    dataset = create_dataset(url, {"x": x + 1}, chunk_rows=4, overwrite=True, storage_options=options)
    assert list(dataset.arrays) == ["x"]
    np.testing.assert_array_equal(dataset.read_rows([19, 0, 19])["x"], x[[19, 0, 19]] + 1)
    assert dataset.traffic.requests == 2
    assert open_dataset(tmp_path / "x.zarr").n_samples == 20
    assert "auto_mkdir" not in repr(dataset)
