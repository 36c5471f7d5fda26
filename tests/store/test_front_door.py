"""Stores that others made: which arrays are samples, along which axis, and what their numbers mean."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import zarr

import dshuffle
from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.store import open_dataset, read_array, verify_dataset

RNG = np.random.default_rng(0)
IDS = np.array([3, 0, 6, 3])


@pytest.fixture
def group(tmp_path):
    """A group of arrays with and without the dimension of samples, as many tools write it."""
    group = zarr.create_group(tmp_path / "g")
    group.create_array("field", data=RNG.random((7, 4, 6)), chunks=(2, 3, 6), dimension_names=("time", "lat", "lon"))
    group.create_array("level", data=RNG.random((3, 7)), chunks=(2, 3), dimension_names=("height", "time"))
    group.create_array("time", data=np.arange(7), dimension_names=("time",))
    group.create_array("lat", data=np.arange(4.0), dimension_names=("lat",))
    group.create_array("crs", data=np.array(5))
    group.create_array("unnamed", data=np.arange(7))
    group.create_array("short", data=np.arange(6))
    words = group.create_array("words", shape=(7,), dtype=str)
    words[:] = ["a"] * 7
    return group


def test_arrays_with_the_dimension_of_the_largest_are_taken(group, tmp_path):
    dataset = open_dataset(tmp_path / "g")
    assert {name: info.shape for name, info in dataset.arrays.items()} == {
        "field": (4, 6), "level": (3,), "time": (), "unnamed": (),
    }  # fmt: skip
    assert dict(dataset.skipped) == {
        "crs": "it is a scalar",
        "lat": "its dimensions are lat, without time",
        "short": "its length is 6, not 7 as that of field",
        "words": "its items have different lengths (StringDType())",
    }
    read = dataset.read_rows(IDS)
    np.testing.assert_array_equal(read["field"], group["field"][:][IDS])
    np.testing.assert_array_equal(read["level"], group["level"][:].T[IDS])
    assert "without crs, lat, short, words" in repr(dataset)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("how", ["chunks", "shards", "whole", "v2"])
def test_any_axis_can_be_the_samples(tmp_path, axis, by_name, how):
    data = RNG.integers(0, 1000, (7, 9, 8))
    layout = {
        "chunks": {"chunks": (3, 2, 5)},
        "shards": {"chunks": (2, 3, 4), "shards": (4, 9, 8)},
        "whole": {"chunks": (7, 9, 8)},
        "v2": {"chunks": (3, 4, 3)},
    }[how]
    group = zarr.create_group(tmp_path / "g", zarr_format=2 if how == "v2" else 3)
    names = ("a", "b", "c")
    if how == "v2":
        array = group.create_array("x", shape=data.shape, dtype=data.dtype, fill_value=None, **layout)
        array.attrs["_ARRAY_DIMENSIONS"] = list(names)
    else:
        array = group.create_array("x", shape=data.shape, dtype=data.dtype, dimension_names=names, **layout)
    array[:] = data
    dataset = open_dataset(tmp_path / "g", sample_dim=names[axis] if by_name else axis)
    expected = np.moveaxis(data, axis, 0)
    assert dataset.n_samples == data.shape[axis]
    np.testing.assert_array_equal(dataset.read_rows(IDS)["x"], expected[IDS])
    np.testing.assert_array_equal(read_array(dataset, "x")[0 : len(expected)], expected)
    rows = dataset.layout.empty(4)
    dataset.read_into(rows, np.arange(4), IDS)
    np.testing.assert_array_equal(dataset.layout.column(rows, "x"), expected[IDS])
    assert verify_dataset(dataset).ok
    assert np.array_equal(pickle.loads(pickle.dumps(dataset)).read_rows(IDS)["x"], expected[IDS])


def test_a_damaged_chunk_is_named_by_its_samples_along_any_axis(tmp_path):
    data = RNG.random((6, 10))
    zarr.create_group(tmp_path / "g").create_array("x", data=data, chunks=(3, 4))
    path = tmp_path / "g" / "x" / "c" / "1" / "2"
    path.write_bytes(path.read_bytes()[:5])
    dataset = open_dataset(tmp_path / "g", sample_dim=1)
    with pytest.raises(DatasetError, match=r"chunk \(1, 2\) of array 'x' .* samples 8 to 9\)"):
        dataset.read_rows([9])
    np.testing.assert_array_equal(dataset.read_rows([7, 0])["x"], data.T[[7, 0]])


def test_arrays_are_chosen_by_name_and_by_path(group, tmp_path):
    inner = group.create_group("inner").create_group("deep")
    inner.create_array("z", data=np.arange(14).reshape(7, 2))
    dataset = open_dataset(tmp_path / "g", arrays=["inner/deep/z", "unnamed"])
    assert list(dataset.arrays) == ["inner/deep/z", "unnamed"]
    np.testing.assert_array_equal(dataset.read_rows(IDS)["inner/deep/z"], np.arange(14).reshape(7, 2)[IDS])
    assert open_dataset(tmp_path / "g", arrays="time").arrays.keys() == {"time"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"arrays": []}, InvalidParameter, r"arrays=\[\] is not allowed; it must be None, or names of arrays"),
        ({"arrays": ["nothing"]}, InvalidParameter, "arrays='nothing' is not allowed; .* It has crs, field"),
        ({"arrays": ["field", "lat"]}, DatasetError, "opened together: lat: its dimensions are lat, without time"),
        ({"arrays": ["field", "short"]}, DatasetError, "opened together: short: its length is 6, not 7"),
        ({"arrays": ["words"]}, DatasetError, "opened together: words: its items have different lengths"),
        ({"sample_dim": "depth"}, InvalidParameter, r"one of the dimensions of .*: \['height', 'lat', 'lon', 'time'\]"),
        ({"sample_dim": -1}, InvalidParameter, "sample_dim=-1 is not allowed"),
        ({"sample_dim": 5}, DatasetError, "no arrays of samples: .* it has no axis 5"),
        ({"decode": "yes"}, InvalidParameter, "decode='yes' is not allowed; it must be True or False"),
    ],
)
def test_what_cannot_be_opened(group, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        open_dataset(tmp_path / "g", **options)


def test_an_array_that_zarr_cannot_open_does_not_stop_the_others(group, tmp_path):
    group.create_array("strange", data=np.arange(7))
    metadata = tmp_path / "g" / "strange" / "zarr.json"
    metadata.write_text(metadata.read_text().replace("int64", "unknown42"))
    dataset = open_dataset(tmp_path / "g")
    assert "field" in dataset.arrays
    assert dataset.skipped["strange"].startswith("zarr cannot open it (")


def test_the_identity_depends_on_what_is_opened(group, tmp_path):
    asked = [{}, {"arrays": ["time"]}, {"sample_dim": "lat"}, {"decode": False}]
    assert len({open_dataset(tmp_path / "g", **options).identity for options in asked}) == 4
    own = dshuffle.create_dataset(tmp_path / "own", {"x": np.arange(7), "y": np.arange(7)})
    part = open_dataset(tmp_path / "own", arrays=["x"])
    assert part.identity != own.identity
    assert pickle.loads(pickle.dumps(part)).identity == part.identity
    part.check_unchanged()
    assert open_dataset(tmp_path / "own").identity == own.identity


# -- xarray ------------------------------------------------------------------------------------------------------------

xarray = pytest.importorskip("xarray")


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


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "f4", "f8"])
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


def test_sessions_exchange_stored_numbers_and_hand_out_values(tmp_path):
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

    from distributed import Client

    with (
        Client(n_workers=2, processes=False, dashboard_address=":0") as client,
        dshuffle.Shuffler(client, dataset) as shuffler,
    ):
        for epoch in shuffler.epochs(3):
            found = client.gather(epoch.map(look))
            ids = np.concatenate([one for one, _, _ in found])
            assert sorted(ids) == list(range(7))
            for own, temperature, time in found:
                np.testing.assert_array_equal(temperature, expected["temperature"][own])
                np.testing.assert_array_equal(time, expected["time"][own])
        assert shuffler.records[-1].row_nbytes == 4 * 6 * 2 + 8 + 4


def test_a_scaled_regression_is_trained_on_decoded_values(tmp_path):
    features = RNG.integers(-100, 100, (60, 3)).astype("i2")
    group = zarr.create_group(tmp_path / "g")
    group.create_array("x", data=features).attrs["scale_factor"] = 0.01
    group.create_array("y", data=(features * 0.01) @ [1.0, 2.0, 3.0])

    from distributed import Client

    from dshuffle.training import fit_linear_regression

    with (
        Client(n_workers=2, processes=False, dashboard_address=":0") as client,
        dshuffle.Shuffler(client, tmp_path / "g") as shuffler,
    ):
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


def test_an_array_that_zarr_cannot_open_is_named(tmp_path):
    group = zarr.create_group(tmp_path / "g")
    group.create_array("x", data=np.arange(4))
    metadata = tmp_path / "g" / "x" / "zarr.json"
    metadata.write_text(metadata.read_text().replace('"int64"', '"int65"'))
    with pytest.raises(DatasetError, match=r"array x cannot be opened: zarr cannot open it \("):
        open_dataset(tmp_path / "g", arrays=["x"])


# -- AnnData -----------------------------------------------------------------------------------------------------------

anndata = pytest.importorskip("anndata")


@pytest.fixture(params=[2, 3])
def cells(request, tmp_path):
    import pandas as pd
    from scipy import sparse

    frame = pd.DataFrame(
        {"depth": RNG.random(9), "kind": pd.Categorical(list("abcabcabc")), "n": np.arange(9)},
        index=[f"cell{number}" for number in range(9)],
    )
    data = anndata.AnnData(
        X=RNG.random((9, 5), dtype="f4"),
        obs=frame,
        obsm={"X_pca": RNG.random((9, 2)), "sparse": sparse.csr_matrix(np.eye(9))},
        layers={"counts": RNG.integers(0, 9, (9, 5))},
        varm={"loadings": RNG.random((5, 2))},
        uns={"scalar": 3},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        anndata.settings.zarr_write_format = request.param
        data.write_zarr(tmp_path / "a.zarr")
    return data


def test_anndata_opens_as_it_is(cells, tmp_path):
    dataset = open_dataset(tmp_path / "a.zarr")
    ids = np.array([8, 0, 4])
    read = dataset.read_rows(ids)
    assert {"X", "layers/counts", "obs/depth", "obs/n", "obsm/X_pca"} == set(read)
    np.testing.assert_array_equal(read["X"], cells.X[ids])
    np.testing.assert_array_equal(read["layers/counts"], cells.layers["counts"][ids])
    np.testing.assert_array_equal(read["obs/depth"], cells.obs["depth"].to_numpy()[ids])
    np.testing.assert_array_equal(read["obsm/X_pca"], cells.obsm["X_pca"][ids])
    assert "csr_matrix, and rows of different lengths" in dataset.skipped["obsm/sparse"]
    assert 'arrays=["obs/kind/codes", ...]' in dataset.skipped["obs/kind"]
    assert "obs/_index" in dataset.skipped
    codes = open_dataset(tmp_path / "a.zarr", arrays=["X", "obs/kind/codes"]).read_rows(ids)["obs/kind/codes"]
    np.testing.assert_array_equal(codes, cells.obs["kind"].cat.codes.to_numpy()[ids])


def test_a_sparse_matrix_is_refused_with_what_is_missing(cells, tmp_path):
    with pytest.raises(DatasetError, match="it is a csr_matrix, and rows of different lengths cannot be read"):
        open_dataset(tmp_path / "a.zarr", arrays=["obsm/sparse"])
