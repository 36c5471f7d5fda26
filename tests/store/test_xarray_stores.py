"""Stores that xarray has written: values, missing values and times, as xarray itself reads them."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import zarr

import dshuffle
from dshuffle.errors import DatasetError
from dshuffle.store import open_dataset
from dshuffle.training import fit_linear_regression

xarray = pytest.importorskip("xarray", reason="xarray is not installed")

RNG = np.random.default_rng(0)
IDS = np.array([3, 0, 6, 3])


def weather():
    """A dataset as climate scientists have it: packed numbers, missing values, times, coordinates."""
    times = np.arange("2001-01-01", "2001-01-08", dtype="M8[D]").astype("M8[ns]") + np.timedelta64(90, "m")
    temperature = 280 + 10 * RNG.random((7, 4, 6))
    temperature[2, 1, 3] = np.nan
    dims = ("time", "lat", "lon")
    return xarray.Dataset(
        {
            "temperature": (dims, temperature),
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


ENCODING = {
    "temperature": {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768},
    "rain": {"_FillValue": -1.0},
    "time": {"units": "minutes since 1999-12-31 18:00:00", "dtype": "i8"},
}


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("consolidated", [True, False])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_values_agree_with_xarray(tmp_path, zarr_format, consolidated):
    encoding = {name: dict(how) for name, how in ENCODING.items()}
    encoding["temperature"]["chunks"] = (2, 2, 6)
    weather().to_zarr(tmp_path / "w.zarr", zarr_format=zarr_format, consolidated=consolidated, encoding=encoding)
    expected = xarray.open_zarr(tmp_path / "w.zarr", consolidated=consolidated).load()
    dataset = open_dataset(tmp_path / "w.zarr")
    assert set(dataset.arrays) >= {"temperature", "rain", "count", "flag", "time"}
    assert set(dataset.skipped) >= {"lat", "lon", "crs"}
    read = dataset.read_rows(IDS)
    for name in read:
        values = expected[name].transpose("time", ...).values[IDS]
        if values.dtype.kind in "MfO":
            values = values.astype(read[name].dtype)
        assert dataset.arrays[name].dtype == read[name].dtype
        np.testing.assert_array_equal(read[name], values, err_msg=name)
    assert read["temperature"].dtype == expected["temperature"].dtype
    assert np.isnan(dataset.read_rows([2])["temperature"][0, 1, 3])
    assert read["time"].dtype.kind == "M"
    # What travels are the stored numbers.
    assert dataset.layout.dtype["temperature"].base == np.int16
    stored = open_dataset(tmp_path / "w.zarr", decode=False).read_rows(IDS)
    assert stored["temperature"].dtype == np.int16
    by_place = open_dataset(tmp_path / "w.zarr", sample_dim="lat")
    np.testing.assert_array_equal(
        by_place.read_rows([3, 1])["temperature"], expected["temperature"].transpose("lat", ...).values[[3, 1]]
    )


@pytest.mark.parametrize(
    "dtype",
    ["i1", "i2", "u2", "f4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("i4", "i8", "u1", "f8"))],
)
@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"scale_factor": 0.5},
        {"add_offset": 3.0},
        {"scale_factor": 0.1, "add_offset": -7.0, "_FillValue": 5},
        {"_FillValue": 5},
        {"missing_value": 5},
        {"_FillValue": 5, "missing_value": 6},
        {"_Unsigned": "true", "_FillValue": 5},
        {"units": "days since 2000-01-01"},
        {"units": "hours since 1900-01-01 06:30:00.5", "calendar": "gregorian"},
        {"units": "seconds since 1970-01-01T00:00:00Z", "calendar": "proleptic_gregorian"},
        {"units": "K"},
        {"units": "days since 2000-01-01", "calendar": "noleap"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_encoding_agrees_with_xarray(tmp_path, dtype, attributes):
    attributes = dict(attributes)
    if attributes.get("_Unsigned") and not dtype.startswith("i"):
        pytest.skip("only signed integers can stand for unsigned ones")
    for name in ("_FillValue", "missing_value"):
        if name in attributes and dtype.startswith("f"):
            attributes[name] = float(attributes[name])
    group = zarr.create_group(tmp_path / "g", zarr_format=2)
    array = group.create_array("x", shape=(7,), dtype=dtype, fill_value=attributes.pop("_FillValue", None))
    array[:] = np.array([5, 6, 7, 100, 0, 1, 2]).astype(dtype)
    array.attrs.update({"_ARRAY_DIMENSIONS": ["n"], **attributes})
    if attributes.get("calendar") == "noleap":
        assert "noleap" in open_dataset(tmp_path / "g").undecoded["x"]  # NumPy has no such dates: the numbers stay
        return
    expected = xarray.open_zarr(tmp_path / "g", consolidated=False)["x"].values
    found = open_dataset(tmp_path / "g").read_rows(np.arange(7))["x"]
    if expected.dtype.kind == "M":
        assert found.dtype.kind == "M"
        expected, found = expected.astype("M8[us]"), found.astype("M8[us]")
    else:
        assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("units", "first"),
    [
        ("nanoseconds since 2000-01-01", np.datetime64("2000-01-01T00:00:00.000000003", "ns")),
        ("ms since 1990-02-03 04:05", np.datetime64("1990-02-03T04:05:00.003", "us")),
        ("d since 2000-1-1", np.datetime64("2000-01-04", "us")),
    ],
)
def test_units_of_time(tmp_path, units, first):
    array = zarr.create_group(tmp_path / "g").create_array("t", data=np.array([3, 4]))
    array.attrs["units"] = units
    assert open_dataset(tmp_path / "g").read_rows([0])["t"][0] == first


@pytest.mark.parametrize("units", ["days since yesterday", "fortnights since 2000-01-01", "days since 2000-13-01"])
def test_times_that_numpy_does_not_know_stay_numbers(tmp_path, units):
    array = zarr.create_group(tmp_path / "g").create_array("t", data=np.array([3, 4]))
    array.attrs["units"] = units
    assert open_dataset(tmp_path / "g").read_rows([0])["t"] == 3


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
            ids = np.concatenate([one for one, _, _ in found])
            assert sorted(ids) == list(range(7))
            for own, temperature, time in found:
                np.testing.assert_array_equal(temperature, expected["temperature"][own])
                np.testing.assert_array_equal(time, expected["time"][own])
        assert shuffler.records[-1].row_nbytes == 4 * 6 * 2 + 8 + 4


@pytest.mark.slow
def test_a_scaled_regression_is_trained_on_decoded_values(client, tmp_path):
    features = RNG.integers(-100, 100, (60, 3)).astype("i2")
    group = zarr.create_group(tmp_path / "g")
    group.create_array("x", data=features).attrs["scale_factor"] = 0.01
    group.create_array("y", data=(features * 0.01) @ [1.0, 2.0, 3.0])

    with dshuffle.Shuffler(client, tmp_path / "g") as shuffler:
        history = fit_linear_regression(shuffler, epochs=30, step=0.5)
    np.testing.assert_allclose(history.model, [1, 2, 3], atol=1e-3)


def test_a_scale_may_be_a_list_of_one(tmp_path):
    """As some writers of netCDF leave it. (xarray makes Python objects of it.)"""
    group = zarr.create_group(tmp_path / "g")
    group.create_array("t", data=np.arange(4, dtype="i2")).attrs.update({"scale_factor": [0.5], "add_offset": [1.0]})
    assert open_dataset(tmp_path / "g").read_rows([0, 3])["t"].tolist() == [1.0, 2.5]


def test_a_scale_that_is_no_number_is_not_passed_over(tmp_path):
    group = zarr.create_group(tmp_path / "g")
    group.create_array("t", data=np.arange(4, dtype="i2")).attrs["scale_factor"] = "half"
    with pytest.raises(DatasetError, match=r"scale_factor='half' of array .*t is not a number.*decode=False"):
        open_dataset(tmp_path / "g")
    assert open_dataset(tmp_path / "g", decode=False).read_rows([3])["t"].tolist() == [3]
    group.create_array("u", data=np.arange(4.0))
    opened = open_dataset(tmp_path / "g")
    assert list(opened.arrays) == ["u"]
    assert "scale_factor='half'" in opened.skipped["t"]
    with pytest.raises(DatasetError, match="scale_factor='half'"):
        open_dataset(tmp_path / "g", arrays=["t", "u"])
