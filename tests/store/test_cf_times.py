"""Times by the CF conventions: what is decoded, what is an error, and what stays a number and is listed.

The right values are written down here. ``test_times_like_xarray.py`` compares with xarray over much more.
"""

import importlib.util
import logging
import pickle
import re
import sys

import numpy as np
import pytest
import zarr
from click.testing import CliRunner

import dshuffle
from dshuffle.cli import main
from dshuffle.errors import DatasetError
from dshuffle.store import open_dataset, read_sources

xarray = pytest.importorskip("xarray", reason="xarray is not installed")

NAT = np.iinfo("i8").min
DEFAULT_FILL = 9.969209968386869e36
"""Of floats in netCDF."""


def stored(path, values, kind, **attributes):
    """Write one array as another program would."""
    array = np.array(values, kind)
    zarr.create_group(path).create_array("t", data=array, chunks=(2, *array.shape[1:])).attrs.update(attributes)
    return path


def read(path):
    return open_dataset(path).read_rows([0, 1, 2])["t"]


def dates(*texts):
    return np.array(texts, "M8[ns]")


DAYS = dates("2000-01-01", "2000-01-02", "2000-01-03")


@pytest.mark.parametrize(
    ("values", "dtype", "attributes", "right"),
    [
        ([0, NAT, 2], "i8", {}, dates("2000-01-01", "NaT", "2000-01-03")),
        ([0, np.nan, 2], "f8", {}, dates("2000-01-01", "NaT", "2000-01-03")),
        ([0, -99, 2], "i2", {"_FillValue": -99}, dates("2000-01-01", "NaT", "2000-01-03")),
        ([0, -99, 2], "f4", {"missing_value": -99.0}, dates("2000-01-01", "NaT", "2000-01-03")),
        ([0, 10, 20], "i4", {"scale_factor": 0.1}, DAYS),
        ([5, 6, 7], "i1", {"add_offset": -5}, DAYS),
        ([0, -1, 4], "i1", {"scale_factor": 0.5, "_FillValue": -1}, dates("2000-01-01", "NaT", "2000-01-03")),
        ([0, -1, 2], "i1", {"_Unsigned": "true"}, dates("2000-01-01", "2000-09-12", "2000-01-03")),
        ([0, 255, 2], "u1", {"_Unsigned": "false"}, dates("2000-01-01", "1999-12-31", "2000-01-03")),
        ([0, 0.25, 2**-20], "f8", {}, dates("2000-01-01", "2000-01-01T06", "2000-01-01T00:00:00.082397460")),
    ],
)
def test_numbers_are_unpacked_first(tmp_path, values, dtype, attributes, right):
    found = read(stored(tmp_path / "g", values, dtype, units="days since 2000-01-01", **attributes))
    np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize(
    ("units", "right"),
    [
        ("seconds since 1970-01-01T00:00:00+00:00", dates("1970-01-01", "1970-01-01T00:00:01", "1970-01-01T00:00:02")),
        ("days since 1970-01-01 00:00:00 UTC", dates("1970-01-01", "1970-01-02", "1970-01-03")),
        ("hours since 2000-01-01 00:00:00 +05:30", dates("1999-12-31T18:30", "1999-12-31T19:30", "1999-12-31T20:30")),
        ("hours since 2000-01-01T00:00-0100", dates("2000-01-01T01", "2000-01-01T02", "2000-01-01T03")),
        ("msecs since 2000-01-01", dates("2000-01-01", "2000-01-01T00:00:00.001", "2000-01-01T00:00:00.002")),
        ("days since 2000", DAYS),
        ("Days since 2000-01", DAYS),
        ("days since 1650-01-01 01", np.array(["1650-01-01T01", "1650-01-02T01", "1650-01-03T01"], "M8[us]")),
    ],
)
def test_origins_and_units(tmp_path, units, right):
    found = read(stored(tmp_path / "g", [0, 1, 2], "i4", units=units))
    np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize(
    ("value", "dtype", "attributes"),
    [
        (10**9, "i8", {}),
        (DEFAULT_FILL, "f8", {}),
        (np.inf, "f4", {}),
        (2**63 + 1, "u8", {}),
        (10**6, "i4", {"scale_factor": 1000.0}),
        (-200_000, "i4", {"calendar": "standard"}),  # before the reform
    ],
)
@pytest.mark.parametrize("missing", [False, True])
def test_what_is_out_of_range_is_an_error(tmp_path, value, dtype, attributes, missing):
    """Also beside a missing time, where the least number says nothing."""
    values = [0, value, (np.nan if dtype[0] == "f" else NAT if dtype == "i8" else 1) if missing else 1]
    path = stored(tmp_path / "g", values, dtype, units="days since 2000-01-01", **attributes)
    dataset = open_dataset(path)
    assert dataset.undecoded == {}
    with pytest.raises(DatasetError, match=r"array 't' has the value .* in 'days since 2000-01-01'.*decode=False"):
        dataset.read_rows([1])
    assert not np.isnat(dataset.read_rows([0])["t"]).any()
    assert open_dataset(path, decode=False).read_rows([1])["t"] == np.array(value, dtype)


