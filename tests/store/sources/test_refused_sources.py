"""Files that cannot become a dataset are refused by name, before or while they are read, and leave nothing."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

from dshuffle.errors import CorruptChunk, DatasetError, DatasetNotFound, InvalidParameter
from dshuffle.store import create_dataset, open_dataset, read_sources
from dshuffle.store.sources.source import stream

RNG = np.random.default_rng(0)
X = RNG.random((1000, 3, 2), np.float32)
Y = RNG.integers(-9, 9, 1000)


def cut(path: Path, keep: float) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    return path


def saved(path: Path, array: Any) -> Path:
    np.save(path, array)
    return path


def table(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def text(path: Path, words: str) -> Path:
    path.write_text(words)
    return path


def zipped(path: Path, **members: Any) -> Path:
    np.savez(path, **members)
    return path


REFUSED: list[tuple[str, Callable[[Path], list[Any]], type[Exception], str]] = [
    ("no file", lambda f: [], InvalidParameter, "files="),
    ("not there", lambda f: [f / "a.npy"], DatasetNotFound, "a.npy does not exist"),
    (
        "suffix",
        lambda f: [text(f / "a.h5", "")],
        InvalidParameter,
        r"a\.h5.*\.npy, \.npz, \.parquet, \.parq, \.pq, or a Zarr",
    ),
    ("remote file", lambda f: ["s3://bucket/a.npy"], InvalidParameter, "Only Zarr is read from URLs"),
    ("nothing there", lambda f: ["memory://no-such"], DatasetError, "is missing"),
    ("empty folder", lambda f: [f], DatasetError, "is missing"),
    ("pickle", lambda f: [text(f / "a.npy", "x" * 200)], DatasetError, r"cannot read .*a\.npy"),
    (
        "objects",
        lambda f: [saved(f / "a.npy", np.array([{}, 1]))],
        DatasetError,
        r"cannot read .*a.npy: .*Python objects",
    ),
    ("scalar", lambda f: [saved(f / "a.npy", 3.0)], InvalidParameter, "single number"),
    ("no members", lambda f: [zipped(f / "a.npz")], InvalidParameter, "at least one array"),
    (
        "nulls",
        lambda f: [table(f / "a.parquet", v=[1, None])],
        InvalidParameter,
        "column 'v' .* contains nulls.*Fill the missing values",
    ),
    ("no table rows", lambda f: [table(f / "a.parquet", v=pa.array([], "f4"))], InvalidParameter, "'v' .* it is empty"),
    (
        "all at once",
        lambda f: [table(f / "a.pq", v=[1], w=["a"], x=["b"]), table(f / "b.pq", v=[1.5], w=["a"], x=["b"])],
        InvalidParameter,
        r"b\.pq: column 'v' .* type is double.*; .*a\.pq: column 'w' .*string.*; .*a\.pq: column 'x' .*string",
    ),
    ("no tables", lambda f: [(f / "a.parquet").mkdir() or f / "a.parquet"], InvalidParameter, "at least one"),
    (
        "types",
        lambda f: [table(f / "a.pq", v=[1]), table(f / "b.pq", v=[1.5])],
        InvalidParameter,
        r"b\.pq: column 'v' .* type is double, but int64 in .*a\.pq",
    ),
    (
        "lengths",
        lambda f: [saved(f / "a.npy", X), saved(f / "b.npy", Y[:9])],
        InvalidParameter,
        r"'a' of .*a\.npy has 1000 .*'b' of .*b\.npy has 9\..* same length",
    ),
    (
        "names",
        lambda f: [saved(f / "a.npy", X), zipped(f / "b.npz", a=X)],
        InvalidParameter,
        r"a\.npy and .*b\.npz both",
    ),
    ("twice", lambda f: [saved(f / "a.npy", X), f / "." / "a.npy"], InvalidParameter, "distinct"),
]


@pytest.mark.parametrize(("make", "error", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused_before_anything_is_read(
    tmp_path: Path, make: Callable[[Path], list[Any]], error: type[Exception], words: str
) -> None:
    files = make(tmp_path)
    with pytest.raises(error, match=words) as caught:
        read_sources(files)
    assert "\n" not in str(caught.value)


def flip(path: Path, at: int) -> Path:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    return path


def late_nulls(folder: Path) -> Path:
    pq.write_table(pa.table({"v": [1.0, None]}), folder / "a.parquet", write_statistics=False)
    return folder / "a.parquet"


def broken_chunk(folder: Path) -> Path:
    zarr.create_array(folder / "a", data=X, chunks=(500, 3, 2))
    cut(folder / "a" / "c" / "1" / "0" / "0", 0.5)
    return folder / "a"


def lost_chunk(folder: Path) -> Path:
    create_dataset(folder / "a", {"x": X}, chunk_rows=500)
    next(path for path in (folder / "a" / "x" / "c" / "1").rglob("*") if path.is_file()).unlink()
    return folder / "a"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda f: flip(zipped(f / "a.npz", x=X), 5000), DatasetError, r"cannot read .*a\.npz: BadZipFile: Bad CRC"),
        (late_nulls, InvalidParameter, "column 'v' .* contains nulls"),
        (lambda f: table(f / "a.pq", v=[[1], [1, 2]]), InvalidParameter, "a list of length 2, .* of length 1"),
        (lambda f: table(f / "a.pq", v=[[1], [None]]), InvalidParameter, "contains nulls"),
        (broken_chunk, CorruptChunk, r"^one of the chunks with samples 0 to 999 of array 'a'"),
        (lost_chunk, CorruptChunk, r"^the chunk x/c/1/0/0 of .* is missing"),
    ],
)
def test_what_turns_out_bad_on_the_way_leaves_nothing(
    tmp_path: Path, make: Callable[[Path], Path], error: type[Exception], words: str
) -> None:
    (tmp_path / "in").mkdir()
    file = make(tmp_path / "in")
    create_dataset(tmp_path / "out" / "d", {"old": Y})
    with pytest.raises(error, match=words):
        create_dataset(tmp_path / "out" / "d", read_sources([file]), overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["d"]
    old = open_dataset(tmp_path / "out" / "d")
    np.testing.assert_array_equal(old.read_rows(np.arange(len(Y)))["old"], Y)


def test_a_member_that_is_shorter_than_its_header_says(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", saved(tmp_path / "x.npy", X).read_bytes()[:-8])
    with pytest.raises(DatasetError, match=r"cannot read .*a\.npz: ValueError: EOF"):
        create_dataset(tmp_path / "out", read_sources([tmp_path / "a.npz"]))


@pytest.mark.parametrize(("rows", "words"), [([4], "ended after 4 of 10"), ([10, 0, 1], "has more than 10")])
def test_a_file_that_changes_while_it_is_read(rows: list[int], words: str) -> None:
    source = stream("ratings.csv", (10,), np.dtype(int), lambda: iter([np.arange(n) for n in rows]))
    with pytest.raises(DatasetError, match=rf"ratings\.csv {words}"):
        source[0:10]


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    file = table(tmp_path / "a.parquet", v=[1])
    monkeypatch.setitem(__import__("sys").modules, "dshuffle.store.sources.tables", None)
    with pytest.raises(DatasetError, match=r"pip install 'dshuffle\[parquet\]'"):
        read_sources([file])
