"""Lost and damaged chunks are named."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr

from dshuffle.errors import CorruptChunk, DatasetError
from dshuffle.store import create_dataset, open_dataset, verify_dataset

X = np.arange(60.0).reshape(20, 3)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[17] ^= 1
    path.write_bytes(data)


DAMAGES = [truncate, empty, flip, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_chunk_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": X, "y": np.zeros(20)}, chunk_rows=6)
    damage(tmp_path / "d" / "y" / "c" / "2")
    words = rf"chunk \(2,\) of array 'y' of {tmp_path}/d \(store key 'y/c/2'; samples 12 to 17\)"
    with pytest.raises(CorruptChunk, match=words) as caught:
        dataset.read_rows(np.arange(20))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(CorruptChunk, match=words):
        dataset.read_into(dataset.layout.empty(1), [0], [13])
    # The other chunks still serve.
    np.testing.assert_array_equal(dataset.read_rows([11, 18])["x"], X[[11, 18]])


def test_the_last_chunk_names_the_samples_that_exist(tmp_path: Path) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": X}, chunk_rows=6)
    truncate(tmp_path / "d" / "x" / "c" / "3" / "0")
    with pytest.raises(CorruptChunk, match="samples 18 to 19"):
        dataset.read_rows([19])


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("damage", [truncate, empty])
def test_foreign_chunks_on_two_axes(tmp_path: Path, zarr_format: int, damage: Callable[[Path], None]) -> None:
    group = zarr.create_group(tmp_path / "g", zarr_format=zarr_format)  # type: ignore[arg-type]
    group.create_array("x", shape=X.shape, dtype="f8", chunks=(6, 2), compressors=None)[:] = X
    key = "x/1.1" if zarr_format == 2 else "x/c/1/1"
    damage(tmp_path / "g" / key)
    with pytest.raises(CorruptChunk, match=rf"chunk \(1, 1\) of array 'x' .*store key '{key}'"):
        open_dataset(tmp_path / "g").read_rows([0, 19, 7])


def test_verify_finds_all(tmp_path: Path) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": X, "y": np.zeros(20)}, chunk_rows=6)
    calls: list[tuple[int, int]] = []
    report = verify_dataset(dataset, progress=lambda done, total: calls.append((done, total)))
    assert (report.n_chunks, report.bytes, report.bad) == (8, X.nbytes + 160, ())
    assert report.ok
    assert calls == [(i, 8) for i in range(1, 9)]
    assert dataset.traffic.requests == 8

    for damage, key in zip(DAMAGES, ("x/c/0/0", "y/c/0", "y/c/1", "x/c/3/0"), strict=True):
        damage(tmp_path / "d" / key)
    report = verify_dataset(dataset)
    assert not report.ok
    assert report.n_chunks == 8
    assert [key for message in report.bad for key in ("x/c/0/0", "x/c/3/0", "y/c/0", "y/c/1") if key in message] == [
        "x/c/0/0",
        "x/c/3/0",
        "y/c/0",
        "y/c/1",
    ]


def test_a_write_that_was_cut_off_does_not_open(tmp_path: Path) -> None:
    create_dataset(tmp_path / "d", {"x": X})
    zarr.open_group(tmp_path / "d").attrs["dshuffle"] = {"version": 1, "complete": False}
    with pytest.raises(DatasetError, match="never finished"):
        open_dataset(tmp_path / "d")
