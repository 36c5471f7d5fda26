"""Files, tables and arrays of other libraries become datasets with their values, or are refused by name."""

import os
import tracemalloc
import zipfile

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse
import xarray as xr
import zarr
from hypothesis import given
from hypothesis import strategies as st

import dshuffle
from dshuffle.errors import CorruptChunk, DatasetError, DatasetNotFound, InvalidParameter
from dshuffle.store import create_dataset, open_dataset, read_sources, shuffle_dataset, watched
from dshuffle.store.dataset import blank_dataset
from dshuffle.store.sources import stream

RNG = np.random.default_rng(0)
X = RNG.random((1000, 3, 2), np.float32)
Y = RNG.integers(-9, 9, 1000)
FRAME = pd.DataFrame({"a": RNG.normal(size=50), "b": np.arange(50, dtype="i4"), "c": np.arange(50) % 2 == 0})
DAYS = pd.date_range("2020", periods=2)
# Counts what pyarrow allocates in the test of memory; it must outlive every buffer.
ARROW = pa.proxy_memory_pool(pa.default_memory_pool())


def contents(dataset):
    return dataset.read_rows(np.arange(dataset.n_samples))


# -- Files -------------------------------------------------------------------------------------------------------------


def saved(path, array):
    np.save(path, array)
    return path


def zipped(path, **members):
    np.savez(path, **members)
    return path


