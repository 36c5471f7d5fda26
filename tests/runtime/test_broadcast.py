"""Sessions with samples that every worker holds and trains on: the one exception to exactly once."""

import numpy as np
import pytest

from dshuffle import Shuffler
from dshuffle.errors import CacheBudgetError, InvalidParameter
from dshuffle.planning import DELIVERIES
from dshuffle.sharding import Sharding
from dshuffle.store import write_sharding

pytestmark = pytest.mark.slow  # real clusters

BROADCAST = np.array([0, 17, 500, 501, 502, 998, 999])
OTHERS = np.delete(np.arange(1000), BROADCAST)


def some_ranks(n_workers):
    """Ranks in which partition sizes differ by at most one without those samples that are broadcast."""
    ranks = np.zeros(1000, np.int32)
    ranks[OTHERS] = np.random.default_rng(0).permutation(np.arange(len(OTHERS)) % n_workers)
    return ranks


def check_run(client, dataset, count, **job):
    """Run some epochs and check everything about who trains on what; the records."""

    def contents(partition):
        batches = np.concatenate([batch["y"] for batch in partition.batches(64)])
        ids = partition.sample_ids.copy()
        assert np.array_equal(batches, ids)
        assert np.array_equal(partition["y"], ids)
        return ids, partition["x"], partition.broadcast_ids.copy(), partition.shares

    x = dataset.read_rows(np.arange(1000))["x"]
    places = []
    with Shuffler(client, dataset, seed=3, **job) as shuffler:
        for epoch in shuffler.epochs(count):
            parts = client.gather(epoch.map(contents))
            times = np.bincount(np.concatenate([ids for ids, *_ in parts]), minlength=1000)
            assert (times[OTHERS] == 1).all()
            assert (times[BROADCAST] == shuffler.n_workers).all()
            sizes = [len(ids) for ids, *_ in parts]
            for ids, rows, broadcast, shares in parts:
                np.testing.assert_array_equal(rows, x[ids])
                np.testing.assert_array_equal(broadcast, BROADCAST)
                assert shares == (min(sizes), max(sizes))
                assert shares[1] - shares[0] <= 1
            places.append(np.flatnonzero(np.isin(parts[0][0], BROADCAST)).tolist())
    assert len(set(map(tuple, places))) == count, "they are mixed among the others, and anew in each epoch"
    for record in shuffler.records:
        assert record.broadcast_samples == len(BROADCAST)
        assert record.n_samples == 1000
    for record in shuffler.records[1:]:
        assert record.needed <= len(OTHERS)
        if record.relay == "":
            assert record.packets == record.needed
    return shuffler.records


@pytest.mark.parametrize("assignment", ["local", "partial:0.3", "global", "aligned"])
@pytest.mark.parametrize("delivery", ["peer", "clique", "storage"])
def test_every_worker_trains_on_them_and_all_else_is_trained_on_once(threads, small, assignment, delivery):
    sharding = Sharding(some_ranks(5), 5, BROADCAST)
    fraction = 0.5 if DELIVERIES[delivery].coded else None
    records = check_run(
        threads, small, 4, assignment=assignment, delivery=delivery, sharding=sharding, cache_fraction=fraction
    )
    if assignment == "partial:0.3":
        assert delivery == "clique" or {record.needed for record in records[1:]} == {5 * 60}  # ceil(0.3 * 993 / 5)
    if assignment == "local":
        assert {record.needed for record in records[1:]} == {0}


@pytest.mark.parametrize("delivery", ["server", "coded", "leftover", "ubershuffle", "auto"])
def test_on_processes_by_the_name_of_a_stored_one(processes, small, delivery):
    write_sharding(small, "mine", some_ranks(3), broadcast=BROADCAST)
    fraction = 0.5 if delivery in ("coded", "ubershuffle") else None
    records = check_run(processes, small, 4, delivery=delivery, sharding="mine", cache_fraction=fraction)
    assert {record.choices.sharding for record in records} == {"mine"}


def test_ranks_alone_train_on_everything_once(threads, small, check_orders):
    sharding = Sharding(np.arange(1000, dtype=np.int32) % 5, 5, np.array([1, 2, 3]))
    with Shuffler(threads, small, sharding=sharding.ranks) as shuffler:
        check_orders(shuffler, 2)
    assert {record.broadcast_samples for record in shuffler.records} == {0}


def test_the_budget_counts_them(threads, small):
    # 199 others and room for 199, and 7 that are broadcast, of 64 bytes and 28 for their places.
    sharding = Sharding(some_ranks(5), 5, BROADCAST)
    # A given sharding is planned for all samples.
    needed = (199 + 199 + 7) * 92 + 110 * 1000
    with pytest.raises(CacheBudgetError, match=rf"needs {needed} bytes on each of 5 workers \(206 rows"):
        Shuffler(threads, small, sharding=sharding, memory_limit=needed - 1)
    with Shuffler(threads, small, sharding=sharding, memory_limit=needed) as shuffler:
        assert len(list(shuffler.epochs(2))) == 2


def test_what_cannot_be(threads, small, sessions_left):
    with pytest.raises(InvalidParameter, match="whole chunks from the first epoch"):
        Shuffler(threads, small, sharding=Sharding(some_ranks(5), 5, BROADCAST), assignment="chunks")
    uneven = some_ranks(5)
    uneven[OTHERS[:3]] = 0
    with pytest.raises(
        InvalidParameter, match=r", not counting the broadcast samples\. Share sizes must differ by at most one"
    ):
        Shuffler(threads, small, sharding=Sharding(uneven, 5, BROADCAST))
    with pytest.raises(InvalidParameter, match=r"n_workers=5 .*4, for which the sharding 'given'"):
        Shuffler(threads, small, sharding=Sharding(some_ranks(4), 4, BROADCAST))
    assert sessions_left(threads) == (0, 0)
