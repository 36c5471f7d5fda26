"""Shards: what is written, how little is read, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, ZstdCodec

from dshuffle.errors import CorruptChunk, InvalidParameter
from dshuffle.store import create_dataset, open_dataset, reader, verify_dataset

from ..conftest import at_most

X = np.arange(600.0).reshape(100, 6)
CHUNK = 5 * 6 * 8 + 4


@pytest.mark.slow
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.lists(st.integers(0, 39), max_size=30))
@at_most(40)
def test_rows_are_those_of_numpy(n: int, chunk_rows: int, chunks: int, ids: list[int]) -> None:
    x, y = np.arange(3.0 * n).reshape(n, 3), np.arange(n, dtype="i2")
    arrays = {"x": x, "y": y}
    shard_rows = chunk_rows * chunks
    made = create_dataset("memory://shards", arrays, chunk_rows=chunk_rows, shard_rows=shard_rows, overwrite=True)
    wanted = np.array([i for i in ids if i < n], dtype=int)
    read = open_dataset("memory://shards").read_rows(wanted)
    np.testing.assert_array_equal(read["x"], x[wanted])
    np.testing.assert_array_equal(read["y"], y[wanted])
    info = made.arrays["x"]
    assert info.chunk_rows == min(chunk_rows, n)
    assert info.shard_rows is not None
    assert info.shard_rows % info.chunk_rows == 0
    assert info.shard_rows <= shard_rows
    assert verify_dataset(made).ok


def test_one_row_costs_its_chunk_and_the_index(tmp_path: Path) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": X}, chunk_rows=5, shard_rows=50)
    assert len([path for path in (tmp_path / "d" / "x" / "c").rglob("*") if path.is_file()]) == 2
    index = 10 * 16 + 4
    dataset.read_rows([7])
    assert (dataset.traffic.requests, dataset.traffic.fetched_bytes) == (2, CHUNK + index)
    # Chunks 0, 2, 3 of the first shard, with what lies between, and 0 of the second: each index once.
    before = dataset.traffic
    np.testing.assert_array_equal(dataset.read_rows([0, 11, 19, 50])["x"], X[[0, 11, 19, 50]])
    cost = dataset.traffic - before
    assert (cost.requests, cost.fetched_bytes) == (2 + 2, 2 * index + 5 * CHUNK)
    before = dataset.traffic
    dataset.read_rows(np.arange(100))
    cost = dataset.traffic - before
    assert (cost.requests, cost.fetched_bytes) == (2, 2 * (10 * CHUNK + index)), "whole shards come in one request each"


def test_a_shard_larger_than_a_request_is_read_in_parts(tmp_path: Path, monkeypatch: Any) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": X}, chunk_rows=5, shard_rows=100)
    monkeypatch.setattr(reader, "_SPAN_NBYTES", 3 * 5 * 48)
    np.testing.assert_array_equal(dataset.read_rows(np.arange(100))["x"], X)
    assert dataset.traffic.requests == 7 + 7, "each part reads the index"
    assert dataset.traffic.fetched_bytes == 7 * (20 * 16 + 4) + 20 * CHUNK


@pytest.mark.parametrize("at", [40, -9])
def test_a_damaged_shard_is_named(tmp_path: Path, at: int) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": X}, chunk_rows=5, shard_rows=50)
    path = tmp_path / "d" / "x" / "c" / "1" / "0"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    for ids in ([50], np.arange(100)):
        with pytest.raises(
            CorruptChunk, match=r"chunk \(10, 0\) of array 'x'.*'x/c/1/0'; samples 50 to 54\).*checksum"
        ):
            dataset.read_rows(ids)
    np.testing.assert_array_equal(dataset.read_rows([49])["x"], X[[49]])


def test_zeros_are_written_too(tmp_path: Path) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": np.zeros((100, 6))}, chunk_rows=5, shard_rows=50)
    dataset.read_rows([7])
    assert dataset.traffic.fetched_bytes == CHUNK + 164


def test_dask_arrays_are_written_shard_by_shard(tmp_path: Path) -> None:
    with dask.config.set(scheduler="threads"):
        dataset = create_dataset(tmp_path / "d", {"x": da.from_array(X, chunks=(7, 2))}, chunk_rows=5, shard_rows=15)
    np.testing.assert_array_equal(dataset.read_rows(np.arange(100))["x"], X)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk_rows": 5, "shard_rows": 12}, r"shard_rows=12 .*multiple of the rows of a chunk \(5\).*15"),
        ({"shard_rows": 12}, r"shard_rows=12 .*Give chunk_rows"),
        ({"chunk_rows": 5, "shard_rows": 0}, "shard_rows=0 "),
        ({"chunk_rows": 5, "shard_rows": 2.5}, "shard_rows=2.5 "),
    ],
)
def test_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        create_dataset(tmp_path / "d", {"x": X}, **options)
    assert not list(tmp_path.iterdir())


CODECS = [
    [],
    [Crc32cCodec()],
    [ZstdCodec(level=1)],
    [GzipCodec(level=1), Crc32cCodec()],
    [BloscCodec(cname="lz4")],
    [ZstdCodec(level=1, checksum=True), Crc32cCodec()],
]


@pytest.mark.slow
@pytest.mark.parametrize("codecs", CODECS)
@pytest.mark.parametrize("sharded", ["", "end", "start"])
@pytest.mark.parametrize("endian", ["little", "big"])
def test_foreign_codecs(tmp_path: Path, codecs: list[Any], sharded: str, endian: Any) -> None:
    group = zarr.create_group(tmp_path / "g")
    serializer: Any = BytesCodec(endian=endian)
    if sharded:
        inner = [serializer, *codecs]
        serializer = ShardingCodec(chunk_shape=(5, 6), codecs=inner, index_location=sharded)
        array = group.create_array(
            "x", shape=X.shape, dtype="f8", chunks=(20, 6), serializer=serializer, compressors=(), filters=()
        )
    else:
        array = group.create_array(
            "x", shape=X.shape, dtype="f8", chunks=(5, 6), serializer=serializer, compressors=codecs, filters=()
        )
    array[:83] = X[:83]
    expected = X.copy()
    expected[83:] = 0
    dataset = open_dataset(tmp_path / "g")
    for ids in ([3], [82, 83, 99, 3, 3], np.arange(100)):
        np.testing.assert_array_equal(dataset.read_rows(ids)["x"], expected[ids])