def table(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def text(path, words):
    path.write_text(words)
    return path


def npy(folder, x, y):
    return [saved(folder / "x.npy", x), saved(folder / "y.npy", y)]


def fixed_lists(array):
    values = pa.array(array.reshape(-1))
    for size in array.shape[:0:-1]:
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values


def parquet(folder, x, y, parts=None, **options):
    """One table in files, which have the given rows."""
    whole = pa.table({"x": fixed_lists(x), "y": y})
    for name, rows in (parts or {"t.parquet": slice(None)}).items():
        pq.write_table(whole[rows], folder / name, **({"row_group_size": len(x)} | options))
    return [folder / name for name in parts or ["t.parquet"]]


def parquet_of_spark(folder, x, y):
    """A folder without a suffix, in which part.2 comes before part.10, and files in folders after those beside them."""
    (folder / "t" / "z").mkdir(parents=True)
    firsts = {"part.2.PARQUET": 0, "part.10.parq": 300, "z/part.1.pq": 600, "z/part.1a.parquet": 900}
    parquet(folder / "t", x, y, {name: slice(first, first + 300) for name, first in firsts.items()})
    for other in ("_SUCCESS", "readme.txt", "_metadata.parquet", ".part.2.parquet"):
        (folder / "t" / other).write_text("not a part of the table")
    (folder / "t" / "z" / "all").symlink_to(folder / "t")
    return [folder / "t"]


def zarr_group(folder, x, y, zarr_format=2, **options):
    group = zarr.create_group(folder / "g", zarr_format=zarr_format)
    group.create_array("x", data=x, chunks=(90, 2, 1), **options)
    group.create_array("y", data=y, chunks=(7,))
    return [folder / "g"]


PARTS = {"first.pq": slice(300), "a second.parquet": slice(300, None)}
ALL = {
    "npy": npy,
    "Fortran": lambda folder, x, y: npy(folder, np.asfortranarray(x), y),
    "npz": lambda folder, x, y: [zipped(folder / "both.npz", x=x, y=y)],
    "Parquet": parquet,
    "parts": lambda folder, x, y: parquet(folder, x, y, PARTS, row_group_size=90),
    "Spark": parquet_of_spark,
    "Zarr": zarr_group,
    "shards": lambda folder, x, y: zarr_group(folder, x, y, 3, shards=(180, 4, 2)),
}


@pytest.mark.parametrize("kind", ALL)
def test_values_dtypes_and_shapes_are_kept(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("dshuffle.store.sources._BLOCK_NBYTES", 1000)  # streams come in several blocks
    monkeypatch.setattr("dshuffle.store.create._SLAB_NBYTES", 5000)  # and are read in several slabs
    seen = []
    sources = watched(read_sources(ALL[kind](tmp_path, X, Y)), lambda *progress: seen.append(progress))
    found = contents(create_dataset(tmp_path / "out", sources, chunk_rows=64))
    assert set(found) == {"x", "y"}
    for name, array in {"x": X, "y": Y}.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    assert seen[-1] == (2000, 2000, "rows read: y")


def test_times_of_spark_reach_beyond_nanoseconds(tmp_path):
    times = np.array(["9999-12-31", "0100-01-01", "2006-01-02T03:04:05.678901"], "M8[us]")
    columns = {"t": times, "lists": fixed_lists(times[:, None]), "loose": pa.array([[time] for time in times])}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", use_deprecated_int96_timestamps=True)
    found = contents(create_dataset(tmp_path / "out", read_sources([tmp_path / "t.parquet"])))
    for name in columns:
        assert found[name].dtype == "M8[us]"
        np.testing.assert_array_equal(found[name].ravel(), times)


def test_nulls_are_those_of_the_column_itself(tmp_path):
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
    with pytest.raises(InvalidParameter, match=r"column 'a\.b' is not allowed: it contains nulls"):
        create_dataset(tmp_path / "out", read_sources([tmp_path / "t.parquet"], ["a", "a.b"]))
    with pytest.raises(InvalidParameter, match="column 'c' is not allowed: its type is struct"):
        read_sources([tmp_path / "t.parquet"])


def test_formats_mix_and_what_is_not_named_is_not_looked_at(tmp_path):
    np.save(tmp_path / "x.npy", X)
    pq.write_table(pa.table({"y": Y, "word": ["a"] * 1000, "gap": pa.nulls(1000)}), tmp_path / "t.parquet")
    files = [tmp_path / "x.npy", tmp_path / "t.parquet"]
    assert set(read_sources(files, names=["x", "y"])) == {"x", "y"}
    with pytest.raises(InvalidParameter, match="column 'word' is not allowed: its type is string"):
        read_sources(files, names=["x", "word"])
    with pytest.raises(InvalidParameter, match=r"names=\['z'\]"):
        read_sources(files, names=["x", "z"])


def test_a_dataset_is_rechunked_in_its_own_place(tmp_path):
    create_dataset(tmp_path / "d", {"x": X}, chunk_rows=10)
    again = create_dataset(tmp_path / "d", read_sources([tmp_path / "d"]), chunk_rows=300, overwrite=True)
    assert again.arrays["x"].chunk_rows == 300
    np.testing.assert_array_equal(contents(again)["x"], X)
    create_dataset("memory://ingest-own", {"x": X}, overwrite=True)
    with pytest.raises(InvalidParameter, match="another place than the source of array 'x'"):
        create_dataset("memory://ingest-own", read_sources(["memory://ingest-own"]), overwrite=True)
    with pytest.raises(InvalidParameter, match="or one where nothing exists"):  # the store may be there
        shuffle_dataset(blank_dataset(5), "memory://ingest-own", overwrite=True)
    assert open_dataset("memory://ingest-own").n_samples == 1000


@given(
    cuts=st.lists(st.integers(0, 30), max_size=6).map(sorted),
    slabs=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=6),
)
def test_a_stream_gives_any_slab(cuts, slabs):
    rows = np.arange(60).reshape(30, 2)
    opened = []
    source = stream("here", rows.shape, rows.dtype, lambda: opened.append(True) or iter(np.split(rows, cuts)))
    for start, stop in slabs:
        np.testing.assert_array_equal(source[start:stop], rows[start:stop])
    opened.clear()
    for start in range(0, 30, 4):  # ascending slabs open a stream once
        np.testing.assert_array_equal(source[start : start + 4], rows[start : start + 4])
    assert len(opened) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["npy", "Fortran", "Parquet"])
def test_memory_stays_far_below_the_file(tmp_path, monkeypatch, kind):
    for size in ("create._SLAB_NBYTES", "sources._READ_NBYTES", "sources._BLOCK_NBYTES"):
        monkeypatch.setattr(f"dshuffle.store.{size}", 2 << 20)
    n_rows = 1 << 18
    x = np.arange(n_rows * 32, dtype=np.float64).reshape(n_rows, 8, 4) % 251  # 64 MiB, one row group of Parquet
    files = ALL[kind](tmp_path, x, np.arange(n_rows))
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


def hive(folder):
    (folder / "year=2020").mkdir()
    table(folder / "year=2020" / "a.parquet", v=[1])
    return [folder]


