"""Samples that are boxes of rows, compared with slices of the arrays."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import xarray as xr
import zarr
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

import dshuffle
from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.store import open_dataset, read_array

from ..conftest import at_most

N, LAT, LON = 11, 9, 10
DIMS = {"t": ("time", "lat", "lon"), "rain": ("time", "level", "lon", "lat"), "lat_only": ("time", "lat")}
DIMS |= {"season": ("time",), "station": ("time", "station")}
LENGTHS = {"time": N, "lat": LAT, "lon": LON, "level": 2, "station": 3}
ARRAYS = {
    name: np.random.default_rng(at).integers(0, 1000, [LENGTHS[dim] for dim in dims]).astype("i4" if at else "f8")
    for at, (name, dims) in enumerate(DIMS.items())
}
CHUNKS = {
    "plain": {"time": 4},
    "small": {"time": 4, "lat": 4, "lon": 3},
    "sharded": {"time": 2},
}


@pytest.fixture(scope="module", params=[*CHUNKS, "axis"])
def dataset(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("patches") / "x.zarr"
    group = zarr.open_group(path, mode="w")
    for name, array in ARRAYS.items():
        dims = DIMS[name]
        if request.param == "axis":  # time is the last axis, and rows are read through Zarr
            dims, array = (*dims[1:], "time"), np.moveaxis(array, 0, -1)
        chunks = CHUNKS.get(request.param, {"time": 3, "lat": 5})
        sizes = tuple(min(chunks.get(dim, LENGTHS[dim]), LENGTHS[dim]) for dim in dims)
        shards = (8, *sizes[1:]) if request.param == "sharded" else None
        made = group.create_array(
            name, shape=array.shape, dtype=array.dtype, chunks=sizes, shards=shards, dimension_names=dims
        )
        made[...] = array
    return open_dataset(path, sample_dim="time")


def expected(name, sizes, strides):
    """The patches of all samples, one after the other."""
    begins = [range(0, LENGTHS[dim] - size + 1, strides[dim]) for dim, size in sizes.items()]
    found = []
    for row in ARRAYS[name]:
        for begin in itertools.product(*begins):
            where = dict(zip(sizes, begin, strict=True))
            dims = DIMS[name][1:]
            box = [slice(where[dim], where[dim] + sizes[dim]) if dim in sizes else slice(None) for dim in dims]
            found.append(row[tuple(box)])
    return np.array(found)


ways = st.dictionaries(st.sampled_from(["lat", "lon", "level"]), st.integers(1, 9), min_size=1).map(
    lambda sizes: {dim: min(size, LENGTHS[dim]) for dim, size in sizes.items()}
)


@given(sizes=ways, stride=st.one_of(st.none(), st.integers(1, 6)), data=st.data())
@at_most(40)
def test_patches_read_as_slices_do(dataset, sizes, stride, data):
    patches = dataset.patches(stride=stride, **sizes)
    strides = {dim: size if stride is None else stride for dim, size in sizes.items()}
    wanted = {name: expected(name, sizes, strides) for name in ARRAYS}
    assert patches.n_samples == len(wanted["season"])
    ids = np.array(data.draw(st.lists(st.integers(0, patches.n_samples - 1), min_size=1, max_size=40)))
    found = patches.read_rows(ids)
    rows, slots = patches.layout.empty(len(ids)), np.arange(len(ids))[::-1]
    patches.read_into(rows, slots, ids)
    for name in ARRAYS:
        np.testing.assert_array_equal(found[name], wanted[name][ids])
        assert found[name].shape[1:] == patches.arrays[name].shape
        np.testing.assert_array_equal(patches.layout.column(rows, name)[slots], wanted[name][ids])


@given(offsets=st.lists(st.integers(-3, 3), min_size=1, max_size=3, unique=True), data=st.data())
@at_most(20)
def test_patches_of_windows(dataset, offsets, data):
    windows = dataset.windows({"t": offsets, "season": 1})
    patches = windows.patches(lat=4, lon=5)
    strides = {"lat": 4, "lon": 5}
    n = 4  # patches of a row
    assert patches.n_samples == n * windows.n_samples
    ids = np.array(data.draw(st.lists(st.integers(0, patches.n_samples - 1), min_size=1, max_size=20)))
    anchors = ids // n - min(0, *offsets, 1)
    t, season = expected("t", strides, strides), ARRAYS["season"]
    found = patches.read_rows(ids)
    for at, offset in enumerate(offsets):
        np.testing.assert_array_equal(found["t"][:, at], t[(anchors + offset) * n + ids % n])
    np.testing.assert_array_equal(found["season"], season[anchors + 1])


def test_a_part_of_patches(dataset):
    patches = dataset.patches(lat=3, lon=5)
    part = patches.select(np.arange(0, patches.n_samples, 7))
    assert part.n_samples == 10
    np.testing.assert_array_equal(
        part.read_rows(np.arange(10))["t"], expected("t", {"lat": 3, "lon": 5}, {"lat": 3, "lon": 5})[::7]
    )
    others = [dataset, patches, part, dataset.patches(lat=3), dataset.patches(lat=3, lon=5, stride=2)]
    others += [dataset.patches(lon=5, lat=3), dataset.windows(0), dataset.windows((0, 1)).patches(lat=3, lon=5)]
    assert len({one.identity for one in others}) == len(others)
    for one in (patches, part):
        copy = pickle.loads(pickle.dumps(one))
        assert copy.identity == one.identity
        assert copy.arrays == one.arrays
        np.testing.assert_array_equal(copy.read_rows([9])["rain"], one.read_rows([9])["rain"])


def test_numpy_integers_are_integers(dataset):
    patches = dataset.patches(lat=np.int64(3), lon=np.uint8(5), stride=np.int32(2))
    assert patches.identity == dataset.patches(lat=3, lon=5, stride=2).identity


def test_slabs_of_patches_begin_with_chunks_of_rows(dataset):
    patches = dataset.patches(lat=4, lon=4)
    for view in (patches, patches.select(np.arange(0, patches.n_samples, 3))):
        slabs = list(view.slabs(10 * view.row_nbytes))
        np.testing.assert_array_equal(np.concatenate(slabs), np.arange(view.n_samples))
    chunk = dataset.arrays["rain"].chunk_rows
    assert len(slabs) == -(-N // chunk)
    assert patches.arrays["rain"].chunk_rows == 4 * chunk


def test_a_chunk_is_read_once_for_all_its_patches(dataset):
    alone = dshuffle.open_dataset(dataset.url, arrays=["t"], sample_dim="time")
    if alone._sources["t"].decoders is None:
        pytest.skip("rows are not whole chunks; see the next test")
    before = alone.traffic
    alone.read_rows(np.arange(N))
    once = alone.traffic - before
    patches = alone.patches(lat=2, lon=3)
    patches.read_rows(np.arange(patches.n_samples))
    seen = patches.traffic - before - once
    assert (seen.requests, seen.fetched_bytes) == (once.requests, once.fetched_bytes)


def test_only_the_chunks_of_a_patch_are_read(tmp_path):
    group = zarr.open_group(tmp_path / "d.zarr", mode="w")
    t = group.create_array("t", shape=(6, 40, 40), dtype="i4", chunks=(3, 10, 10), dimension_names=("time", "a", "b"))
    t[...] = np.arange(6 * 1600).reshape(6, 40, 40)
    patches = open_dataset(tmp_path / "d.zarr").patches(a=10, b=10, stride=5)
    before = patches.traffic
    np.testing.assert_array_equal(patches.read_rows([0])["t"][0], t[0, :10, :10])
    one = patches.traffic - before
    np.testing.assert_array_equal(patches.read_rows([1])["t"][0], t[0, :10, 5:15])
    two = patches.traffic - before - one
    assert (one.requests, two.requests) == (1, 2)
    aligned = open_dataset(tmp_path / "d.zarr").patches(a=5, b=5)
    before = aligned.traffic
    aligned.read_rows(np.arange(aligned.n_samples))
    assert (aligned.traffic - before).requests == 2 * 4 * 4  # every chunk once


@pytest.mark.parametrize("by", ["sample", "chunk", "season"])
def test_parts_have_no_item_in_common(dataset, by):
    patches = dataset.patches(lat=3, lon=5)
    first, second = patches.split(0.6, by=by, seed=1)
    assert first.n_samples + second.n_samples == patches.n_samples
    ids = [set(part.read_rows(np.arange(part.n_samples))["season"].tolist()) for part in (first, second)]
    assert by == "sample" or not ids[0] & ids[1]


def test_patches_that_overlap_are_not_divided_one_by_one(dataset):
    patches = dataset.patches(lat=3, stride=2)
    with pytest.raises(InvalidParameter, match=r"by='sample'.*because patches overlap"):
        patches.split(0.5)
    first, second = patches.split(0.5, by="chunk")
    assert first.n_samples + second.n_samples == patches.n_samples
    dataset.patches(lat=LAT, stride=2).split(0.5)  # a single patch of each row
    windows = dataset.windows({"t": (0, 1)}).patches(lat=3)
    with pytest.raises(InvalidParameter, match="because windows overlap"):
        windows.split(0.5)
    first, second = windows.split(0.5, by="season", seed=3)
    seen = [part.read_rows(np.arange(part.n_samples))["t"] for part in (first, second)]
    items = [{patch.tobytes() for window in windows for patch in window} for windows in seen]
    assert min(map(len, items)) > 0
    assert not items[0] & items[1]


@pytest.mark.parametrize(
    ("sizes", "stride", "words"),
    [
        ({}, None, r"one of the dimensions lat, level, lon, station"),
        ({"height": 3}, None, "height=3.*one of the dimensions"),
        ({"time": 3}, None, "time=3.*left out"),
        ({"lat": 0}, None, "lat=0.*>= 1"),
        ({"lat": 10}, None, "lat=10.*at most 9, the length"),
        ({"lat": 2.5}, None, "lat=2.5"),
        ({"lat": 3}, 0, r"stride\['lat'\]=0"),
        ({"lat": 3}, {"lon": 2}, "stride='lon'.*one of the dimensions lat"),
        ({"lat": 3}, "two", r"stride\['lat'\]='two'"),
    ],
    ids=str,
)
def test_bad_patches(dataset, sizes, stride, words):
    with pytest.raises(InvalidParameter, match=words):
        dataset.patches(stride=stride, **sizes)


def test_what_cannot_be_cut(dataset, tmp_path):
    for view in (dataset.select([0, 1]), dataset.patches(lat=3)):
        with pytest.raises(InvalidParameter, match="Make windows of the whole dataset first, then patches"):
            view.patches(lon=2)
    with pytest.raises(InvalidParameter, match="or has windows or patches already"):
        dataset.patches(lat=3).windows((0, 1))
    unnamed = dshuffle.create_dataset(None, {"x": np.zeros((4, 6, 6))})
    with pytest.raises(InvalidParameter, match=r"have no names.*dimension_names"):
        unnamed.patches(lat=3)
    group = zarr.open_group(tmp_path / "d.zarr", mode="w")
    for name, length in (("a", 4), ("b", 6)):
        group.create_array(name, shape=(5, length), dtype="f4", dimension_names=("time", "lat"))
    square = zarr.open_group(tmp_path / "square.zarr", mode="w")
    square.create_array("x", shape=(5, 4, 4), dtype="f4", dimension_names=("time", "self", "self"))
    with pytest.raises(InvalidParameter, match="self is not allowed: x has this dimension twice"):
        open_dataset(tmp_path / "square.zarr").patches(**{"self": 2})
    with pytest.raises(DatasetError, match="dimension lat has length 4 in one array, and 6 in b"):
        open_dataset(tmp_path / "d.zarr").patches(lat=2)


@pytest.mark.parametrize("way", [{}, {"assignment": "chunks"}, {"delivery": "server"}], ids=str)
def test_patches_are_shuffled(tmp_path, way):
    maps = xr.Dataset({name: (dims, ARRAYS[name]) for name, dims in DIMS.items()})
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", maps, chunk_rows=2)
    patches = dataset.patches(lat=3, lon=5)
    wanted = {name: expected(name, {"lat": 3, "lon": 5}, {"lat": 3, "lon": 5}) for name in ARRAYS}

    def checked(partition):
        for name, rows in wanted.items():
            np.testing.assert_array_equal(partition[name], rows[partition.sample_ids])
        return partition.sample_ids.copy()

    with (
        Client(n_workers=3, processes=False, dashboard_address=":0") as client,
        dshuffle.Shuffler(client, patches, **way) as shuffler,
    ):
        for epoch in shuffler.epochs(2):
            samples = np.concatenate(client.gather(epoch.map(checked)))
            assert np.array_equal(np.sort(samples), np.arange(patches.n_samples))


def test_patches_are_written_as_a_dataset(tmp_path, dataset):
    patches = dataset.patches(lat=3, lon=5)
    made = dshuffle.create_dataset(tmp_path / "tiles.zarr", {name: read_array(patches, name)[:] for name in ARRAYS})
    assert made.n_samples == patches.n_samples
    np.testing.assert_array_equal(made.read_rows([5])["rain"], patches.read_rows([5])["rain"])