def test_integers_reach_farther_than_nanoseconds(tmp_path):
    path = stored(tmp_path / "g", [0, 200_000, -90_000], "i4", units="days since 2000-01-01")
    np.testing.assert_array_equal(
        read(path), np.datetime64("2000-01-01", "us") + np.array([0, 200_000, -90_000], "m8[D]")
    )


def test_floats_far_from_their_origin(tmp_path):
    """The count of nanoseconds does not fit 64 bits, but the date does."""
    path = stored(tmp_path / "g", [107_016.0, np.nan, 0.5], "f8", units="days since 1707-01-01")
    np.testing.assert_array_equal(read(path), dates("2000-01-01", "NaT", "1707-01-01T12"))


@pytest.mark.parametrize(
    ("values", "dtype", "attributes", "right"),
    [
        ([1, 2, NAT], "i8", {"units": "hours", "dtype": "timedelta64[ns]"}, np.array([1, 2, "NaT"], "m8[h]")),
        ([1, 2, 3], "i8", {"units": "nanoseconds", "dtype": "timedelta64[ns]"}, np.array([1, 2, 3], "m8[ns]")),
        ([1, 2, 3], "i4", {"units": "days", "dtype": "timedelta64[s]"}, np.array([1, 2, 3], "m8[D]")),
        (
            [1, 2, -1],
            "i4",
            {"units": "days", "dtype": "timedelta64[ns]", "_FillValue": -1},
            np.array([1, 2, "NaT"], "m8[D]"),
        ),
        ([0.5, 1, np.nan], "f8", {"units": "minutes", "dtype": "timedelta64[ns]"}, np.array([30, 60, "NaT"], "m8[s]")),
        (
            [1, 2, 3],
            "i2",
            {"units": "seconds", "dtype": "timedelta64[ms]", "scale_factor": 0.5},
            np.array([500, 1000, 1500], "m8[ms]"),
        ),
    ],
)
def test_durations(tmp_path, values, dtype, attributes, right):
    found = read(stored(tmp_path / "g", values, dtype, **attributes))
    assert found.dtype.kind == "m"
    np.testing.assert_array_equal(found, right)


def test_a_duration_out_of_range_is_an_error(tmp_path):
    path = stored(tmp_path / "g", [0, 10**6, 1], "i4", units="days", dtype="timedelta64[ns]")
    with pytest.raises(DatasetError, match="array 't' has the value 1000000 in 'days'"):
        read(path)


UNDECODED = [
    (
        {"units": "mm since start of season", "scale_factor": 0.5, "_FillValue": -99},
        "xarray cannot decode numbers in 'mm since",
    ),
    ({"units": "days since 2000-01-01", "calendar": "noleap", "scale_factor": 0.5, "_FillValue": -99}, "noleap"),
    ({"units": "people_since_lunch", "scale_factor": 0.5, "_FillValue": -99}, "xarray cannot decode numbers in"),
    ({"units": "hours", "scale_factor": 0.5, "_FillValue": -99}, r"only with dtype='timedelta64\[...\]'"),
    (
        {"units": "h", "dtype": "timedelta64[ns]", "scale_factor": 0.5, "_FillValue": -99},
        "durations only with",
    ),
    (
        {"units": "days", "dtype": "timedelta64", "scale_factor": 0.5, "_FillValue": -99},
        "cannot decode numbers in 'days'",
    ),
]