REFUSED = {
    "no file": (lambda f: [], InvalidParameter, "files="),
    "not there": (lambda f: [f / "a.npy"], DatasetNotFound, "a.npy does not exist"),
    "suffix": (lambda f: [text(f / "a.csv", "")], InvalidParameter, r"a\.csv.*\.npy, .*Zarr group.*CSV, with pandas"),
    "remote file": (lambda f: ["s3://bucket/a.npy"], InvalidParameter, "Only Zarr is read from URLs"),
    "nothing there": (lambda f: ["memory://no-such"], DatasetError, "no dataset exists"),
    "empty folder": (lambda f: [f], DatasetError, "no dataset exists"),
    "pickle": (lambda f: [text(f / "a.npy", "x" * 200)], DatasetError, r"cannot read .*a\.npy"),
    "objects": (lambda f: [saved(f / "a.npy", np.array([{}, 1]))], DatasetError, r"cannot read .*Python objects"),
    "scalar": (lambda f: [saved(f / "a.npy", 3.0)], InvalidParameter, r"arrays\['a'\]\.shape=\(\)"),
    "no members": (lambda f: [zipped(f / "a.npz")], InvalidParameter, "at least one"),
    "nulls": (lambda f: [table(f / "a.parquet", v=[1, None])], InvalidParameter, "column 'v' .* contains nulls"),
    "strings": (lambda f: [table(f / "a.parquet", v=["a"])], InvalidParameter, "column 'v' .* type is string.*cast"),
    "no rows": (lambda f: [table(f / "a.parquet", v=pa.array([], "i8"))], InvalidParameter, "their lengths are"),
    "no tables": (lambda f: [(f / "a.parquet").mkdir() or f / "a.parquet"], DatasetError, "no dataset exists"),
    "folders that are columns": (hive, InvalidParameter, r"dask\.dataframe\.read_parquet"),
    "lists": (lambda f: [table(f / "a.pq", v=[[1], [1, 2]])], InvalidParameter, "lists of length 1 and 2"),
    "types, all at once": (
        lambda f: [table(f / "a.pq", v=[1], w=["a"]), table(f / "b.pq", v=[1.5], w=["a"])],
        InvalidParameter,
        r"b\.pq: column 'v' .* type is double.*; .*a\.pq: column 'w' .*string",
    ),
    "lengths": (
        lambda f: [saved(f / "a.npy", X), saved(f / "b.npy", Y[:9])],
        InvalidParameter,
        r"their lengths are \{'a': 1000, 'b': 9\}",
    ),
    "names": (
        lambda f: [saved(f / "a.npy", X), zipped(f / "b.npz", a=X)],
        InvalidParameter,
        r"a\.npy and .*b\.npz both",
    ),
}


