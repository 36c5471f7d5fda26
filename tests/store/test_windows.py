"""Samples of several consecutive rows, compared with slices of the arrays."""

from __future__ import annotations

import pickle

import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dshuffle
from dshuffle.errors import InvalidParameter
from dshuffle.store import open_dataset, read_array, stored_shardings, write_sharding

from ..conftest import at_most

N = 120
ARRAYS = {"x": np.arange(N * 3.0).reshape(N, 3), "y": np.arange(N), "year": np.arange(N) // 30}


@pytest.fixture(scope="module", params=["plain", "sharded", "axis"], autouse=True)
def dataset(request, tmp_path_factory):
    if request.param == "axis":  # time is the second axis, and rows are read through Zarr
        import xarray as xr

        path = tmp_path_factory.mktemp("windows") / "x.zarr"
        dims = {"x": ("a", "time"), "y": ("time",), "year": ("time",)}
        xr.Dataset({name: (dims[name], array.T) for name, array in ARRAYS.items()}).chunk({"time": 13}).to_zarr(
            path, consolidated=False
        )
        return open_dataset(path, sample_dim="time")
    shards = {"chunk_rows": 4, "shard_rows": 16} if request.param == "sharded" else {"chunk_rows": 7}
    return dshuffle.create_dataset("memory://test-windows", ARRAYS, overwrite=True, **shards)


def expected(offsets, n_anchors, before):
    anchors = np.arange(n_anchors) + before
    found = {}
    for name, array in ARRAYS.items():
        wanted = offsets.get(name, 0)
        several = np.stack([array[anchors + offset] for offset in np.atleast_1d(wanted)], axis=1)
        found[name] = several[:, 0] if np.isscalar(wanted) else several
    return found


offsets_of_one = st.one_of(st.integers(-9, 9), st.lists(st.integers(-9, 9), min_size=1, max_size=4, unique=True))


@given(offsets=st.dictionaries(st.sampled_from(sorted(ARRAYS)), offsets_of_one, max_size=3), data=st.data())
@at_most(60)
def test_windows_read_as_slices_do(dataset, offsets, data):
    lowest = min([0, *(np.min(one) for one in offsets.values())])
    highest = max([0, *(np.max(one) for one in offsets.values())])
    windows = dataset.windows(offsets)
    assert windows.n_samples == N + lowest - highest
    wanted = expected(offsets, windows.n_samples, -lowest)
    ids = np.array(data.draw(st.lists(st.integers(0, windows.n_samples - 1), min_size=1, max_size=30)))
    for name, values in windows.read_rows(ids).items():
        np.testing.assert_array_equal(values, wanted[name][ids])
        assert values.shape[1:] == windows.arrays[name].shape
    rows, slots = windows.layout.empty(len(ids)), np.arange(len(ids))[::-1]
    windows.read_into(rows, slots, ids)
    for name in ARRAYS:
        np.testing.assert_array_equal(windows.layout.column(rows, name)[slots], wanted[name][ids])
        np.testing.assert_array_equal(read_array(windows, name)[0 : windows.n_samples], wanted[name])


def test_a_chunk_is_read_once_for_all_windows(dataset):
    windows = dataset.windows((-1, 0, 1))
    before = windows.traffic
    windows.read_rows(np.arange(windows.n_samples))
    seen = windows.traffic - before
    again = dataset.traffic
    dataset.read_rows(np.arange(N))
    assert seen.requests == (dataset.traffic - again).requests


def test_slabs_begin_with_anchors_at_chunks(dataset):
    windows = dataset.windows({"x": (-9, 0), "year": 3})
    for view in (windows, windows.select(np.arange(0, windows.n_samples, 2))):
        slabs = list(view.slabs(30 * view.row_nbytes))
        np.testing.assert_array_equal(np.concatenate(slabs), np.arange(view.n_samples))
        assert len(slabs) > 3
        first_rows = [int(view.read_rows(ids[:1])["y"][0]) for ids in slabs[1:]]
        chunk = dataset.arrays["x"].chunk_rows
        assert all(row % chunk <= 1 for row in first_rows)  # every other anchor is missing from a part


def test_windows_that_share_no_row_are_all_kept(dataset):
    windows = dataset.windows({"x": 5, "y": 5, "year": 5})
    first, second = windows.split(0.5, by="chunk")
    assert first.n_samples + second.n_samples == windows.n_samples


def test_parts_of_windows(dataset):
    windows = dataset.windows({"x": (-1, 0), "y": 1})
    part = windows.select(windows.read_rows(np.arange(windows.n_samples))["year"] == 2)
    np.testing.assert_array_equal(part.read_rows(np.arange(30))["x"][:, 1], ARRAYS["x"][60:90])
    assert f"30 of {N - 2} samples" in repr(part)
    assert len({dataset.identity, windows.identity, part.identity, dataset.windows((0, 1)).identity}) == 4
    copy = pickle.loads(pickle.dumps(part))
    assert copy.identity == part.identity
    np.testing.assert_array_equal(copy.read_rows([3])["x"], part.read_rows([3])["x"])
    assert len(pickle.dumps(part)) < len(pickle.dumps(dataset)) + N / 8 + 500
    windows.check_unchanged()


@pytest.mark.parametrize("by", ["chunk", "year"])
def test_parts_share_no_row(dataset, by):
    windows = dataset.windows({"x": (-2, 0), "y": (-2, 0, 1)})
    for seed in range(5):
        first, second = windows.split(0.6, by=by, seed=seed)
        rows = [set(part.read_rows(np.arange(part.n_samples))["y"].ravel().tolist()) for part in (first, second)]
        assert not rows[0] & rows[1]
        assert second.n_samples > 2


def test_a_part_of_earlier_windows_and_one_of_later_ones_share_no_row(dataset, caplog):
    windows = dataset.windows({"x": (-3, 0), "y": (-2, 0, 1)})
    first, second = windows.split(0.75, by="time")
    rows = [part.read_rows(np.arange(part.n_samples))["y"] for part in (first, second)]
    assert first.n_samples == round(0.75 * (N - 4))
    assert rows[0].max() < rows[1].min()
    left_out = windows.n_samples - first.n_samples - second.n_samples
    assert left_out == 4  # those that begin up to three rows before the last row of the first part, and one after it
    assert f"4 of {N - 4} samples are in neither part" in caplog.text
    assert windows.split(0.75, by="time", seed=5)[0].identity == first.identity


def test_times_decide_what_is_earlier():
    times = np.array(["2026-03-01", "2026-01-01", "2026-02-01", "2026-02-01", "2026-04-01", "2026-05-01"], "M8[us]")
    dataset = dshuffle.create_dataset("memory://test-times", {"x": np.arange(6), "time": times}, overwrite=True)
    first, second = dataset.split(0.4, by="time")
    assert [part.read_rows(np.arange(part.n_samples))["x"].tolist() for part in (first, second)] == [
        [1, 2, 3],
        [0, 4, 5],
    ]


def test_times_that_cannot_divide_a_dataset():
    times = np.array(["2026-03-01", "NaT", "2026-02-01", "NaT"], "M8[us]")
    dataset = dshuffle.create_dataset("memory://test-nat", {"x": np.arange(4), "time": times}, overwrite=True)
    with pytest.raises(InvalidParameter, match="2 of 4 samples have no time"):
        dataset.split(0.5, by="time")
    with pytest.raises(InvalidParameter, match=r"the samples have times of shape \(2,\)"):
        dataset.windows((0, 1)).split(0.5, by="time")
    with pytest.raises(InvalidParameter, match="stratify='x' needs samples that do not overlap"):
        dataset.windows({"time": (0, 1)}).split(0.5, stratify="x")


def test_single_windows_cannot_be_divided(dataset):
    with pytest.raises(InvalidParameter, match=r"by='sample'.*windows overlap"):
        dataset.windows((0, 1)).split(0.5)
    one_chunk = dshuffle.create_dataset("memory://test-one-chunk", ARRAYS, overwrite=True)
    with pytest.raises(InvalidParameter, match="by is not allowed: all samples are in one chunk of 120"):
        one_chunk.windows((0, 1)).split(0.5, by="chunk")
    with pytest.raises(InvalidParameter, match="every window of the second part overlaps"):
        dataset.windows(range(50)).split(0.5, by="chunk")


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ({"z": 1}, "offsets='z'.*arrays x, y, year"),
        ((0, 0), r"offsets\['x'\]=\(0, 0\).*distinct"),
        ((), r"offsets\['x'\]=\(\)"),
        ("01", r"offsets\['x'\]='0'"),
        (0.5, r"offsets\['x'\]=0.5"),
        ((-60, 60), "no window fits into 120 rows"),
    ],
)
def test_bad_offsets(dataset, offsets, words):
    with pytest.raises(InvalidParameter, match=words):
        dataset.windows(offsets)


