"""Datasets from tables and arrays of other libraries, and from memory without a path."""

from __future__ import annotations

import gc
import os
import pickle

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray as xr
from distributed import Client

import dshuffle
from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.store import read_array, read_sources
from dshuffle.store.create import remove_if_mine

N = 50
RNG = np.random.default_rng(3)
FRAME = pd.DataFrame({"a": RNG.normal(size=N), "b": np.arange(N, dtype="i4"), "c": np.arange(N) % 2 == 0})
DAYS = pd.date_range("2020", periods=2)


def contents(dataset):
    return dataset.read_rows(np.arange(dataset.n_samples))


def test_a_data_frame_is_an_array_for_each_column(tmp_path):
    dataset = dshuffle.create_dataset(tmp_path / "d", FRAME.set_index(FRAME["b"][::-1].to_numpy()))
    for name, values in contents(dataset).items():
        np.testing.assert_array_equal(values, FRAME[name].to_numpy())
        assert values.dtype == FRAME[name].dtype


MISSING = {
    "NaN in pandas": lambda folder: pd.DataFrame({"a": [1.0, np.nan]}),
    "NaT in pandas": lambda folder: pd.DataFrame({"a": pd.to_datetime(["2020-01-01", None])}),
    "no duration in pandas": lambda folder: pd.DataFrame({"a": pd.to_timedelta([None, 5], unit="s")}),
    "null in pandas": lambda folder: pd.DataFrame({"a": pd.array([1, None], dtype="Int64")}),
    "NaN in Dask": lambda folder: dd.from_pandas(pd.DataFrame({"a": [1.0, 2.0, np.nan]}), npartitions=2),
    "null in Arrow": lambda folder: pa.table({"a": [1.0, None]}),
    "NaN in Arrow": lambda folder: pa.table({"a": [1.0, np.nan]}),
    "NaN in a list": lambda folder: pa.table({"a": [[1.0], [np.nan]]}),
    "null in Parquet": lambda folder: parquet_of(folder, [1.0, None]),
    "NaN in Parquet": lambda folder: parquet_of(folder, [1.0, np.nan]),
}


def parquet_of(folder, values):
    pq.write_table(pa.table({"a": values}), folder / "t.parquet")
    return read_sources([folder / "t.parquet"])


@pytest.mark.parametrize("table", MISSING.values(), ids=MISSING)
def test_missing_values_are_refused_in_every_table(tmp_path, table):
    with pytest.raises(InvalidParameter, match=r"column 'a'.* it contains (NaN|NaT|nulls). Fill the missing values"):
        dshuffle.create_dataset(tmp_path / "d", table(tmp_path))
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("kind", ["pandas", "Arrow", "Parquet"])
def test_all_that_is_wrong_with_a_table_is_said_at_once(tmp_path, kind):
    columns = {"label": ["a", "b"], "x": [1, 2], "y": [1.0, None], "word": ["c", "d"], "\\eta": [1, 2]}
    table = pd.DataFrame(columns) if kind == "pandas" else pa.table(columns)
    if kind == "Parquet":
        pq.write_table(table, tmp_path / "t.parquet")

    def read():
        return read_sources([tmp_path / "t.parquet"]) if kind == "Parquet" else table

    with pytest.raises(InvalidParameter) as caught:
        dshuffle.create_dataset(tmp_path / "d", read())
    words = str(caught.value)
    for name in ("label", "y", "word"):
        assert f"column {name!r} is not allowed" in words
    assert "column 'x'" not in words
    assert words.count("cast them") == 1
    many = pa.table({f"c{number}": ["a"] for number in range(50)})
    with pytest.raises(InvalidParameter, match=r"column 'c19'.* and 30 more"):
        dshuffle.create_dataset(tmp_path / "d", many)


@pytest.mark.parametrize("name", ["km\\h", "\\eta", "\\", "a/b"])
def test_names_that_zarr_would_change_are_refused(tmp_path, name):
    with pytest.raises(InvalidParameter, match=r"array name=.* without '/' or"):
        dshuffle.create_dataset(tmp_path / "d", {"eta": np.arange(3), name: np.arange(3)})
    with pytest.raises(InvalidParameter, match=r"array name='x/y'.*; array name=3"):
        dshuffle.create_dataset(tmp_path / "d", {"x/y": np.arange(3), 3: np.arange(3)})


