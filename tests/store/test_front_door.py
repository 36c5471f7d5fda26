"""Stores that others made: which arrays are samples, and along which axis."""

from __future__ import annotations

import pickle

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
@pytest.mark.parametrize("by_name", [True, pytest.param(False, marks=pytest.mark.slow)])
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


def test_an_array_that_zarr_cannot_open_is_named(tmp_path):
    group = zarr.create_group(tmp_path / "g")
    group.create_array("x", data=np.arange(4))
    metadata = tmp_path / "g" / "x" / "zarr.json"
    metadata.write_text(metadata.read_text().replace('"int64"', '"int65"'))
    with pytest.raises(DatasetError, match=r"array x cannot be opened: zarr cannot open it \("):
        open_dataset(tmp_path / "g", arrays=["x"])
