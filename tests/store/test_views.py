"""Parts, windows and patches of datasets, compared with slices of the arrays; and how datasets are divided."""

from __future__ import annotations

import functools
import itertools
import pickle
from fractions import Fraction

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import dshuffle
from dshuffle.errors import InvalidParameter
from dshuffle.kernels import load_kernels
from dshuffle.store import open_dataset, read_array, stored_shardings, write_sharding
from dshuffle.store.reader import part_of_groups, part_of_strata

from ..conftest import at_most

N = 24
LENGTHS = {"time": N, "lat": 9, "lon": 10, "level": 2, "station": 3}
DIMS = {"t": ("time", "lat", "lon"), "rain": ("time", "level", "lon", "lat"), "y": ("time",), "season": ("time",)}
DIMS |= {"at": ("time", "station")}
ARRAYS = {
    name: np.random.default_rng(at).integers(0, 1000, [LENGTHS[dim] for dim in dims]).astype("i4" if at else "f8")
    for at, (name, dims) in enumerate(DIMS.items())
} | {"y": np.arange(N), "season": np.arange(N) // 6}
CHUNKS = {
    "plain": {"time": 4},
    "small": {"time": 4, "lat": 4, "lon": 3},
    "sharded": {"time": 2},
    "axis": {"time": 3, "lat": 5},  # time is the last axis, and rows are read through Zarr
}


@pytest.fixture(scope="module", params=CHUNKS)
def dataset(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("views") / "x.zarr"
    group = zarr.open_group(path, mode="w")
    for name, array in ARRAYS.items():
        dims = DIMS[name]
        if request.param == "axis":
            dims, array = (*dims[1:], "time"), np.moveaxis(array, 0, -1)
        sizes = tuple(min(CHUNKS[request.param].get(dim, LENGTHS[dim]), LENGTHS[dim]) for dim in dims)
        shards = (8, *sizes[1:]) if request.param == "sharded" else None
        made = group.create_array(
            name, shape=array.shape, dtype=array.dtype, chunks=sizes, shards=shards, dimension_names=dims
        )
        made[...] = array
    return open_dataset(path, sample_dim="time")


@pytest.fixture(scope="module")
def plain():
    arrays = {"x": np.arange(600.0).reshape(200, 3), "group": np.arange(200) // 7 % 11}
    return dshuffle.create_dataset("memory://test-views", arrays, chunk_rows=16, overwrite=True)


def whole(dataset):
    return dataset.read_rows(np.arange(dataset.n_samples))


def distances(offsets, name):
    return np.atleast_1d(offsets.get(name, 0)).tolist()


def expected(name, offsets, sizes, strides):
    """The patches of all windows of an array, one after the other."""
    all_distances = [0, *(distance for own in offsets.values() for distance in np.atleast_1d(own).tolist())]
    begins = [range(0, LENGTHS[dim] - size + 1, strides[dim]) for dim, size in sizes.items()]
    found = []
    for anchor in range(-min(all_distances), N - max(all_distances)):
        rows = ARRAYS[name][[anchor + distance for distance in distances(offsets, name)]]
        for begin in itertools.product(*begins):
            where = dict(zip(sizes, begin, strict=True))
            box = [slice(where[d], where[d] + sizes[d]) if d in sizes else slice(None) for d in DIMS[name][1:]]
            patch = rows[(slice(None), *box)]
            found.append(patch[0] if np.isscalar(offsets.get(name, 0)) else patch)
    return np.array(found)


offsets_of_one = st.one_of(st.integers(-5, 5), st.lists(st.integers(-5, 5), min_size=1, max_size=3, unique=True))


@st.composite
def views(draw):
    """Windows, sizes and strides of patches, and whether a part of them is selected."""
    offsets = draw(st.one_of(st.just({}), st.dictionaries(st.sampled_from(sorted(ARRAYS)), offsets_of_one, max_size=3)))
    sizes = draw(st.one_of(st.just({}), st.dictionaries(st.sampled_from(["lat", "lon", "level"]), st.integers(1, 9))))
    sizes = {dim: min(size, LENGTHS[dim]) for dim, size in sizes.items()}
    stride = draw(st.one_of(st.none(), st.integers(1, 6)))
    return offsets, sizes, stride


@given(views(), st.data())
@at_most(60)
def test_samples_are_slices_of_the_arrays(dataset, drawn, data):
    offsets, sizes, stride = drawn
    strides = {dim: size if stride is None else stride for dim, size in sizes.items()}
    view = dataset.windows(offsets) if offsets else dataset
    view = view.patches(stride=stride, **sizes) if sizes else view
    wanted = {name: expected(name, offsets, sizes, strides) for name in ARRAYS}
    if data.draw(st.booleans()):
        own = data.draw(st.lists(st.integers(0, view.n_samples - 1), min_size=1, unique=True))
        view = view.select(own)
        if len(own) > 1 and data.draw(st.booleans()):  # a part of a part, by a mask
            view, own = view.select(np.arange(len(own)) > 0), sorted(own)[1:]
        wanted = {name: rows[np.sort(own)] for name, rows in wanted.items()}
    assert view.n_samples == len(wanted["y"])
    ids = np.array(data.draw(st.lists(st.integers(0, view.n_samples - 1), min_size=1, max_size=30)))
    found = view.read_rows(ids)
    rows, slots = view.layout.empty(len(ids)), np.arange(len(ids))[::-1]
    view.read_into(rows, slots, ids)
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values[ids])
        assert found[name].shape[1:] == view.arrays[name].shape
        np.testing.assert_array_equal(view.layout.column(rows, name)[slots], values[ids])
    np.testing.assert_array_equal(read_array(view, "t")[0 : view.n_samples], wanted["t"])
    slabs = list(view._slabs(10 * view.row_nbytes))
    np.testing.assert_array_equal(np.concatenate(slabs), np.arange(view.n_samples))
    copy = pickle.loads(pickle.dumps(view))
    assert (copy.identity, copy.arrays) == (view.identity, view.arrays)
    np.testing.assert_array_equal(copy.read_rows(ids[:1])["rain"], found["rain"][:1])


def test_every_view_has_an_identity_of_its_own(dataset):
    patches = dataset.patches(lat=3, lon=5)
    views = [dataset, dataset.windows(0), dataset.windows((0, 1)), dataset.windows((0, 1)).patches(lat=3, lon=5)]
    views += [patches, dataset.patches(lat=3), dataset.patches(lat=3, lon=5, stride=2), dataset.patches(lon=5, lat=3)]
    views += [view.select([1, 4]) for view in views] + [dataset.select([1, 5])]
    assert len({view.identity for view in views}) == len(views)
    assert dataset.patches(lat=np.int64(3), lon=np.uint8(5), stride=np.int32(2)).identity == views[6].identity
    views[-2].check_unchanged()
    for view in (dataset.select([0, 1]), dataset.windows((0, 1)), patches):
        assert stored_shardings(view) == ()
        with pytest.raises(InvalidParameter, match="not those of the stored dataset"):
            write_sharding(view, "mine", np.zeros(view.n_samples, int))


def requests(view, ids=None):
    before = view.traffic
    view.read_rows(np.arange(view.n_samples) if ids is None else ids)
    return (view.traffic - before).requests


def test_a_chunk_is_read_once_for_all_windows_and_patches(dataset, tmp_path):
    once = requests(dataset)
    assert requests(dataset.windows((-1, 0, 1))) == once
    alone = open_dataset(dataset.url, arrays=["t"], sample_dim="time")
    if alone._sources["t"].decoders is not None:  # rows are whole chunks
        assert requests(alone.patches(lat=2, lon=3)) == requests(alone)
    group = zarr.open_group(tmp_path / "d.zarr", mode="w")
    t = group.create_array("t", shape=(6, 40, 40), dtype="i4", chunks=(3, 10, 10), dimension_names=("time", "a", "b"))
    t[...] = np.arange(6 * 1600).reshape(6, 40, 40)
    patches = open_dataset(tmp_path / "d.zarr").patches(a=10, b=10, stride=5)
    assert [requests(patches, [one]) for one in (0, 1)] == [1, 2]  # only the chunks of a patch
    assert requests(open_dataset(tmp_path / "d.zarr").patches(a=5, b=5)) == 2 * 4 * 4


@pytest.mark.parametrize("by", ["sample", "chunk", "group"])
def test_parts_of_a_split_are_complete_disjoint_and_reproducible(plain, by):
    first, second = plain.split(0.7, by=by, seed=3)
    rows = [whole(part) for part in (first, second)]
    ids = [(one["x"][:, 0] / 3).astype(int) for one in rows]
    assert sorted(np.concatenate(ids)) == list(range(200))
    assert abs(first.n_samples - 140) <= {"sample": 0, "chunk": 16, "group": 21}[by]
    kept = {"sample": ids, "chunk": [one // 16 for one in ids], "group": [one["group"] for one in rows]}[by]
    assert not set(kept[0]) & set(kept[1])
    assert plain.split(0.7, by=by, seed=3)[0].identity == first.identity
    assert plain.split(0.7, by=by, seed=4)[0].identity != first.identity
    inner, _ = second.split(0.5, by=by)  # parts of parts
    assert set((whole(inner)["x"][:, 0] / 3).astype(int)) < set(ids[1])


@pytest.mark.parametrize("fraction", [0.5, 0.7, 0.95])
def test_both_parts_of_a_stratified_split_have_every_label(plain, fraction):
    first, second = plain.split(fraction, stratify="group", seed=3)
    rows = [whole(part) for part in (first, second)]
    assert sorted(np.concatenate([part["x"][:, 0] / 3 for part in rows])) == list(range(200))
    counts = [np.bincount(part["group"], minlength=11) for part in rows]
    assert abs(counts[0] - fraction * sum(counts)).max() < 1
    assert abs(first.n_samples - fraction * 200) < 1
    assert plain.split(fraction, stratify="group", seed=4)[0].identity != first.identity


@pytest.mark.parametrize(
    "part", [functools.partial(part_of_groups, np.arange(10)), functools.partial(part_of_strata, np.arange(10) % 3)]
)
def test_every_sample_is_as_likely_in_the_first_part(part):
    counts = sum(part(Fraction(3, 10), np.random.default_rng(seed)).astype(int) for seed in range(3000))
    assert counts.sum() == 9000
    assert abs(counts - 900).max() < 120  # five standard deviations


def test_earlier_and_later_samples():
    times = np.array(["2026-03-01", "2026-01-01", "2026-02-01", "2026-02-01", "2026-04-01", "2026-05-01"], "M8[us]")
    arrays = {"x": np.arange(6), "time": times}
    dataset = dshuffle.create_dataset("memory://test-times", arrays, overwrite=True)
    assert [whole(part)["x"].tolist() for part in dataset.split(0.4, by="time")] == [[1, 2, 3], [0, 4, 5]]
    arrays["time"][[1, 3]] = "NaT"
    dataset = dshuffle.create_dataset("memory://test-nat", arrays, overwrite=True)
    with pytest.raises(InvalidParameter, match="2 of 6 samples have no time"):
        dataset.split(0.5, by="time")
    with pytest.raises(InvalidParameter, match=r"by='time' is not allowed.*one value for each sample"):
        dataset.windows((0, 1)).split(0.5, by="time")
    with pytest.raises(InvalidParameter, match="without stratify, because windows overlap"):
        dataset.windows({"time": (0, 1)}).split(0.5, stratify="x")


@pytest.mark.parametrize("by", ["chunk", "group", "time"])
def test_parts_of_windows_share_no_row(plain, by, caplog):
    windows = plain.windows({"x": (-2, 0, 1)})
    for seed in range(5):
        first, second = windows.split(0.6, by=by, seed=seed)
        rows = [set((whole(part)["x"][..., 0] / 3).ravel().tolist()) for part in (first, second)]
        assert not rows[0] & rows[1]
        assert by != "time" or max(rows[0]) < min(rows[1])
        left_out = windows.n_samples - first.n_samples - second.n_samples
        assert f"{left_out} of 197 samples are in neither part" in caplog.text
        assert by != "time" or left_out == 3
    first, second = plain.windows(5).split(0.5, by="chunk")  # of one row each
    assert first.n_samples + second.n_samples == 195


def test_single_samples_that_overlap_cannot_be_divided(dataset):
    for view, what in ((dataset.patches(lat=3, stride=2), "patches"), (dataset.windows((0, 1)), "windows")):
        with pytest.raises(InvalidParameter, match=rf"by='sample'.*because {what} overlap"):
            view.split(0.5)
        assert all(part.n_samples for part in view.split(0.5, by="chunk"))
    one_chunk = dshuffle.create_dataset("memory://test-one-chunk", ARRAYS, overwrite=True)
    with pytest.raises(
        InvalidParameter, match=r"fraction=0.5 .* With by='chunk', a part cannot be smaller than one chunk"
    ):
        one_chunk.windows((0, 1)).split(0.5, by="chunk")
    with pytest.raises(InvalidParameter, match="every window of the second part overlaps"):
        dataset.windows(range(20)).split(0.5, by="chunk")


@pytest.mark.parametrize(
    ("fraction", "options", "message"),
    [
        (0.0, {}, "fraction=0.0 is not allowed; it must be a fraction that leaves samples in both parts"),
        (2, {}, "fraction=2 is not allowed"),
        (0.5, {"by": "x"}, "by='x' is not allowed; it must be one of sample, chunk, time, group"),
        (0.5, {"seed": -1}, "seed=-1 is not allowed"),
        (0.5, {"stratify": "x"}, "stratify='x' is not allowed; it must be one of group .arrays of one value"),
        (0.5, {"stratify": "group", "by": "chunk"}, "stratify='group' .* must be None with by='chunk'"),
    ],
)
def test_what_cannot_be_split(plain, fraction, options, message):
    with pytest.raises(InvalidParameter, match=message):
        plain.split(fraction, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: d.select(np.zeros(5, bool)), r"samples.shape=\(5,\) is not allowed; it must be \(24,\) for a mask"),
        (lambda d: d.select([1, 1]), "some ids are repeated"),
        (lambda d: d.select([200]), r"samples\[0\]=200 is not allowed"),
        (lambda d: d.select([]), "it selects nothing"),
        (lambda d: d.windows({"z": 1}), "offsets='z'.*arrays at, rain, season, t, y"),
        (lambda d: d.windows((0, 0)), r"offsets\['at'\]=\(0, 0\).*distinct"),
        (lambda d: d.windows(0.5), r"offsets\['at'\]=0.5"),
        (lambda d: d.windows((-60, 60)), "no window fits into 24 rows"),
        (lambda d: d.select([1, 2]).windows((0, 1)), "Make windows of the whole dataset first"),
        (lambda d: d.patches(lat=3).patches(lon=2), "Make windows of the whole dataset first, then patches"),
        (lambda d: d.patches(), "lengths along the dimensions lat, level, lon, station"),
        (lambda d: d.patches(height=3), r"patches=\['height'\].*along the dimensions"),
        (lambda d: d.patches(lat=0), "lat=0.*>= 1"),
        (lambda d: d.patches(lat=10), "lat=10.*at most 9, the length"),
        (lambda d: d.patches(lat=3, stride=0), "stride=0"),
    ],
)
def test_what_is_no_view(dataset, make, message):
    with pytest.raises(InvalidParameter, match=message):
        make(dataset)


def test_dimensions_that_cannot_be_cut(plain, tmp_path):
    with pytest.raises(InvalidParameter, match=r"have no names here.*dimension_names"):
        plain.patches(lat=3)
    group = zarr.open_group(tmp_path / "d.zarr", mode="w")
    for name, length in (("a", 4), ("b", 6)):
        group.create_array(name, shape=(5, length), dtype="f4", dimension_names=("time", "lat"))
    with pytest.raises(InvalidParameter, match="array b has this dimension twice, or in another length"):
        open_dataset(tmp_path / "d.zarr").patches(lat=2)
    square = zarr.open_group(tmp_path / "square.zarr", mode="w")
    square.create_array("x", shape=(5, 4, 4), dtype="f4", dimension_names=("time", "self", "self"))
    with pytest.raises(InvalidParameter, match="self is not allowed: array x has this dimension twice"):
        open_dataset(tmp_path / "square.zarr").patches(**{"self": 2})


@pytest.mark.parametrize(
    "make",
    [
        lambda d: d.select(ARRAYS["season"] != 2),
        lambda d: d.windows({"t": (-1, 0, 1)}),
        lambda d: d.patches(lat=3, lon=5),
    ],
)
@pytest.mark.parametrize(
    ("assignment", "delivery"),
    [("global", "peer"), ("chunks", "storage"), *[pytest.param(*way, marks=pytest.mark.slow) for way in (
        ("global", "server"), ("partial:0.3", "peer"), ("partial:0.3", "storage"))]],
)  # fmt: skip
def test_views_are_shuffled_like_any_dataset(client, dataset, make, assignment, delivery):
    view = make(dataset)
    wanted = view.read_rows(np.arange(view.n_samples))

    def checked(partition):
        for name, rows in wanted.items():
            np.testing.assert_array_equal(partition[name], rows[partition.sample_ids])
        return partition.sample_ids.copy()

    with dshuffle.Shuffler(client, view, assignment=assignment, delivery=delivery) as shuffler:
        for epoch in shuffler.epochs(2):
            samples = np.concatenate(client.gather(epoch.map(checked)))
            assert np.array_equal(np.sort(samples), np.arange(view.n_samples))


def test_a_single_patch_of_narrow_columns(tmp_path):
    """Columns of a table are copied together, by a kernel. One patch may be a part of a row."""
    load_kernels("store.reader")
    group = zarr.create_group(tmp_path / "levels.zarr")
    stored = {name: np.random.default_rng(at).random((4000, 13), dtype="f4") for at, name in enumerate("uv")}
    for name, values in stored.items():
        group.create_array(name, data=values, chunks=(800, 13), dimension_names=("time", "level"))
    patched = open_dataset(tmp_path / "levels.zarr").patches(level=8)
    rows, ids = patched.layout.empty(4000), np.arange(4000)
    patched.read_into(rows, ids[::-1], ids)
    np.testing.assert_array_equal(rows.view("f4"), np.hstack([values[::-1, :8] for values in stored.values()]))