@pytest.mark.parametrize("kind", ["numpy_nullable", "pyarrow"])
def test_nullable_columns_without_nulls(tmp_path, kind):
    frame = FRAME[["b", "c"]].convert_dtypes(dtype_backend=kind)
    found = contents(dshuffle.create_dataset(tmp_path / "d", frame))
    np.testing.assert_array_equal(found["b"], FRAME["b"])
    assert found["c"].dtype == bool


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (pd.DataFrame({"s": ["a", "bc"]}), "column 's'.*string.*cast them"),  # str since pandas 3, object before
        (pd.DataFrame({"s": pd.Series(["a", 2], dtype=object)}), "column 's'.*Python objects.*Cast it"),
        (pd.DataFrame({"s": pd.Categorical(["a", "bc"])}), r"column 's'.*dictionary.*\.cat\.codes"),
        (pd.DataFrame({"t": DAYS.tz_localize("UTC")}), r"column 't'.*UTC\].*no zone.*tz_convert\(None\)"),
        (dd.from_pandas(pd.DataFrame({"t": DAYS.tz_localize("UTC")}), npartitions=1), "column 't'.*UTC.*Cast it"),
        (pa.table({"t": pa.array([1, 2], pa.timestamp("ms", "UTC"))}), r"'t'.*tz=UTC.*cast them to timestamp\[ms\]"),
        (pa.table({"t": pa.array([1, 2], pa.time32("s"))}), r"column 't'.*time32\[s\].*cast them"),
        (pa.table({"t": pa.array(["a"]).dictionary_encode()}), "column 't'.*dictionary.*cast them"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "columns=.*distinct"),
        (pa.table({"n": [[1], [2, 3]]}), "column 'n'.*list of length 2"),
        (pa.table({"n": [{"a": 1}]}), "column 'n'.*struct"),
        (pa.table([[1], [2]], names=["a", "a"]), "columns=.*distinct"),
        (xr.Dataset({"scalar": 3.0}), "no variables with a dimension"),
        (pd.DataFrame(index=[1, 2]), "this DataFrame has no columns"),
    ],
)
def test_columns_that_do_not_hold_numbers(tmp_path, frame, words):
    with pytest.raises(InvalidParameter, match=words) as caught:
        dshuffle.create_dataset(tmp_path / "d", frame)
    assert len(str(caught.value)) < 400
    assert not os.listdir(tmp_path)


def test_an_arrow_table_and_whatever_speaks_its_interface(tmp_path):
    class Table:  # as Polars and DuckDB have it
        def __arrow_c_stream__(self, requested_schema=None):
            return pa.table(columns).__arrow_c_stream__(requested_schema)

    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6.0)), 2)
    columns = {"x": lists, "n": pa.array([[1, 2, 3]] * 3), "y": pa.chunked_array([[1], [2, 3]])}
    for number, table in enumerate((pa.table(columns), Table())):
        found = contents(dshuffle.create_dataset(tmp_path / str(number), table))
        np.testing.assert_array_equal(found["x"], np.arange(6.0).reshape(3, 2))
        np.testing.assert_array_equal(found["n"], [[1, 2, 3]] * 3)
        np.testing.assert_array_equal(found["y"], [1, 2, 3])


TIMES = {
    "timestamp": ("M8", ["s", "ms", "us", "ns"]),
    "duration": ("m8", ["s", "ms", "us", "ns"]),
}
TYPES = {f"{name}[{unit}]": f"{kind}[{unit}]" for name, (kind, units) in TIMES.items() for unit in units}
TYPES |= {"date32[day]": "M8[D]", "date64[ms]": "M8[ms]"}
COUNTS = {"M8[D]": [18_000, -3, 0], "M8[ms]": [86_400_000, -864_000_000, 0]}


@pytest.mark.parametrize("source", ["table", "parquet", "lists"])
@pytest.mark.parametrize(("kind", "dtype"), TYPES.items())
def test_times_of_arrow(tmp_path, kind, dtype, source):
    kind = pa.type_for_alias(kind)
    counts = COUNTS.get(dtype, [1_600_000_000, -1, 0])
    column = pa.array(counts, pa.int32() if dtype == "M8[D]" else pa.int64()).view(kind)
    if source == "lists":
        column = pa.FixedSizeListArray.from_arrays(column, 1)
    table = pa.table({"t": column})
    if source == "parquet":
        pq.write_table(table, tmp_path / "t.parquet")
        kept = pq.read_schema(tmp_path / "t.parquet").field("t").type
        dtype = TYPES[str(kept)]  # Parquet has no seconds and no date64
        counts = np.array(counts, TYPES[str(kind)]).astype(dtype).astype("i8")
        table = read_sources([tmp_path / "t.parquet"])
    found = contents(dshuffle.create_dataset(tmp_path / "d", table))["t"]
    assert found.dtype == dtype
    assert found.reshape(-1).tolist() == np.array(counts, "i8").view(dtype).tolist()


