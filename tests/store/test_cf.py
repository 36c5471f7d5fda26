"""Values by the CF conventions: what is decoded, what is an error, and what stays a number and is listed.

The right values are written down here. ``test_times_like_xarray.py`` compares with xarray over much more.
"""

import logging
import pickle
import re
import sys
import warnings

import numpy as np
import pytest
import zarr

import dshuffle
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


def read(path, **options):
    dataset = open_dataset(path, **options)
    return dataset.read_rows(np.arange(dataset.n_samples))["t"]


def dates(*texts):
    return np.array(texts, "M8[ns]")


DAYS = dates("2000-01-01", "2000-01-02", "2000-01-03")
GAP = dates("2000-01-01", "NaT", "2000-01-03")
SINCE_2000 = {"units": "days since 2000-01-01"}


@pytest.mark.parametrize(
    ("values", "dtype", "attributes", "right"),
    [
        # Numbers are unpacked first.
        ([0, NAT, 2], "i8", SINCE_2000, GAP),
        ([0, -1, 4], "i1", SINCE_2000 | {"scale_factor": 0.5, "_FillValue": -1}, GAP),
        ([0, 1, -1], "i1", SINCE_2000 | {"_Unsigned": "true"}, dates("2000-01-01", "2000-01-02", "2000-09-12")),
        ([0, 0.25, 2**-20], "f8", SINCE_2000, dates("2000-01-01", "2000-01-01T06", "2000-01-01T00:00:00.082397460")),
        # Integers reach farther than nanoseconds. A count of them may not fit 64 bits, although the date does.
        ([0, 200_000, 1], "i4", SINCE_2000, np.array([0, 200_000, 1], "m8[D]") + np.datetime64("2000-01-01", "us")),
        ([107_016.0, np.nan], "f8", {"units": "days since 1707-01-01"}, dates("2000-01-01", "NaT")),
        (
            [0, 1],
            "i4",
            {"units": "hours since 2000-01-01 00:00:00 +05:30"},
            dates("1999-12-31T18:30", "1999-12-31T19:30"),
        ),
        ([0, 1, 2], "i4", {"units": "Days since 2000-01"}, DAYS),
        ([1, 2, NAT], "i8", {"units": "hours", "dtype": "timedelta64[ns]"}, np.array([1, 2, "NaT"], "m8[h]")),
        # Large integers keep their digits, and fill values are compared as they are stored.
        ([2**53 + 1, 3, 2**61], "i8", {"scale_factor": 1}, np.array([2**53 + 1, 3, 2**61])),
        ([1, 2, 1e20], "f4", {"_FillValue": 1e20}, np.array([1, 2, np.nan])),
        ([0, -1], "i1", {"_Unsigned": 1}, np.array([0, -1])),
        # As some writers of netCDF leave it. (xarray makes Python objects of it.)
        ([0, 3], "i2", {"scale_factor": [0.5], "add_offset": [1.0]}, np.array([1.0, 2.5])),
    ],
    ids=str,
)
def test_values(tmp_path, values, dtype, attributes, right):
    found = read(stored(tmp_path / "g", values, dtype, **attributes))
    assert found.dtype.kind == right.dtype.kind
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
        (10**6, "i4", {"units": "days", "dtype": "timedelta64[ns]"}),
    ],
)
@pytest.mark.parametrize("missing", [False, True])
def test_what_is_out_of_range_is_an_error(tmp_path, value, dtype, attributes, missing):
    """Also beside a missing time, where the least number says nothing."""
    values = [0, value, (np.nan if dtype[0] == "f" else NAT if dtype == "i8" else 1) if missing else 1]
    path = stored(tmp_path / "g", values, dtype, **(SINCE_2000 | attributes))
    dataset = open_dataset(path)
    assert dataset.undecoded == {}
    with pytest.raises(DatasetError, match=r"array 't' has the value .* in 'days.*decode=False"):
        dataset.read_rows([1])
    assert not np.isnat(dataset.read_rows([0])["t"]).any()
    assert open_dataset(path, decode=False).read_rows([1])["t"] == np.array(value, dtype)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"units": "mm since start of season"}, "xarray cannot decode numbers in 'mm since"),
        (SINCE_2000 | {"calendar": "noleap"}, "noleap"),
        (SINCE_2000 | {"units": "days since 0001-01-01"}, "differ from those of NumPy|cftime"),
        ({"units": "hours"}, r"only as integers with dtype='timedelta64\[...\]'"),
        ({"units": "h", "dtype": "timedelta64[ns]"}, "durations only as integers"),
        ({"units": "hours", "dtype": "timedelta64[ns]"}, "durations only as integers"),
        ({"units": "days", "dtype": "timedelta64"}, "cannot decode numbers in 'days'"),
    ],
)
def test_what_is_undecoded_is_scaled_and_listed(tmp_path, caplog, attributes, reason):
    path = stored(tmp_path / "g", [0, -99, 2], "i4", **attributes, scale_factor=0.5, _FillValue=-99)
    with caplog.at_level(logging.WARNING):
        dataset = open_dataset(path)
    np.testing.assert_array_equal(dataset.read_rows([0, 1, 2])["t"], [0, np.nan, 1])
    assert list(dataset.undecoded) == ["t"]
    [line] = [record.getMessage() for record in caplog.records]
    assert re.search(reason, dataset.undecoded["t"])
    assert line == f"Array 't' of {path} is not decoded: {dataset.undecoded['t']}"