@pytest.mark.parametrize(("attributes", "reason"), UNDECODED)
def test_what_is_undecoded_is_scaled_and_listed(tmp_path, caplog, attributes, reason):
    path = stored(tmp_path / "g", [0, -99, 2], "i4", **attributes)
    with caplog.at_level(logging.WARNING):
        dataset = open_dataset(path)
    np.testing.assert_array_equal(dataset.read_rows([0, 1, 2])["t"], [0, np.nan, 1])
    assert list(dataset.undecoded) == ["t"]
    [line] = [record.getMessage() for record in caplog.records]
    assert re.search(reason, dataset.undecoded["t"])
    assert line == f"Array 't' of {path} is not decoded: {dataset.undecoded['t']}"


def test_undecoded_arrays_are_told_everywhere(tmp_path, caplog):
    path = stored(tmp_path / "g", [0, 1, 2], "i4", units="days since 2000-01-01", calendar="360_day")
    dataset = open_dataset(path)
    assert repr(dataset).endswith("(t: int32 ()), not decoded: t>")
    assert "<th>not decoded</th><td>t</td>" in dataset._repr_html_()
    runner = CliRunner()
    assert "not decoded: t (its calendar is '360_day'" in runner.invoke(main, ["dataset", "info", str(path)]).output
    assert "not decoded: t" in runner.invoke(main, ["dataset", "shuffle", str(path), str(tmp_path / "copy")]).output
    assert open_dataset(path, decode=False).undecoded == {}
    assert dataset.select([0, 1]).undecoded == dataset.undecoded
    caplog.clear()
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.undecoded == dataset.undecoded
    assert not caplog.records  # the process that opened it has logged it


def test_workers_decode_as_the_client_does(tmp_path, monkeypatch):
    """A worker without xarray has the values of a client with it."""
    path = stored(tmp_path / "g", [0, 1, 2], "i4", units="days since Jan 1 2000")
    dataset = open_dataset(path)
    np.testing.assert_array_equal(dataset.read_rows([0, 1, 2])["t"], DAYS)
    pickled = pickle.dumps(dataset.select([0, 1]))
    monkeypatch.setitem(sys.modules, "xarray", None)
    np.testing.assert_array_equal(pickle.loads(pickled).read_rows([0, 1])["t"], DAYS[:2])


def test_without_xarray_numbers_stay_as_they_are_stored_and_one_sentence_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "xarray", None)
    group = zarr.create_group(tmp_path / "g")
    for name, attributes in {
        "packed": {"scale_factor": 0.5},
        "missing": {"_FillValue": 1},
        "time": {"units": "days since 2000-01-01"},
        "lead": {"units": "hours", "dtype": "timedelta64[ns]"},
        "unsigned": {"_Unsigned": "true"},
        "plain": {"units": "K", "_FillValue": "AAAAAAAA+H8=", "long_name": "of floats, without missing ones but NaN"},
        "flag": {"dtype": "bool"},
    }.items():
        dtype = {"plain": "f4", "flag": "i1"}.get(name, "i2")
        group.create_array(name, data=np.array([0, 1, -1], dtype)).attrs.update(attributes)
    with caplog.at_level(logging.WARNING):
        dataset = open_dataset(tmp_path / "g")
    [line] = [record.getMessage() for record in caplog.records]
    assert "is not installed (pip install 'dshuffle[xarray]')" in line
    assert set(dataset.undecoded) == {"packed", "missing", "time", "lead", "unsigned"}
    rows = dataset.read_rows([0, 1, 2])
    for name in dataset.undecoded:
        assert rows[name].tolist() == [0, 1, -1]
    assert rows["flag"].tolist() == [False, True, True]


@pytest.mark.parametrize(("value", "right"), [("true", [0, 255]), ("True", [0, -1]), ("false", [0, -1]), (1, [0, -1])])
def test_unsigned_numbers_are_as_in_xarray(tmp_path, value, right):
    path = stored(tmp_path / "g", [0, -1], "i1", _Unsigned=value)
    array = xarray.Variable("n", np.array([0, -1], "i1"), {"_Unsigned": value})
    assert xarray.conventions.decode_cf_variable("t", array).values.tolist() == right
    assert open_dataset(path).read_rows([0, 1])["t"].tolist() == right


