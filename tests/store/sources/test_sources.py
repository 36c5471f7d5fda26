"""Files become datasets with the values that they hold, in bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from dshuffle.store.sources.source import stream
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.store import create_dataset, open_dataset, read_sources, watched

RNG = np.random.default_rng(0)
X = RNG.random((1000, 3, 2), np.float32)
Y = RNG.integers(-9, 9, 1000)
# Counts what pyarrow allocates in the test of memory; it must outlive every buffer.
ARROW = pa.proxy_memory_pool(pa.default_memory_pool())


def contents(dataset: Any) -> dict[str, np.ndarray]:
    return dataset.read_rows(np.arange(dataset.n_samples))


def npy(folder: Path, x: Any, y: Any) -> list[Path]:
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    return [folder / "x.npy", folder / "y.npy"]


def npy_in_fortran_order(folder: Path, x: Any, y: Any) -> list[Path]:
    return npy(folder, np.asfortranarray(x), y)


def npz(folder: Path, x: Any, y: Any) -> list[Path]:
    np.savez(folder / "both.npz", x=x, y=y)
    return [folder / "both.npz"]


def fixed_lists(array: Any) -> pa.Array:
    values = pa.array(array.reshape(-1))
    for size in array.shape[:0:-1]:
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values


def parquet(folder: Path, x: Any, y: Any) -> list[Path]:
    pq.write_table(pa.table({"x": fixed_lists(x), "y": y}), folder / "t.parquet", row_group_size=len(x))
    return [folder / "t.parquet"]


def parquet_in_parts(folder: Path, x: Any, y: Any) -> list[Path]:
    table = pa.table({"x": fixed_lists(x), "y": y})
    pq.write_table(table[:300], folder / "first.pq", row_group_size=100)
    pq.write_table(table[300:], folder / "a second.parquet", row_group_size=90)
    return [folder / "first.pq", folder / "a second.parquet"]


def parquet_of_spark(folder: Path, x: Any, y: Any) -> list[Path]:
    """A folder without a suffix, in which part.2 comes before part.10, and files in folders after those beside them."""
    table = pa.table({"x": fixed_lists(x), "y": y})
    (folder / "t" / "z").mkdir(parents=True)
    for name, first in {"part.2.PARQUET": 0, "part.10.parq": 300, "z/part.1.pq": 600, "z/part.1a.parquet": 900}.items():
        pq.write_table(table[first : first + 300], folder / "t" / name)
    for other in ("_SUCCESS", "readme.txt", "_metadata.parquet", ".part.2.parquet"):
        (folder / "t" / other).write_text("not a part of the table")
    (folder / "t" / "z" / "all").symlink_to(folder / "t")
    return [folder / "t"]


def zarr_group(folder: Path, x: Any, y: Any, zarr_format: Any = 2, **options: Any) -> list[Path]:
    group = zarr.create_group(folder / "g", zarr_format=zarr_format)
    group.create_array("x", data=x, chunks=(90, 2, 1), **options)
    group.create_array("y", data=y, chunks=(7,))
    return [folder / "g"]


def zarr_shards(folder: Path, x: Any, y: Any) -> list[Path]:
    return zarr_group(folder, x, y, 3, shards=(180, 4, 2))


def zarr_arrays(folder: Path, x: Any, y: Any) -> list[Path]:
    zarr.create_array(folder / "x.zarr", data=x, chunks=(len(x) // 16, *x.shape[1:]), zarr_format=3)
    zarr.create_array(folder / "y.zarr", data=y, chunks=(len(y) // 16,), zarr_format=2)
    return [folder / "x.zarr", folder / "y.zarr"]


ALL = [
    npy,
    npy_in_fortran_order,
    npz,
    parquet,
    parquet_in_parts,
    parquet_of_spark,
    zarr_group,
    zarr_shards,
    zarr_arrays,
]


@pytest.mark.parametrize("write", ALL)
def test_values_dtypes_and_shapes_are_kept(tmp_path: Path, monkeypatch: Any, write: Callable[..., list[Path]]) -> None:
    monkeypatch.setattr("dshuffle.store.sources.source._BLOCK_NBYTES", 1000)  # streams come in several blocks
    monkeypatch.setattr("dshuffle.store.create._SLAB_NBYTES", 5000)  # and are read in several slabs
    sources = read_sources(write(tmp_path, X, Y))
    found = contents(create_dataset(tmp_path / "out", sources, chunk_rows=64))
    assert set(found) == {"x", "y"}
    for name, array in {"x": X, "y": Y}.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_folders_of_hive_are_columns(tmp_path: Path) -> None:
    for year, day in ((2021, 1), (2020, 10), (2020, 2)):
        folder = tmp_path / "t" / f"year={year}" / f"day={day}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"v": [year * 100 + day] * 3}), folder / "part-0.parquet")
    found = contents(create_dataset(tmp_path / "out", read_sources([tmp_path / "t"])))
    assert found["v"].tolist() == [202002] * 3 + [202010] * 3 + [202101] * 3
    assert found["year"].dtype == np.int32
    np.testing.assert_array_equal(found["year"] * 100 + found["day"], found["v"])
    (tmp_path / "t" / "year=2020" / "day=2").rename(tmp_path / "t" / "year=2020" / "day=__HIVE_DEFAULT_PARTITION__")
    with pytest.raises(InvalidParameter, match=r"column 'day'.* contains nulls"):
        create_dataset(tmp_path / "other", read_sources([tmp_path / "t"]))


def test_times_of_spark_reach_beyond_nanoseconds(tmp_path: Path) -> None:
    times = np.array(["9999-12-31", "0100-01-01", "2006-01-02T03:04:05.678901"], "M8[us]")
    columns = {"t": times, "lists": fixed_lists(times[:, None]), "loose": pa.array([[time] for time in times])}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", use_deprecated_int96_timestamps=True)
    found = contents(create_dataset(tmp_path / "out", read_sources([tmp_path / "t.parquet"])))
    for name in columns:
        assert found[name].dtype == "M8[us]"
        np.testing.assert_array_equal(found[name].ravel(), times)


def test_nulls_are_those_of_the_column_itself(tmp_path: Path) -> None:
    columns = {
        "a": np.arange(4),
        "a.b": pa.array([1, None, 2, 3]),
        "c": [{"d": 1}, {"d": None}, None, {"d": 2}],
        "c.d": np.arange(4) * 10,
        "empty": pa.array([[], [], [], []], pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    sources = read_sources([tmp_path / "t.parquet"], ["a", "c.d", "empty"])
    assert sources["a"][0:4].tolist() == [0, 1, 2, 3]
    assert sources["c.d"][0:4].tolist() == [0, 10, 20, 30]
    assert sources["empty"].shape == (4, 0)
    with pytest.raises(InvalidParameter) as caught:
        read_sources([tmp_path / "t.parquet"])
    assert str(caught.value).count("is not allowed") == 2
    assert "column 'a.b' is not allowed: it contains nulls; " in str(caught.value)
    pq.write_table(pa.table({"v": [[1], []]}), tmp_path / "t.parquet")
    with pytest.raises(InvalidParameter, match="list of length 0, but its first list is of length 1"):
        create_dataset(tmp_path / "out", read_sources([tmp_path / "t.parquet"]))


def test_formats_mix_and_what_is_not_named_is_not_looked_at(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    pq.write_table(pa.table({"y": Y, "word": ["a"] * 1000, "gap": pa.nulls(1000)}), tmp_path / "t.parquet")
    files = [tmp_path / "x.npy", tmp_path / "t.parquet"]
    assert set(read_sources(files, names=["x", "y"])) == {"x", "y"}
    with pytest.raises(InvalidParameter, match="column 'word' is not allowed: its type is string"):
        read_sources(files, names=["x", "word"])
    with pytest.raises(InvalidParameter, match=r"names=\['z'\]"):
        read_sources(files, names=["x", "z"])


def test_a_dataset_is_rechunked_in_its_own_place(tmp_path: Path) -> None:
    create_dataset(tmp_path / "d", {"x": X}, chunk_rows=10)
    again = create_dataset(tmp_path / "d", read_sources([tmp_path / "d"]), chunk_rows=300, overwrite=True)
    assert again.arrays["x"].chunk_rows == 300
    np.testing.assert_array_equal(contents(again)["x"], X)
    create_dataset("memory://ingest-own", {"x": X}, overwrite=True)
    with pytest.raises(InvalidParameter, match="different from the source of array 'x'"):
        create_dataset("memory://ingest-own", read_sources(["memory://ingest-own"]), overwrite=True)
    assert open_dataset("memory://ingest-own").n_samples == 1000


@given(
    cuts=st.lists(st.integers(0, 30), max_size=6).map(sorted),
    slabs=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=6),
)
def test_a_stream_gives_any_slab(cuts: list[int], slabs: list[list[int]]) -> None:
    rows = np.arange(60).reshape(30, 2)
    opened: list[bool] = []
    source = stream("here", rows.shape, rows.dtype, lambda: opened.append(True) or iter(np.split(rows, cuts)))
    for start, stop in slabs:
        np.testing.assert_array_equal(source[start:stop], rows[start:stop])
    opened.clear()
    for start in range(0, 30, 4):  # ascending slabs open a stream once
        np.testing.assert_array_equal(source[start : start + 4], rows[start : start + 4])
    assert len(opened) <= 1


def test_progress_counts_the_rows_of_all_arrays(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    sources = watched(read_sources(npy(tmp_path, X, Y)), lambda *progress: seen.append(progress))
    create_dataset(tmp_path / "out", sources)
    assert [(done, total) for done, total, _ in seen] == [(1000, 2000), (2000, 2000)]
    assert seen[-1][2].endswith("y")


@pytest.mark.slow
@pytest.mark.parametrize("write", [npy, npy_in_fortran_order, parquet, zarr_arrays])
def test_memory_stays_far_below_the_file(tmp_path: Path, monkeypatch: Any, write: Callable[..., list[Path]]) -> None:
    for size in ("create._SLAB_NBYTES", "sources._READ_NBYTES", "sources.source._BLOCK_NBYTES"):
        monkeypatch.setattr(f"dshuffle.store.{size}", 2 << 20)
    n_rows = 1 << 18
    x = np.arange(n_rows * 32, dtype=np.float64).reshape(n_rows, 32) % 251  # 64 MiB, one row group of Parquet
    files = write(tmp_path, x, np.arange(n_rows))
    nbytes = x.nbytes
    del x
    before = pa.default_memory_pool()
    pa.set_memory_pool(ARROW)
    tracemalloc.start()
    try:
        create_dataset(tmp_path / "out", read_sources(files), chunk_rows=4096)
        peak = tracemalloc.get_traced_memory()[1] + ARROW.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert peak < nbytes / 2
    assert open_dataset(tmp_path / "out").read_rows([n_rows - 1])["y"] == [n_rows - 1]
