"""Groups that somebody else made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from dshuffle.errors import CorruptChunk, DatasetError, DatasetNotFound
from dshuffle.store import open_dataset, verify_dataset

X = np.random.default_rng(0).random((23, 10, 3))
IDS = np.array([22, 0, 5, 5, 17, 1, 22])


def check(url: Any, expected: dict[str, np.ndarray]) -> None:
    dataset = open_dataset(url)
    read = dataset.read_rows(IDS)
    rows = dataset.layout.empty(len(IDS))
    dataset.read_into(rows, np.arange(len(IDS)), IDS)
    assert set(read) == set(expected)
    for name, array in expected.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array[IDS])
        np.testing.assert_array_equal(dataset.layout.column(rows, name), array[IDS])
    assert verify_dataset(dataset).bad == ()


@pytest.mark.slow
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("chunks", [(4, 10, 3), (4, 3, 2), (23, 1, 1), (100, 100, 100), (1, 10, 3)])
def test_any_chunks(tmp_path: Path, zarr_format: Any, order: Any, chunks: tuple[int, ...]) -> None:
    group = zarr.create_group(tmp_path / "g", zarr_format=zarr_format)
    order_kwargs = {"order": order} if zarr_format == 2 else {"config": {"order": order}}
    group.create_array("x", shape=X.shape, dtype="f8", chunks=chunks, **order_kwargs)[:] = X
    group.create_array("y", shape=(23,), dtype="i4", chunks=(5,))[:] = np.arange(23)
    group.create_group("sub").create_array("other", shape=(3,), dtype="i4")
    check(tmp_path / "g", {"x": X, "y": np.arange(23, dtype="i4")})
    assert open_dataset(tmp_path / "g").arrays["x"].chunk_rows == chunks[0]


def test_big_endian_v2_keeps_its_byte_order(tmp_path: Path) -> None:
    array = np.arange(23, dtype=">i4")
    zarr.create_group(tmp_path / "g", zarr_format=2).create_array("y", data=array, chunks=(5,))
    check(tmp_path / "g", {"y": array})


@pytest.mark.parametrize(
    ("chunks", "shards", "requests"),
    [
        ((2, 10, 3), (8, 10, 3), {3}),
        # The last shard reaches beyond the array, so zarr does not take it for whole. It fetches the index, then 6
        # chunks, which newer releases fetch as one range.
        ((1, 5, 3), (4, 10, 3), {5 + 1 + 1, 5 + 1 + 6}),
    ],
)
def test_shards(tmp_path: Path, chunks: tuple[int, ...], shards: tuple[int, ...], requests: set[int]) -> None:
    array = zarr.create_group(tmp_path / "g").create_array("x", shape=X.shape, dtype="f8", chunks=chunks, shards=shards)
    array[:] = X
    check(tmp_path / "g", {"x": X})
    dataset = open_dataset(tmp_path / "g")
    dataset.read_rows(np.arange(23))
    # A small shard that is wanted whole comes in one request.
    assert dataset.traffic.requests in requests
    shard = next(path for path in (tmp_path / "g" / "x" / "c").rglob("*") if path.is_file())
    shard.write_bytes(shard.read_bytes()[:-3])
    key = shard.relative_to(tmp_path / "g").as_posix()
    with pytest.raises(CorruptChunk, match=key):
        dataset.read_rows(np.arange(23))


def test_an_absent_chunk_of_a_foreign_group_is_its_fill_value(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "g")
    group.create_array("x", shape=(10,), dtype="i4", chunks=(5,), fill_value=7)[:5] = 1
    assert open_dataset(tmp_path / "g").read_rows([4, 5])["x"].tolist() == [1, 7]


def test_what_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFound, match=r"no dataset exists at .*absent"):
        open_dataset(tmp_path / "absent")
    with pytest.raises(DatasetNotFound, match="process that created them"):
        open_dataset("memory://absent")
    zarr.create_array(tmp_path / "array", shape=(3,), dtype="i4")
    zarr.create_array(tmp_path / "array2", shape=(3,), dtype="i4", zarr_format=2)
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "zarr.json").write_text("{")
    for name, words in {
        "array": "a Zarr array",
        "array2": "a Zarr array",
        "file": "a file",
        "folder": "a folder without zarr.json",
        "empty": "an empty folder",
        "broken": "zarr.json cannot be read",
    }.items():
        with pytest.raises(DatasetNotFound, match=rf"{name} is .*{words}"):
            open_dataset(tmp_path / name)


def test_groups_that_are_no_dataset(tmp_path: Path) -> None:
    group = zarr.create_group(tmp_path / "g")
    with pytest.raises(DatasetError, match=r"no arrays of samples$"):
        open_dataset(tmp_path / "g")
    group.create_array("x", shape=(0, 3), dtype="i4")
    with pytest.raises(DatasetError, match="no samples"):
        open_dataset(tmp_path / "g")


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_items_of_variable_length(tmp_path: Path, zarr_format: Any) -> None:
    group = zarr.create_group(tmp_path / "g", zarr_format=zarr_format)
    group.create_array("words", shape=(4,), dtype=str)
    with pytest.raises(DatasetError, match=r"no arrays of samples: words: its items have different lengths"):
        open_dataset(tmp_path / "g")