def test_windows_come_before_parts(dataset):
    for view in (dataset.select([1, 2, 3]), dataset.windows((0, 1))):
        with pytest.raises(InvalidParameter, match="Make windows of the whole dataset first"):
            view.windows((0, 1))


def test_shardings_belong_to_the_rows(dataset):
    windows = dataset.windows((0, 1))
    assert stored_shardings(windows) == ()
    with pytest.raises(InvalidParameter, match="not those of the stored dataset"):
        write_sharding(windows, "mine", np.zeros(windows.n_samples, int))


@pytest.mark.parametrize(
    ("assignment", "delivery"),
    [
        ("global", "peer"),
        pytest.param("global", "server", marks=pytest.mark.slow),
        ("chunks", "storage"),
        pytest.param("partial:0.3", "peer", marks=pytest.mark.slow),
    ],
)
def test_windows_are_shuffled_like_any_dataset(client, dataset, assignment, delivery):
    windows = dataset.windows({"x": (-1, 0, 1)})
    wanted = expected({"x": (-1, 0, 1)}, N - 2, 1)["x"]
    with dshuffle.Shuffler(client, windows, assignment=assignment, delivery=delivery) as shuffler:
        for epoch in shuffler.epochs(2):
            found = np.concatenate(client.gather(epoch.map(lambda partition: partition["x"])))
            np.testing.assert_array_equal(found[np.argsort(found[:, 0, 0])], wanted)


def test_windows_as_a_dask_array(client, dataset):
    windows = dataset.windows({"x": (0, 1)})
    with client.as_current():
        taken = dshuffle.take(client, windows, [5, 5, 0])["x"]
        assert isinstance(taken, da.Array)
        np.testing.assert_array_equal(taken.compute(), expected({"x": (0, 1)}, N - 1, 0)["x"][[5, 5, 0]])