def test_workers_decode_as_the_client_does(tmp_path, monkeypatch):
    """A worker without xarray has the values of a client with it."""
    dataset = open_dataset(stored(tmp_path / "g", [0, 1, 2], "i4", units="days since Jan 1 2000"))
    pickled = pickle.dumps(dataset.select([0, 1]))
    monkeypatch.setitem(sys.modules, "xarray", None)
    np.testing.assert_array_equal(pickle.loads(pickled).read_rows([0, 1])["t"], DAYS[:2])


def test_without_xarray_numbers_stay_as_they_are_stored_and_one_sentence_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "xarray", None)
    group = zarr.create_group(tmp_path / "g")
    for name, attributes in {
        "packed": {"scale_factor": 0.5},
        "missing": {"_FillValue": 1},
        "time": SINCE_2000,
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
    assert all(rows[name].tolist() == [0, 1, -1] for name in dataset.undecoded)
    assert rows["flag"].tolist() == [False, True, True]


@pytest.mark.parametrize(("name", "value"), [("scale_factor", "half"), ("_FillValue", "x")])
def test_an_attribute_that_is_no_number_is_not_passed_over(tmp_path, name, value):
    path = stored(tmp_path / "g", np.arange(4), "i2", **{name: value})
    words = rf"{name}='{value}' of array .*t is not a number.*decode=False"
    with pytest.raises(DatasetError, match=words):
        open_dataset(path)
    assert read(path, decode=False).tolist() == [0, 1, 2, 3]
    zarr.open_group(path).create_array("u", data=np.arange(4.0))
    assert list(open_dataset(path, arrays=["u"]).arrays) == ["u"]


def test_tasks_and_sources_get_values_or_the_error_with_the_name_of_the_array(client, tmp_path):
    path = stored(tmp_path / "g", [0, 10**9, 2, 3], "i8", **SINCE_2000)
    with dshuffle.Shuffler(client, path) as shuffler:
        [epoch] = shuffler.epochs(1)
        with pytest.raises(DatasetError, match="array 't' has the value 1000000000"):
            client.gather(epoch.map(lambda partition: partition["t"]))
        epoch.accept()
    path = stored(tmp_path / "h", [0, 1, 2], "i2", scale_factor=0.5)
    assert read_sources([path])["t"][0:3].tolist() == [0, 0.5, 1]


# -- Stores that xarray has written ------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
IDS = np.array([3, 0, 6, 3])
ENCODING = {
    "temperature": {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768},
    "rain": {"_FillValue": -1.0},
    "time": {"units": "minutes since 1999-12-31 18:00:00", "dtype": "i8"},
}


def weather():
    """A dataset as climate scientists have it: packed numbers, missing values, times, coordinates."""
    times = np.arange("2001-01-01", "2001-01-08", dtype="M8[D]").astype("M8[ns]") + np.timedelta64(90, "m")
    temperature = 280 + 10 * RNG.random((7, 4, 6))
    temperature[2, 1, 3] = np.nan
    return xarray.Dataset(
        {
            "temperature": (("time", "lat", "lon"), temperature),
            "rain": (("lat", "time"), RNG.random((4, 7)).astype("f4")),
            "count": (("time",), np.arange(7, dtype="i4")),
            "flag": (("time",), np.arange(7) % 2 == 0),
            "station": (("time",), [f"s{number}" for number in range(7)]),
            "crs": ((), 4326),
        },
        coords={
            "time": times,
            "lat": np.linspace(-90, 90, 4),
            "lon": np.arange(6.0),
            "name": ("time", list("abcdefg")),
        },
    )


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("consolidated", [True, False])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_values_agree_with_xarray(tmp_path, zarr_format, consolidated):
    encoding = ENCODING | {"temperature": ENCODING["temperature"] | {"chunks": (2, 2, 6)}}
    weather().to_zarr(tmp_path / "w.zarr", zarr_format=zarr_format, consolidated=consolidated, encoding=encoding)
    expected = xarray.open_zarr(tmp_path / "w.zarr", consolidated=consolidated).load()
    dataset = open_dataset(tmp_path / "w.zarr")
    assert set(dataset.arrays) >= {"temperature", "rain", "count", "flag", "time"}
    assert set(dataset.skipped) >= {"lat", "lon", "crs"}
    found = dataset.read_rows(IDS)
    for name in found:
        values = expected[name].transpose("time", ...).values[IDS]
        if values.dtype.kind in "MfO":
            values = values.astype(found[name].dtype)
        assert dataset.arrays[name].dtype == found[name].dtype
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    assert found["temperature"].dtype == expected["temperature"].dtype
    assert np.isnan(dataset.read_rows([2])["temperature"][0, 1, 3])
    assert found["time"].dtype.kind == "M"
    # What travels are the stored numbers.
    assert dataset.layout.dtype["temperature"].base == np.int16
    assert open_dataset(tmp_path / "w.zarr", decode=False).read_rows(IDS)["temperature"].dtype == np.int16
    by_place = open_dataset(tmp_path / "w.zarr", sample_dim="lat")
    np.testing.assert_array_equal(
        by_place.read_rows([3, 1])["temperature"], expected["temperature"].transpose("lat", ...).values[[3, 1]]
    )


def test_sessions_exchange_stored_numbers_and_hand_out_values(client, tmp_path):
    """Peers exchange int16; tasks see what xarray would show, in every way of looking at a partition."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weather().to_zarr(tmp_path / "w.zarr", encoding=ENCODING)
    dataset = open_dataset(tmp_path / "w.zarr", arrays=["temperature", "time", "count"])
    expected = dataset.read_rows(np.arange(7))

    def look(partition):
        array, first, slots = partition.rows("temperature")
        kernels = array[slots, first : first + 24].reshape(-1, 4, 6)
        batches = np.concatenate([batch["temperature"] for batch in partition.batches(2)])
        dtype, shape = partition.dtype("temperature")
        assert (dtype, shape) == (np.float64, (4, 6))
        assert dtype == kernels.dtype == batches.dtype
        np.testing.assert_array_equal(kernels, partition["temperature"])
        np.testing.assert_array_equal(batches, partition["temperature"])
        return partition.sample_ids.copy(), partition["temperature"], partition.take(slice(None), ["time"])["time"]

    with dshuffle.Shuffler(client, dataset) as shuffler:
        for epoch in shuffler.epochs(3):
            found = client.gather(epoch.map(look))
            assert sorted(np.concatenate([one for one, _, _ in found])) == list(range(7))
            for own, temperature, time in found:
                np.testing.assert_array_equal(temperature, expected["temperature"][own])
                np.testing.assert_array_equal(time, expected["time"][own])
        assert shuffler.records[-1].row_nbytes == 4 * 6 * 2 + 8 + 4