def test_an_origin_before_the_reform_needs_cftime(tmp_path):
    path = stored(tmp_path / "g", [730_121, 730_122, 730_123], "i4", units="days since 0001-01-01")
    if importlib.util.find_spec("cftime") is None:
        assert "cftime" in open_dataset(path).undecoded["t"]
    else:
        np.testing.assert_array_equal(read(path), dates("2000-01-01", "2000-01-02", "2000-01-03"))
    path = stored(tmp_path / "p", [730_119, 1, 2], "i4", units="days since 0001-01-01", calendar="proleptic_gregorian")
    np.testing.assert_array_equal(read(path), np.array(["2000-01-01", "0001-01-02", "0001-01-03"], "M8[us]"))


def test_bounds_have_the_units_of_their_time(tmp_path):
    """xarray leaves out units that both share."""
    group = zarr.create_group(tmp_path / "g")
    attributes = {"units": "days since 2000-01-01", "calendar": "standard", "bounds": "time_bnds"}
    group.create_array("time", data=np.arange(3), dimension_names=["time"]).attrs.update(attributes)
    group.create_array("time_bnds", data=np.array([[0, 1], [1, 2], [2, 3]]), dimension_names=["time", "two"])
    read = open_dataset(tmp_path / "g").read_rows([0, 2])
    np.testing.assert_array_equal(
        read["time_bnds"], np.array([["2000-01-01", "2000-01-02"], ["2000-01-03", "2000-01-04"]], "M8[D]")
    )


def test_tasks_get_the_error_with_the_name_of_the_array(tmp_path):
    path = stored(tmp_path / "g", [0, 10**9, 2, 3], "i8", units="days since 2000-01-01")

    from distributed import Client

    with (
        Client(n_workers=1, processes=False, dashboard_address=":0") as client,
        dshuffle.Shuffler(client, path) as shuffler,
    ):
        [epoch] = shuffler.epochs(1)
        with pytest.raises(DatasetError, match="array 't' has the value 1000000000"):
            client.gather(epoch.map(lambda partition: partition["t"]))
        epoch.accept()


@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_large_integers_keep_their_digits(tmp_path, dtype):
    path = stored(tmp_path / "g", [2**53 + 1, 3, 2**61], dtype, scale_factor=1)
    array = open_dataset(path).read_rows([0, 1, 2])["t"]
    assert array.dtype == dtype
    assert array.tolist() == [2**53 + 1, 3, 2**61]
    path = stored(tmp_path / "n", [10**18 + 1], "i8", scale_factor=1, units="nanoseconds since 1970-01-01")
    assert open_dataset(path).read_rows([0])["t"][0] == np.datetime64(10**18 + 1, "ns")


def test_a_scaled_integer_beyond_its_dtype_is_an_error(tmp_path):
    path = stored(tmp_path / "g", [2**61, 1], "i8", scale_factor=8)
    dataset = open_dataset(path)
    assert dataset.read_rows([1])["t"].tolist() == [8]
    with pytest.raises(DatasetError, match=rf"array 't' has the value {2**61}, and times scale_factor=8.*int64"):
        dataset.read_rows([0, 1])


def test_fill_values_are_compared_as_they_are_stored(tmp_path):
    path = stored(tmp_path / "g", [1, 2, 1e20], "f4", _FillValue=1e20)
    assert np.isnan(open_dataset(path).read_rows([2])["t"][0])
    path = stored(tmp_path / "b", [1, 2], "i4", _FillValue="x")
    with pytest.raises(DatasetError, match=r"_FillValue='x'.*not a number.*decode=False"):
        open_dataset(path)


def test_a_single_array_is_a_source_of_values(tmp_path):
    path = stored(tmp_path / "g", [0, 1, 2], "i2", scale_factor=0.5)
    assert read_sources([f"{path}/t"])["t"][0:3].tolist() == [0, 0.5, 1]
