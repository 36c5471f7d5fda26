"""Groups that others made: which arrays are samples, along which axis, and which dataset it is."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings

import numpy as np
import pandas as pd
import pytest
import zarr

from dshuffle.errors import CorruptChunk, DatasetChanged, DatasetError, DatasetNotFound, InvalidParameter
from dshuffle.runtime.session_spec import DatasetReference
from dshuffle.store import create_dataset, open_dataset, read_array, verify_dataset, write_sharding

RNG = np.random.default_rng(0)
IDS = np.array([3, 0, 6, 3])
X = RNG.random((200, 3))

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part:UserWarning")


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
    group.create_array("words", shape=(7,), dtype=str)[:] = ["a"] * 7
    group.create_group("inner").create_group("deep").create_array("z", data=np.arange(14).reshape(7, 2))
    return group


def test_arrays_with_the_dimension_of_the_largest_are_taken(group, tmp_path):
    dataset = open_dataset(tmp_path / "g")
    assert {name: info.shape for name, info in dataset.arrays.items()} == {
        "field": (4, 6), "level": (3,), "time": (), "unnamed": (),
    }  # fmt: skip
    assert dict(dataset.skipped) == {
        "crs": "it is a scalar",
        "lat": "it has no dimension time",
        "short": "its length is 6, not 7",
        "words": "its items have different lengths (StringDType())",
    }
    read = dataset.read_rows(IDS)
    np.testing.assert_array_equal(read["field"], group["field"][:][IDS])
    np.testing.assert_array_equal(read["level"], group["level"][:].T[IDS])
    assert "without crs, lat, short, words" in repr(dataset)
    chosen = open_dataset(tmp_path / "g", arrays=["inner/deep/z", "unnamed"])
    assert list(chosen.arrays) == ["inner/deep/z", "unnamed"]
    np.testing.assert_array_equal(chosen.read_rows(IDS)["inner/deep/z"], np.arange(14).reshape(7, 2)[IDS])
    assert open_dataset(tmp_path / "g", arrays="time").arrays.keys() == {"time"}
    asked = [{}, {"arrays": ["time"]}, {"sample_dim": "lat"}, {"decode": False}]
    assert len({open_dataset(tmp_path / "g", **options).identity for options in asked}) == 4


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("by_name", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["chunks", "shards", "whole", "v2"])
def test_any_axis_can_be_the_samples(tmp_path, axis, by_name, how):
    data, names = RNG.integers(0, 1000, (7, 9, 8)), ("a", "b", "c")
    layout = {
        "chunks": {"chunks": (3, 2, 5)},
        "shards": {"chunks": (2, 3, 4), "shards": (4, 9, 8)},
        "whole": {"chunks": (7, 9, 8)},
        "v2": {"chunks": (3, 4, 3), "fill_value": None, "attributes": {"_ARRAY_DIMENSIONS": list(names)}},
    }[how] | ({} if how == "v2" else {"dimension_names": names})
    made = zarr.create_group(tmp_path / "g", zarr_format=2 if how == "v2" else 3)
    made.create_array("x", shape=data.shape, dtype=data.dtype, **layout)[:] = data
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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"arrays": []}, InvalidParameter, r"arrays=\[\] is not allowed; it must be None, or names of arrays"),
        ({"arrays": ["nothing"]}, InvalidParameter, "arrays='nothing' is not allowed; .* It has crs, field"),
        ({"arrays": ["inner/deep"]}, DatasetError, "opened together: inner/deep: it is a group"),
        ({"arrays": ["field", "lat"]}, DatasetError, "opened together: lat: it has no dimension time"),
        ({"arrays": ["field", "short"]}, DatasetError, "opened together: short: its length is 6, not 7"),
        ({"arrays": ["words"]}, DatasetError, "opened together: words: its items have different lengths"),
        ({"sample_dim": "depth"}, InvalidParameter, r"one of the dimensions of .*: \['height', 'lat', 'lon', 'time'\]"),
        ({"sample_dim": -1}, InvalidParameter, "sample_dim=-1 is not allowed"),
        ({"arrays": ["time"], "sample_dim": 5}, DatasetError, "it has no dimension 5"),
        ({"decode": "yes"}, InvalidParameter, "decode='yes' is not allowed; it must be True or False"),
    ],
)
def test_what_cannot_be_opened(group, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        open_dataset(tmp_path / "g", **options)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("consolidated", [False, True])
def test_what_zarr_cannot_open_does_not_stop_the_others(tmp_path, zarr_format, consolidated):
    group = zarr.create_group(tmp_path / "g", zarr_format=zarr_format)
    group.create_array("x", data=X.astype("f4"))
    group.create_array("y", data=np.arange(200))
    if consolidated:
        zarr.consolidate_metadata(tmp_path / "g")
    names = ("zarr.json", "x/zarr.json") if zarr_format == 3 else (".zmetadata", "x/.zarray")
    for document in [tmp_path / "g" / name for name in names if (tmp_path / "g" / name).exists()]:
        text = document.read_text().replace('"float32"', '"float33"').replace('"<f4"', '"<q9"')
        document.write_text(text)
    dataset = open_dataset(tmp_path / "g")
    assert list(dataset.arrays) == ["y"]
    assert dataset.skipped["x"].startswith("zarr cannot open it (")
    with pytest.raises(DatasetError, match=r"x: zarr cannot open it \("):
        open_dataset(tmp_path / "g", arrays=["x"])


@pytest.mark.parametrize("enabled", [False, True])
def test_chunks_of_different_sizes_are_skipped(tmp_path, enabled):
    group = zarr.create_group(tmp_path / "g")
    group.create_array("x", data=X[:4], chunks=(2, 3))
    group.create_array("y", data=np.arange(4), chunks=(2,))
    document = tmp_path / "g" / "x" / "zarr.json"
    fields = {"kind": "inline", "chunk_shapes": [[1, 3], [3]]}
    grid = {"chunk_grid": {"name": "rectilinear", "configuration": fields}}
    document.write_text(json.dumps(json.loads(document.read_text()) | grid))
    with zarr.config.set({"array.rectilinear_chunks": enabled}):  # releases before 3.3 ignore it
        dataset = open_dataset(tmp_path / "g")
        assert dataset.skipped["x"].startswith(("its chunks differ in size (chunk grid 'rectilinear')", "zarr cannot"))
        assert dataset.read_rows([3])["y"].tolist() == [3]
        dataset.check_unchanged()
        with pytest.raises(DatasetError, match=r"\bx\b.*(its chunks differ in size|zarr cannot open it)"):
            open_dataset(tmp_path / "g", arrays=["x"])


def test_the_root_of_a_tree_names_its_groups(tmp_path):
    root = zarr.create_group(tmp_path / "tree")
    for number in range(30):
        root.create_group(f"g{number:02}").create_array("x", data=X)
    words = r"no arrays of samples\. It has groups: g00, g01, .*, g19\. Open one of them, by its URL"
    with pytest.raises(DatasetError, match=words):
        open_dataset(tmp_path / "tree")
    np.testing.assert_array_equal(open_dataset(tmp_path / "tree" / "g07").read_rows([2])["x"], X[[2]])
    assert list(open_dataset(tmp_path / "tree", arrays=["g07/x"]).arrays) == ["g07/x"]


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("consolidated", [False, True])
def test_a_data_tree_with_coordinates_in_its_root(tmp_path, zarr_format, consolidated):
    xarray = pytest.importorskip("xarray")
    fields = RNG.random((4, 5))
    coordinates = {"time": np.arange(4), "lat": np.arange(5.0)}
    below = xarray.Dataset({"x": (("time", "lat"), fields)})
    tree = xarray.DataTree.from_dict({"/": xarray.Dataset(coords=coordinates), "/train": below, "/test": below})
    tree.to_zarr(tmp_path / "tree", zarr_format=zarr_format, consolidated=consolidated)
    with pytest.raises(DatasetError, match=r"no arrays of samples but coordinates \(lat\).*It has groups: test, train"):
        open_dataset(tmp_path / "tree")
    np.testing.assert_array_equal(open_dataset(tmp_path / "tree" / "train").read_rows([1])["x"], fields[[1]])
    assert open_dataset(tmp_path / "tree", arrays=["time"]).n_samples == 4


def test_anndata_opens_by_names(tmp_path):
    anndata = pytest.importorskip("anndata", reason="anndata is not installed")
    x, kinds = RNG.random((9, 15), dtype="f4"), pd.Categorical(list("abcabcabc"))
    frame = pd.DataFrame({"depth": RNG.random(9), "kind": kinds}, index=[f"cell{number}" for number in range(9)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        anndata.AnnData(X=x, obs=frame, uns={"scalar": 3}).write_zarr(tmp_path / "a.zarr")
    read = open_dataset(tmp_path / "a.zarr", arrays=["X", "obs/depth", "obs/kind/codes"]).read_rows([8, 0])
    np.testing.assert_array_equal(read["X"], x[[8, 0]])
    np.testing.assert_array_equal(read["obs/depth"], frame["depth"].to_numpy()[[8, 0]])
    np.testing.assert_array_equal(read["obs/kind/codes"], kinds.codes[[8, 0]])


def test_what_is_no_dataset(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):
        with pytest.raises(DatasetNotFound, match=rf"no dataset exists at .*{name}"):
            open_dataset(tmp_path / name)
    with pytest.raises(DatasetNotFound, match="process that created them"):
        open_dataset("memory://absent")
    for zarr_format in (2, 3):
        zarr.create_array(tmp_path / f"array{zarr_format}", shape=(3,), dtype="i4", zarr_format=zarr_format)
    (tmp_path / "x.zip").write_text("x")
    for name, file, text in (("folder", "a", "x"), ("broken", "zarr.json", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    for name, words in {
        "array2": "a Zarr array",
        "array3": r"a Zarr array.*arrays=\[\.\.\.\], or give dask\.array\.from_zarr",
        "folder": "a folder without zarr.json",
        "broken": "zarr.json cannot be read",
    }.items():
        with pytest.raises(DatasetNotFound, match=rf"{name} is .*{words}"):
            open_dataset(tmp_path / name)
    group = zarr.create_group(tmp_path / "g")
    with pytest.raises(DatasetError, match=r"no arrays of samples$"):
        open_dataset(tmp_path / "g")
    group.create_array("x", shape=(0, 3), dtype="i4")
    with pytest.raises(DatasetError, match="no samples"):
        open_dataset(tmp_path / "g")


# -- The mark of dshuffle, and identities ------------------------------------------------------------------------------


def with_attribute(path, attribute):
    group = zarr.create_group(path, attributes={"dshuffle": attribute})
    group.create_array("x", shape=(6,), dtype="i4", chunks=(2,), fill_value=7)[:4] = 1
    return path


@pytest.mark.parametrize(
    "attribute",
    [
        *({"note": "mine"}, {}, True, "done", ["version", "complete"], {"complete": False}, {"version": 1}),
        {"version": "1", "complete": False},
        {"version": True, "complete": False},
        {"version": 1, "complete": 0},
        {"version": 1, "complete": False, "by": "somebody"},
    ],
)
def test_an_attribute_of_somebody_else_means_nothing(tmp_path, attribute):
    dataset = open_dataset(with_attribute(tmp_path / "g", attribute))
    assert dataset.read_rows([3, 4])["x"].tolist() == [1, 7]  # an absent chunk is the fill value
    assert dataset.identity == open_dataset(with_attribute(tmp_path / "plain", None)).identity
    dataset.check_unchanged()


def test_the_own_mark_is_recognised(tmp_path):
    path = with_attribute(tmp_path / "g", {"version": 1, "complete": False})
    with pytest.raises(DatasetError, match="was never finished, or is still being written"):
        open_dataset(path)
    name = "0123456789abcdef" * 2
    dataset = open_dataset(with_attribute(tmp_path / "h", {"version": 1, "complete": True, "uuid": name}))
    assert dataset.identity == name
    with pytest.raises(CorruptChunk):
        dataset.read_rows([5])
    made = create_dataset(tmp_path / "d", {"x": [1]})
    assert zarr.open_group(made.url).attrs["dshuffle"] == {"version": 1, "complete": True, "uuid": made.identity}


def create(url, x=X, **_):
    return create_dataset(url, {"x": x}, chunk_rows=10, overwrite=True)


def foreign(url, x=X, **options):
    zarr.create_group(url, overwrite=True, **options).create_array("x", data=x, chunks=(10, 3))
    return open_dataset(url)


def foreign2(url, x=X):
    return foreign(url, x, zarr_format=2)


@pytest.mark.parametrize("make", [create, foreign, foreign2])
def test_copies_are_the_same_dataset(tmp_path, make):
    dataset = make(str(tmp_path / "a.zarr"))
    shutil.copytree(tmp_path / "a.zarr", tmp_path / "b.zarr")
    assert open_dataset(tmp_path / "b.zarr").identity == dataset.identity
    assert pickle.loads(pickle.dumps(dataset)).identity == dataset.identity
    write_sharding(dataset, "mine", np.arange(200) % 2)
    dataset.check_unchanged()
    assert open_dataset(dataset.url).identity == dataset.identity
    part = open_dataset(dataset.url, arrays=["x"])
    assert part.identity != dataset.identity
    assert pickle.loads(pickle.dumps(part)).identity == part.identity


def test_a_dataset_that_was_written_again_is_another_one(tmp_path):
    dataset = create(str(tmp_path / "a.zarr"))
    reference = DatasetReference.of(dataset)
    assert reference.open().identity == dataset.identity
    assert create(str(tmp_path / "a.zarr")).identity != dataset.identity
    with pytest.raises(DatasetChanged, match=r"a.zarr was written again while it was in use"):
        dataset.check_unchanged()
    with pytest.raises(DatasetChanged, match=rf"not the one on the client: .*{dataset.identity}"):
        reference.open()
    zarr.open_group(tmp_path / "a.zarr").attrs["dshuffle"] = {"version": 1, "complete": False}
    with pytest.raises(DatasetChanged, match="now incomplete"):
        dataset.check_unchanged()
    shutil.rmtree(tmp_path / "a.zarr")
    with pytest.raises(DatasetError, match="cannot be read any more"):
        dataset.check_unchanged()


@pytest.mark.parametrize(
    "change", [lambda x: x + 1, lambda x: x.astype("f4"), lambda x: np.concatenate([x, x]), lambda x: x[:, ::-1]]
)
def test_a_group_from_elsewhere_is_known_by_its_metadata_and_some_chunks(tmp_path, change):
    dataset = foreign(str(tmp_path / "a.zarr"))
    before = dataset.traffic
    assert foreign(str(tmp_path / "b.zarr")).identity == dataset.identity
    assert foreign(str(tmp_path / "c.zarr"), change(X)).identity != dataset.identity
    foreign(str(tmp_path / "a.zarr"), change(X))
    with pytest.raises(DatasetChanged):
        dataset.check_unchanged()
    assert dataset.traffic == before, "looking at a dataset is not reading it"


@pytest.mark.parametrize("make", [create, foreign, foreign2])
@pytest.mark.parametrize(
    "attributes",
    [
        *({"scale_factor": 0.5}, {"add_offset": 1}, {"_FillValue": 3}, {"missing_value": [3, 4]}),
        *({"_Unsigned": "true"}, {"units": "days since 2000-01-01", "calendar": "noleap"}),
    ],
)
def test_attributes_that_decide_the_values_are_part_of_the_identity(tmp_path, make, attributes):
    url = str(tmp_path / "a.zarr")
    dataset = make(url, np.arange(600).reshape(200, 3))
    array = zarr.open_group(url)["x"]
    array.attrs["long_name"] = "a name"
    assert open_dataset(url).identity == dataset.identity
    stored = open_dataset(url, decode=False)
    identities = {dataset.identity}
    for name, value in attributes.items():
        array.attrs[name] = value
        identities.add(open_dataset(url).identity)
    assert len(identities) == 1 + len(attributes)
    with pytest.raises(DatasetChanged):
        dataset.check_unchanged()
    stored.check_unchanged()  # what is stored has not changed


def test_the_axis_of_the_samples_is_part_of_the_identity(tmp_path):
    url = str(tmp_path / "a.zarr")
    group = zarr.create_group(url, zarr_format=2)
    group.create_array("x", data=np.ones((5, 5)), attributes={"_ARRAY_DIMENSIONS": ["t", "k"]})
    before = open_dataset(url, sample_dim="t")
    group["x"].attrs["_ARRAY_DIMENSIONS"] = ["k", "t"]
    assert open_dataset(url, sample_dim="t").identity != before.identity
