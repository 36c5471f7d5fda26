"""What cannot be written is refused before anything is, and what stands at the URL is never lost."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import zarr

from dshuffle.errors import DatasetError, DatasetExists, InvalidParameter
from dshuffle.store import create_dataset, open_dataset

OK = np.zeros((4, 2))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def unknown_length() -> Any:
    x = da.from_array(np.arange(10), chunks=3)
    return x[x > 4]


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        ({}, {}, "arrays is not allowed: this dict has no columns"),
        ([OK], {}, "arrays="),
        ({"x": OK, "labels": np.zeros(3)}, {}, r"'x': 4, 'labels': 3"),
        ({"x": np.zeros((0, 2))}, {}, r"\{'x': 0\}.*at least one"),
        ({"x": OK, "s": np.float64(3)}, {}, r"arrays\['s'\]\.shape=\(\)"),
        ({"x": np.array([{}, []], dtype=object)}, {}, r"arrays\['x'\]\.dtype='object'"),
        ({"x": np.array(["a"], dtype=np.dtypes.StringDType())}, {}, r"arrays\['x'\]\.dtype='StringDType"),
        ({"x": np.zeros(3, np.longdouble)}, {}, r"arrays\['x'\]\.dtype='float128'.*Zarr"),
        ({"x": np.zeros(3, [("a", "f4")])}, {}, r"arrays\['x'\]\.dtype=.*each field of a struct as an array"),
        ({"x": OK, "y": unknown_length()}, {}, r"'x': 4, 'y': 5"),
        ({"x": da.from_array(np.array([{}], dtype=object), chunks=1)}, {}, r"arrays\['x'\]\.dtype='object'"),
        ({"x": OK}, {"chunk_rows": 5, "shard_rows": 12}, r"shard_rows=12 .*multiple of chunk_rows \(5\)"),
        ({"x": OK}, {"shard_rows": 12}, r"shard_rows=12 .*Give chunk_rows"),
        ({"x": OK}, {"chunk_rows": 5, "shard_rows": 0}, "shard_rows=0 "),
        ({"x": OK}, {"chunk_rows": 0}, "chunk_rows=0 "),
        ({"": OK}, {}, "array name=''"),
        ({"a/b": OK}, {}, "array name='a/b'"),
        ({"zarr.json": OK}, {}, "array name='zarr.json'"),
        ({3: OK}, {}, "array name=3"),
        ({"x": OK}, {"storage_options": {"key": "hunter2"}}, r"storage_options=\['key'\]"),
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_refused_before_anything_is_written(
    tmp_path: Path, arrays: Any, options: dict[str, Any], words: str, overwrite: bool
) -> None:
    if overwrite:
        create_dataset(tmp_path / "deep" / "d", {"x": np.ones(5)})
    before = tree(tmp_path)
    with pytest.raises(InvalidParameter, match=words):
        create_dataset(tmp_path / "deep" / "d", arrays, overwrite=overwrite, **options)
    assert tree(tmp_path) == before


def test_an_existing_dataset_stays_without_overwrite(tmp_path: Path) -> None:
    create_dataset(tmp_path / "d", {"x": OK})
    before = tree(tmp_path)
    with pytest.raises(DatasetExists, match="overwrite=True"):
        create_dataset(tmp_path / "d", {"x": OK + 1})
    assert tree(tmp_path) == before
    create_dataset("memory://exists", {"x": OK}, overwrite=True)
    with pytest.raises(DatasetExists, match="overwrite=True"):
        create_dataset("memory://exists", {"x": OK})


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_group_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("x")
    zarr.create_array(tmp_path / "array", shape=(3,), dtype="i4")
    before = tree(tmp_path)
    for name in ("file", "thesis", "array"):
        with pytest.raises(DatasetExists, match=rf"{name} is .*only a Zarr group can be replaced"):
            create_dataset(tmp_path / name, {"x": OK}, overwrite=overwrite)
    with pytest.raises(DatasetExists, match="a folder without"):
        create_dataset(f"local://{tmp_path}/thesis", {"x": OK}, overwrite=overwrite)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_groups_and_empty_folders_are_replaced(tmp_path: Path, zarr_format: Any) -> None:
    zarr.create_group(tmp_path / "g", zarr_format=zarr_format).create_array("old", shape=(3,), dtype="i4")
    (tmp_path / "link").symlink_to(tmp_path / "g")
    (tmp_path / "empty").mkdir()
    for name in ("link", "empty"):
        assert list(create_dataset(tmp_path / name, {"x": OK}, overwrite=True).arrays) == ["x"]
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["empty", "g", "link"]
    assert list(open_dataset(tmp_path / "g").arrays) == ["x"]


def fail_in_dask(tmp_path: Path, monkeypatch: Any) -> Any:
    def broken(block: np.ndarray) -> np.ndarray:
        raise RuntimeError("no such luck")

    return da.from_array(np.arange(9), chunks=2).map_blocks(broken, dtype=int)


def fail_in_rename(tmp_path: Path, monkeypatch: Any) -> Any:
    rename = os.rename

    def broken(source: str, target: str) -> None:
        if source.endswith(".partial"):
            raise OSError("no such luck")
        rename(source, target)

    monkeypatch.setattr(os, "rename", broken)
    return np.arange(9)


def interrupted(tmp_path: Path, monkeypatch: Any) -> Any:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt("no such luck")

    monkeypatch.setattr("dshuffle.store.create.run_bounded", broken)
    return np.arange(9)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("failing", [fail_in_dask, fail_in_rename, interrupted])
def test_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: Any, existing: bool, failing: Any) -> None:
    if existing:
        create_dataset(tmp_path / "d", {"x": np.ones(5)})
    before = tree(tmp_path)
    with monkeypatch.context() as patch:
        x = failing(tmp_path, patch)
        kinds = RuntimeError, DatasetError, KeyboardInterrupt
        with dask.config.set(scheduler="sync"), pytest.raises(kinds, match="no such luck"):
            create_dataset(tmp_path / "d", {"x": x}, overwrite=existing)
    assert tree(tmp_path) == before


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DatasetError, match=re.escape(str(tmp_path / "file" / "d"))):
        create_dataset(tmp_path / "file" / "d", {"x": OK})