@pytest.mark.parametrize(("make", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_files_that_are_refused(tmp_path, make, error, words):
    (tmp_path / "in").mkdir()
    files = make(tmp_path / "in")
    with pytest.raises(error, match=words) as caught:
        create_dataset(tmp_path / "out", read_sources(files))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    return path


def late_nulls(folder):
    pq.write_table(pa.table({"v": [1.0, None]}), folder / "a.parquet", write_statistics=False)
    return folder / "a.parquet"


def short_member(folder):
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        archive.writestr("x.npy", saved(folder / "x.npy", X).read_bytes()[:-8])
    return folder / "a.npz"


def lost_chunk(folder):
    create_dataset(folder / "a", {"x": X}, chunk_rows=500)
    next(path for path in (folder / "a" / "x" / "c" / "1").rglob("*") if path.is_file()).unlink()
    return folder / "a"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda f: flip(zipped(f / "a.npz", x=X), 5000), DatasetError, r"cannot read .*a\.npz: BadZipFile: Bad CRC"),
        (short_member, DatasetError, r"cannot read .*a\.npz: ValueError: EOF"),
        (late_nulls, InvalidParameter, "column 'v' .* contains nulls"),
        (lambda f: table(f / "a.pq", v=[[1], [None]]), InvalidParameter, "contains nulls"),
        (lost_chunk, CorruptChunk, r"^the chunk x/c/1/0/0 of .* is missing"),
    ],
)
def test_what_turns_out_bad_on_the_way_leaves_nothing(tmp_path, make, error, words):
    (tmp_path / "in").mkdir()
    file = make(tmp_path / "in")
    create_dataset(tmp_path / "out" / "d", {"old": Y})
    with pytest.raises(error, match=words):
        create_dataset(tmp_path / "out" / "d", read_sources([file]), overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["d"]
    np.testing.assert_array_equal(contents(open_dataset(tmp_path / "out" / "d"))["old"], Y)


def test_a_file_that_changes_while_it_is_read():
    source = stream("ratings.csv", (10,), np.dtype(int), lambda: iter([np.arange(4)]))
    with pytest.raises(DatasetError, match=r"ratings\.csv ended after 4 of 10"):
        source[0:10]


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    file = table(tmp_path / "a.parquet", v=[1])
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(DatasetError, match=r"pip install 'dshuffle\[parquet\]'"):
        read_sources([file])


# -- Tables ------------------------------------------------------------------------------------------------------------


def test_a_data_frame_is_an_array_for_each_column(tmp_path):
    class Frame(pd.DataFrame):
        pass

    frame = FRAME.set_index(FRAME["b"][::-1].to_numpy())
    nullable = [frame.convert_dtypes(dtype_backend=kind) for kind in ("numpy_nullable", "pyarrow")]
    for made in (frame, Frame(frame), dd.from_pandas(frame, npartitions=3, sort=False), *nullable):
        dataset = create_dataset(tmp_path / "d", made, overwrite=True)
        for name, values in contents(dataset).items():
            np.testing.assert_array_equal(values, FRAME[name].to_numpy())
            assert values.dtype == FRAME[name].dtype


MISSING = {
    "NaN in pandas": lambda folder: pd.DataFrame({"a": [1.0, np.nan]}),
    "NaT in pandas": lambda folder: pd.DataFrame({"a": pd.to_datetime(["2020-01-01", None])}),
    "null in pandas": lambda folder: pd.DataFrame({"a": pd.array([1, None], dtype="Int64")}),
    "NaN in Dask": lambda folder: dd.from_pandas(pd.DataFrame({"a": [1.0, 2.0, np.nan]}), npartitions=2),
    "null in Arrow": lambda folder: pa.table({"a": [1.0, None]}),
    "NaN in a list": lambda folder: pa.table({"a": [[1.0], [np.nan]]}),
    "null in Parquet": lambda folder: read_sources([table(folder / "t.parquet", a=[1.0, None])]),
    "NaN in Parquet": lambda folder: read_sources([table(folder / "t.parquet", a=[1.0, np.nan])]),
}


@pytest.mark.parametrize("made", MISSING.values(), ids=MISSING)
def test_missing_values_are_refused_in_every_table(tmp_path, made):
    with pytest.raises(InvalidParameter, match=r"column 'a'.* it contains nulls, NaN or NaT. Fill the missing values"):
        create_dataset(tmp_path / "d", made(tmp_path))
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("kind", ["pandas", "Arrow"])
def test_all_that_is_wrong_with_a_table_is_said_at_once(tmp_path, kind):
    columns = {"label": ["a", "b"], "x": [1, 2], "y": [1.0, None], "word": ["c", "d"]}
    with pytest.raises(InvalidParameter) as caught:
        create_dataset(tmp_path / "d", pd.DataFrame(columns) if kind == "pandas" else pa.table(columns))
    words = str(caught.value)
    assert all(f"column {name!r} is not allowed" in words for name in ("label", "y", "word"))
    assert "column 'x'" not in words
    assert words.count("cast them") == 1


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (pd.DataFrame({"s": ["a", "bc"]}), "column 's'.*string.*cast them"),  # str since pandas 3, object before
        (pd.DataFrame({"s": pd.Series(["a", 2], dtype=object)}), "column 's'.*Arrow cannot convert its items.*cast"),
        (pd.DataFrame({"s": pd.Categorical(["a", "bc"])}), r"column 's'.*dictionary.*\.cat\.codes"),
        (pd.DataFrame({"t": DAYS.tz_localize("UTC")}), r"column 't'.*UTC\].*without a zone.*tz_convert\(None\)"),
        (dd.from_pandas(pd.DataFrame({"t": DAYS.tz_localize("UTC")}), npartitions=1), "column 't'.*UTC.*Cast it"),
        (dd.from_pandas(pd.DataFrame({"a": pd.array([1], dtype="Int64")}), npartitions=1), "its dtype is Int64. Cast"),
        (pa.table({"t": pa.array([1, 2], pa.timestamp("ms", "UTC"))}), r"'t'.*tz=UTC.*tz_convert"),
        (pa.table({"t": pa.array([1, 2], pa.time32("s"))}), r"column 't'.*time32\[s\].*cast them"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "columns=.*distinct"),
        (pa.table({"n": [{"a": 1}]}), "column 'n'.*struct"),
        (pa.table([[1], [2]], names=["a", "a"]), "columns=.*distinct"),
        (pd.DataFrame(index=[1, 2]), "this DataFrame has no columns"),
    ],
)
def test_columns_that_do_not_hold_numbers(tmp_path, frame, words):
    with pytest.raises(InvalidParameter, match=words) as caught:
        create_dataset(tmp_path / "d", frame)
    assert len(str(caught.value)) < 400
    assert not os.listdir(tmp_path)


