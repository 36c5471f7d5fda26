import subprocess
import sys

import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle import sharding as module
from dshuffle.errors import InvalidParameter, ShardingWarning
from dshuffle.sharding import Sharding, distribution_aware, stratified

from .conftest import at_most

pytestmark = pytest.mark.filterwarnings("ignore::dshuffle.errors.ShardingWarning")


def blobs(sizes, width=6, seed=0):
    """Tight, far apart clouds of these sizes, shuffled; the cloud of each sample."""
    rng = np.random.default_rng(seed)
    cloud = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    centres = 100 * np.eye(len(sizes), width)
    return centres[cloud] + rng.normal(size=(len(cloud), width)), cloud


def counts(sharding, labels):
    """Samples of each class in each shard; every shard has the broadcast samples."""
    classes, codes = np.unique(labels, return_inverse=True)
    found = np.zeros((len(classes), sharding.n_workers), int)
    own = np.setdiff1d(np.arange(len(labels)), sharding.broadcast)
    np.add.at(found, (codes[own], sharding.ranks[own]), 1)
    return found + np.bincount(codes[sharding.broadcast], minlength=len(classes))[:, None]


@pytest.mark.parametrize("kind", ["numpy", "dask", "images"])
def test_every_worker_gets_an_equal_part_of_every_neighbourhood(kind):
    x, cloud = blobs([200, 90, 50, 61])
    source = {"numpy": x, "dask": da.from_array(x, chunks=(37, 3)), "images": x.reshape(-1, 2, 3)}[kind]
    sharding = distribution_aware(source, n_workers=12, clusters=4)
    assert np.ptp(np.bincount(sharding.ranks, minlength=12)) <= 1
    assert sorted(sharding.neighbourhoods) == [50, 61, 90, 200]
    assert np.ptp(counts(sharding, cloud), axis=1).max() <= 1
    assert sharding.broadcast.size == 0


@at_most(15)
@given(st.integers(1, 9), st.integers(1, 8), st.integers(0, 1000))
def test_whatever_the_features_partitions_are_balanced_and_broadcast_is_what_is_sparse(n, clusters, seed):
    x = np.random.default_rng(seed).normal(size=(40, 3)).astype("f4")
    sharding = distribution_aware(x, n_workers=n, clusters=clusters, seed=seed, broadcast_cap=1)
    assert np.ptp(np.bincount(sharding.ranks, minlength=n)) <= 1
    sparse = sharding.neighbourhoods[sharding.neighbourhoods <= n]
    assert len(sharding.broadcast) == sparse.sum()
    assert counts(sharding, np.zeros(40)).sum() == 40 + (n - 1) * len(sharding.broadcast)
    again = distribution_aware(x, n_workers=n, clusters=clusters, seed=seed, broadcast_cap=1)
    np.testing.assert_array_equal(sharding.ranks, again.ranks)


def test_isolated_points_are_broadcast_and_counted_in_every_shard():
    x, cloud = blobs([300, 200, 5])
    with pytest.warns(ShardingWarning, match="5 samples are broadcast, because .* at most 8 samples"):
        sharding = distribution_aware(x, n_workers=8, clusters=3)
    np.testing.assert_array_equal(sharding.broadcast, np.flatnonzero(cloud == 2))
    assert counts(sharding, cloud)[2].tolist() == [5] * 8
    assert np.ptp(np.bincount(sharding.ranks, minlength=8)) <= 1


def test_labels_give_twice_their_classes_as_neighbourhoods():
    x, cloud = blobs([100, 100, 100])
    sharding = distribution_aware(x, cloud, n_workers=4, broadcast_cap=1)
    assert len(sharding.neighbourhoods) == 6


def test_a_sample_of_what_does_not_fit_decides_for_the_rest(monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_NBYTES", 4000)
    monkeypatch.setattr(module, "SLAB_NBYTES", 2000)
    x, cloud = blobs([2000, 900, 500, 600])
    sharding = distribution_aware(x, n_workers=12, clusters=4)
    assert np.ptp(counts(sharding, cloud), axis=1).max() <= 1


def test_too_many_clusters_are_refused():
    with pytest.raises(InvalidParameter, match=r"clusters=60 .* 0\.05 of the 300 .* Try fewer clusters"):
        distribution_aware(blobs([150, 150])[0], n_workers=12, clusters=60)


def with_nan(x):
    x[[17, 30], 2] = [np.nan, np.inf]
    return x


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (with_nan(blobs([40])[0]), {"clusters": 2}, r"features\[17\].*not finite"),
        (blobs([40])[0], {"clusters": 41}, "clusters=41 .*at most 40, the number of samples"),
        (blobs([40])[0], {"clusters": 0}, "clusters=0"),
        (blobs([40])[0], {}, "clusters=None.*Give labels to get a default"),
        (blobs([40])[0], {"labels": np.zeros(39, int)}, r"len\(labels\)=39"),
        (blobs([40])[0], {"labels": np.arange(40)}, "40 distinct values"),
        (blobs([40])[0], {"clusters": 2, "n_workers": 41}, "fewer samples than workers"),
        (blobs([40])[0], {"clusters": 2, "broadcast_cap": 1.5}, "broadcast_cap=1.5"),
        (np.array([["a"]]), {"clusters": 1}, "features.dtype"),
        (np.empty((4, 0)), {"clusters": 1}, r"features.shape=\(4, 0\)"),
    ],
)
def test_bad_input(source, options, message):
    with pytest.raises(InvalidParameter, match=message):
        distribution_aware(source, **{"n_workers": 4, **options})


MEMORY = """
import numpy as np
from dshuffle.sharding import distribution_aware

class Rows:  # made as they are read: 1,000,000 x 64 float32, 256 MB, of which nothing is kept
    shape, dtype = (1_000_000, 64), np.dtype("f4")
    centres = 3 * np.random.default_rng(1).normal(size=(5, 64)).astype("f4")
    def __getitem__(self, rows):
        noise = np.random.default_rng(rows.start).standard_normal((rows.stop - rows.start, 64), dtype="f4")
        return self.centres[np.arange(rows.start, rows.stop) // 200_000] + noise

sharding = distribution_aware(Rows(), n_workers=12, clusters=5)
assert np.ptp(np.bincount(sharding.ranks)) <= 1
# Not ru_maxrss, which begins with what the parent had when it started this process.
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(peak)
"""


@pytest.mark.slow
def test_a_million_samples_in_less_than_a_gibibyte():
    ran = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(ran.stdout) << 10 < 1 << 30


def test_small_classes_are_allowed_warned_of_and_counted():
    labels = np.repeat([0, 1, 2, 9], [50, 3, 2, 12])
    with pytest.warns(ShardingWarning, match=r"2 of 4 classes .* workers \(12\).* smallest is 2 with 2"):
        ranks = stratified(labels, 12)
    sharding = Sharding(ranks, 12, np.empty(0, np.int64))
    assert np.ptp(counts(sharding, labels), axis=1).max() <= 1


def test_ranks_and_broadcast_are_checked():
    with pytest.raises(InvalidParameter, match=r"ranks\[1\]=2"):
        Sharding(np.array([0, 2], np.int32), 2, np.empty(0, np.int64))
    with pytest.raises(InvalidParameter, match="broadcast"):
        Sharding(np.array([0, 1], np.int32), 2, np.array([2]))