@pytest.mark.parametrize("lazy", [False, True])
def test_an_xarray_dataset_along_its_first_dimension_or_another(tmp_path, lazy):
    data = xr.Dataset(
        {
            "t2m": (("time", "lat", "lon"), RNG.normal(size=(6, 4, 5)).astype("f4")),
            "flag": (("lat", "time"), np.arange(24, dtype="i2").reshape(4, 6)),
            "mask": (("lat", "lon"), np.ones((4, 5))),
            "name": ("time", np.array(list("abcdef"), dtype=object)),
        },
        coords={"time": np.arange(6).astype("M8[D]").astype("M8[ns]"), "lat": np.arange(4.0)},
    )
    source = data.chunk({"time": 4}) if lazy else data
    dataset = dshuffle.create_dataset(tmp_path / "d", source)
    assert sorted(dataset.arrays) == ["flag", "t2m", "time"]
    assert "without time" in dataset.skipped["mask"]
    assert "not of a dtype of NumPy with a fixed size (object)" in dataset.skipped["name"]
    assert pickle.loads(pickle.dumps(dataset)).skipped == dataset.skipped
    found = contents(dataset)
    np.testing.assert_array_equal(found["flag"], data["flag"].T)
    np.testing.assert_array_equal(found["time"], data["time"])
    with xr.open_zarr(tmp_path / "d", consolidated=False) as again:
        xr.testing.assert_equal(again["t2m"].drop_vars("time"), data["t2m"].drop_vars(["time", "lat"]))
        assert again["flag"].dims == ("time", "lat")
    turned = dshuffle.create_dataset(tmp_path / "turned", source.transpose("lat", ...))
    np.testing.assert_array_equal(contents(turned)["t2m"], data["t2m"].transpose("lat", "time", "lon"))
    np.testing.assert_array_equal(contents(turned)["mask"], data["mask"])


def test_dask_arrays_of_unknown_lengths_are_computed_once(tmp_path):
    calls = []

    def block(values):
        calls.append(len(values))
        return values

    x = da.arange(30, chunks=10).map_blocks(block, dtype=int, meta=np.empty(0, int))
    with dask.config.set(scheduler="sync"):
        dataset = dshuffle.create_dataset(tmp_path / "d", {"x": x[x % 3 == 0], "y": (x * 2)[x % 3 == 0]})
    np.testing.assert_array_equal(contents(dataset)["y"], np.arange(0, 60, 6))
    assert sum(calls) == 30


def test_a_dataset_without_a_path_lasts_as_long_as_it_is_used(tmp_path):
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        dataset = dshuffle.create_dataset(None, {"x": np.arange(9)}, chunk_rows=2)
    assert dataset.arrays["x"].chunk_rows == 2
    assert dataset.url.startswith(str(tmp_path))
    copy, part = pickle.loads(pickle.dumps(dataset)), dataset.select([3, 4])
    del dataset
    gc.collect()
    assert contents(part)["x"].tolist() == [3, 4]
    assert len(contents(copy)["x"]) == 9
    del part
    gc.collect()
    assert not os.listdir(tmp_path)


def test_a_subclass_of_a_data_frame_is_one(tmp_path):
    class Frame(pd.DataFrame):
        pass

    dataset = dshuffle.create_dataset(tmp_path / "d", Frame({"a": [1, 2]}, index=pd.Index([7, 8], name="day")))
    assert "reset_index" in dataset.skipped["day"]
    np.testing.assert_array_equal(contents(dataset)["a"], [1, 2])


def test_who_reads_a_dataset_without_a_path_keeps_it(tmp_path):
    arrays = {"x": np.arange(900).reshape(300, 3)}
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        assert read_array(dshuffle.create_dataset(None, arrays), "x")[4:5].tolist() == [[12, 13, 14]]
        with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
            for taken in (
                dshuffle.take(client, dshuffle.create_dataset(None, arrays), [2, 1]),
                dshuffle.permute(client, dshuffle.create_dataset(None, arrays).select([1, 2])),
            ):
                assert sorted(taken["x"].compute()[:, 0]) == [3, 6]
    with (
        dask.config.set({"temporary-directory": str(tmp_path / "none")}),
        pytest.raises(DatasetError, match="cannot be"),
    ):
        dshuffle.create_dataset(None, arrays)
    with pytest.raises(InvalidParameter, match="storage_options"):
        dshuffle.create_dataset(None, arrays, storage_options={})


def test_a_forked_process_does_not_remove_the_dataset(tmp_path):
    remove_if_mine(str(tmp_path), os.getpid() + 1)
    assert tmp_path.exists()
    remove_if_mine(str(tmp_path), os.getpid())
    assert not tmp_path.exists()


@pytest.mark.slow
def test_processes_shuffle_arrays_in_memory():
    with (
        Client(n_workers=2, threads_per_worker=1, dashboard_address=":0") as client,
        dshuffle.Shuffler(client, dshuffle.create_dataset(None, {"y": np.arange(200)})) as shuffler,
    ):
        for epoch in shuffler.epochs(2):
            found = client.gather(epoch.map(lambda partition: partition["y"]))
            np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.arange(200))