def test_an_arrow_table_and_whatever_speaks_its_interface(tmp_path):
    class Table:  # as Polars and DuckDB have it
        def __arrow_c_stream__(self, requested_schema=None):
            return pa.table(columns).__arrow_c_stream__(requested_schema)

    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6.0)), 2)
    columns = {"x": lists, "n": pa.array([[1, 2, 3]] * 3), "y": pa.chunked_array([[1], [2, 3]])}
    for number, made in enumerate((pa.table(columns), Table())):
        found = contents(create_dataset(tmp_path / str(number), made))
        np.testing.assert_array_equal(found["x"], np.arange(6.0).reshape(3, 2))
        np.testing.assert_array_equal(found["n"], [[1, 2, 3]] * 3)
        np.testing.assert_array_equal(found["y"], [1, 2, 3])


TYPES = {"timestamp[s]": "M8[s]", "timestamp[ns]": "M8[ns]", "duration[ms]": "m8[ms]", "duration[us]": "m8[us]"}
TYPES |= {"date32[day]": "M8[D]", "date64[ms]": "M8[ms]"}


def test_times_of_arrow(tmp_path):
    counts = [86_400_000, -864_000_000, 0]
    stored = {kind: pa.array(counts, pa.int32() if kind == "date32[day]" else pa.int64()) for kind in TYPES}
    columns = {kind: column.view(pa.type_for_alias(kind)) for kind, column in stored.items()}
    found = contents(create_dataset(tmp_path / "d", pa.table(columns)))
    for kind, dtype in TYPES.items():
        assert found[kind].dtype == dtype
        assert found[kind].tolist() == np.array(counts, "i8").view(dtype).tolist()


# -- Arrays ------------------------------------------------------------------------------------------------------------

MASKED = np.ma.masked_equal([1, 2], 1)
SPARSE = scipy.sparse.csr_matrix(X[0])
LAZY = da.from_array(X[0], chunks=2)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (MASKED, r"it is a masked array. Fill it with \.filled\(\)"),
        (da.ma.masked_equal(LAZY, 1), "it is a masked array"),
        (SPARSE, r"this csr_matrix is not an array.* \(a sparse one: \.toarray\(\)\)"),
        ((number for number in range(3)), "this generator is not an array"),
        ({"y": [1]}, "this dict is not an array"),
        (dask.delayed(np.ones)(3), "this Delayed is not an array"),
        (None, "this NoneType is not an array"),
        ([[1], [2, 3]], "NumPy cannot convert this list.*same shape"),
        (pd.date_range("2000", periods=2, tz="UTC"), "Cast it to numbers"),
    ],
)
def test_a_value_that_is_no_array(tmp_path, value, words):
    with pytest.raises(InvalidParameter, match=rf"arrays\['x'\].*{words}"):
        create_dataset(tmp_path / "d", {"x": value})
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (X, r'Give an array a name \(\{"x": array\}\)'),
        (pa.chunked_array([[1, 2]]), "ChunkedArray is not a table"),
        (pd.Series([1, 2]), r"make a table of a Series \(\.to_frame\(\)\)"),
        (dd.from_pandas(pd.Series([1, 2]), npartitions=1), r"\.to_frame\(\)"),
        ("data.npy", "open what is stored with open_dataset or dshuffle.store.read_sources"),
        (xr.Dataset({"x": ("t", [1])}), "write what xarray has with its to_zarr"),
        (xr.DataArray(X), "write what xarray has with its to_zarr"),
        ({}, "at least one name"),
    ],
)
def test_an_object_that_is_no_table(tmp_path, data, words):
    with pytest.raises(InvalidParameter, match=words):
        create_dataset(tmp_path / "d", data)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["bfloat16", "int4"])
def test_dtypes_of_other_libraries(tmp_path, name):
    values = np.ones(3, getattr(pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed"), name))
    for value in (values, da.from_array(values)):
        with pytest.raises(InvalidParameter, match=rf"arrays\['x'\].*{name}.*Cast it to"):
            create_dataset(tmp_path / "d", {"x": value})


def test_tensors(tmp_path, torch):
    for value, words in {
        torch.ones(3, dtype=torch.bfloat16): "NumPy cannot convert this Tensor.*BFloat16",
        torch.ones(3, requires_grad=True): r"NumPy cannot convert this Tensor.*detach\(\)",
    }.items():
        with pytest.raises(InvalidParameter, match=rf"arrays\['x'\].*{words}"):
            create_dataset(tmp_path / "d", {"x": value})
    found = create_dataset(tmp_path / "d", {"x": torch.arange(6.0).reshape(3, 2)})
    np.testing.assert_array_equal(found.read_rows([2, 0])["x"], np.arange(6.0).reshape(3, 2)[[2, 0]])


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
