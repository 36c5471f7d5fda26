"""Sessions with given and with measured shares: sizes, records, states, and who trains on what."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from distributed import Client, LocalCluster

from dshuffle import Shuffler
from dshuffle.errors import CacheBudgetError, ClusterError, DatasetError, ExchangeError, InvalidParameter
from dshuffle.planning import ShuffleSpec
from dshuffle.planning.exchange_epochs import share_sizes
from dshuffle.planning.remainder import training_orders
from dshuffle.planning.shares import MEASURED_EPOCHS, SharePolicy
from dshuffle.runtime.client.session_client import SessionClient

SLOW_RANK = 2
N_WORKERS = 5
WEIGHTS = (1000, 250, 500, 1000, 500)
"""Of the shares 4, 1, 2, 4, 2."""


def planned(shuffler, epoch, first_weights):
    choices = shuffler.choices
    spec = ShuffleSpec(1000, N_WORKERS, choices, first_weights=first_weights)
    return list(training_orders(spec, epoch))


@pytest.mark.parametrize(
    "way",
    [
        {},
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in (
                {"assignment": "chunks:20"},
                {"assignment": "local"},
                {"assignment": "partial:0.2"},
                {"delivery": "storage"},
            )
        ),
        {"assignment": "aligned", "delivery": "clique", "cache_fraction": 0.5},
    ],
    ids=lambda way: "-".join(map(str, way.values())) or "default",
)
def test_given_shares(threads, small, check_orders, way):
    with Shuffler(threads, small, shares=[4, 1, 2, 4, 2], seed=3, **way) as shuffler:
        seen = check_orders(shuffler, 3)
        for epoch, orders in enumerate(seen):
            for order, expected in zip(orders, planned(shuffler, epoch, WEIGHTS), strict=True):
                np.testing.assert_array_equal(order, expected)
    assert [record.weights for record in shuffler.records] == [WEIGHTS] * 3
    sizes = [len(order) for order in seen[0]]
    assert np.abs(np.subtract(sizes, [308, 77, 154, 307, 154])).max() <= (20 if "chunks" in str(way) else 0)


def test_refusals(threads, small):
    with pytest.raises(InvalidParameter, match=r"shares='2,1' is not allowed; it must be 5 numbers, one for each rank"):
        Shuffler(threads, small, shares=[2, 1])
    with pytest.raises(
        InvalidParameter, match=r"elastic is not allowed: shares='1,1,1,2,1' are for one number of workers.*'measured'"
    ):
        Shuffler(threads, small, shares=[1, 1, 1, 2, 1], elastic=True)
    with pytest.raises(
        InvalidParameter, match=r"shares='7' is not allowed; it must be the names or addresses of .* 0 \("
    ):
        Shuffler(threads, small, shares={"1": 2, 7: 3})
    first, worker = next(iter(threads.scheduler_info()["workers"].items()))
    name = worker["name"]
    with pytest.raises(InvalidParameter, match=r"shares='.*' is not allowed; it must be one number for the worker \d"):
        Shuffler(threads, small, shares={name: 2, first: 3})
    with pytest.raises(InvalidParameter, match=r"the smallest share has 77 samples, and 'partial:0.5' exchanges 100"):
        Shuffler(threads, small, shares=[4, 1, 2, 4, 2], assignment="partial:0.5")


@pytest.mark.parametrize(
    ("shares", "unequal"), [("even", False), ("measured", True), ([1, 1, 1, 1, 2], True), ([2, 2, 2, 2, 2], False)]
)
def test_partitions_know_from_the_first_epoch_that_shares_may_change(threads, small, shares, unequal):
    with Shuffler(threads, small, shares=shares) as shuffler:
        for epoch in shuffler.epochs(1):
            seen = threads.gather(epoch.map(lambda partition: (partition.unequal, partition.as_stored().unequal)))
    assert seen == [(unequal, unequal)] * N_WORKERS


def test_shares_by_name_are_those_of_the_workers_whatever_their_ranks(threads, small, check_orders):
    workers = threads.scheduler_info()["workers"]
    named = {worker["name"]: address for address, worker in workers.items()}
    with Shuffler(threads, small, shares={3: 0.5, named[1]: 0.25}, seed=3) as shuffler:
        seen = check_orders(shuffler, 2)
        numbers = [workers[address]["name"] for address in shuffler.addresses]
    weights = tuple({3: 500, 1: 250}.get(number, 1000) for number in numbers)
    assert [record.weights for record in shuffler.records] == [weights] * 2
    for order, expected in zip(seen[1], planned(shuffler, 1, weights), strict=True):
        np.testing.assert_array_equal(order, expected)


@pytest.mark.slow
def test_a_worker_that_joins_has_the_share_of_its_name(small, tmp_path):
    with (
        LocalCluster(n_workers=2, processes=False, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        Shuffler(client, small, shares={"2": 0.25}, elastic=True) as shuffler,
    ):
        seen = []
        for epoch in shuffler.epochs(6):
            seen.append(client.gather(epoch.map(lambda partition: (partition.unequal, partition.sample_ids.copy()))))
            if epoch.number == 0:
                cluster.scale(3)
                client.wait_for_workers(3)
        assert shuffler.n_workers == 3
    for parts in seen:
        assert np.array_equal(np.sort(np.concatenate([ids for _, ids in parts])), np.arange(1000))
        assert all(unequal for unequal, _ in parts)
    assert [len(ids) for _, ids in seen[-1]] == [445, 444, 111]
    assert shuffler.records[-1].weights == (1000, 1000, 250)


CLOCK = threading.local()
"""Time of the tasks, which does not depend on the load of the machine."""


@pytest.fixture
def clock(monkeypatch):
    """Let workers measure the time of :data:`CLOCK`."""
    now = SimpleNamespace(perf_counter=lambda: getattr(CLOCK, "now", 0.0))
    monkeypatch.setattr("dshuffle.runtime.partition.time", now)


def slow_on_one_rank(partition):
    CLOCK.now = getattr(CLOCK, "now", 0.0) + len(partition) * (0.002 if partition.rank == SLOW_RANK else 0.0005)
    return partition.sample_ids.copy()


@pytest.mark.slow
@pytest.mark.parametrize("assignment", ["global", "partial:0.2", "local", "chunks:20"])
def test_measured_shares(threads, small, clock, assignment):
    with Shuffler(threads, small, shares="measured", assignment=assignment, seed=3) as shuffler:
        seen = [threads.gather(epoch.map(slow_on_one_rank)) for epoch in shuffler.epochs(MEASURED_EPOCHS + 4)]
        state = shuffler.state_dict()
    records = shuffler.records
    for orders in seen:
        assert np.array_equal(np.sort(np.concatenate(orders)), np.arange(1000))
    changed = MEASURED_EPOCHS + 1
    assert [record.weights for record in records[:changed]] == [()] * changed
    [weights] = {record.weights for record in records[changed:]}  # they do not change again
    assert np.delete(weights, SLOW_RANK).tolist() == [1000] * 4
    assert weights[SLOW_RANK] == pytest.approx(250, abs=10 if assignment == "chunks:20" else 0)
    assert max(records[-1].rank_training_seconds) < 0.4 * max(records[0].rank_training_seconds)
    # The epochs are those of planning, from the weights in the records alone.
    if assignment in ("global", "chunks:20"):
        for record, orders in zip(records, seen, strict=True):
            for order, expected in zip(orders, planned(shuffler, record.epoch, record.weights), strict=True):
                np.testing.assert_array_equal(order, expected)
    else:
        before, after = np.empty((2, 1000), int)
        for rank in range(N_WORKERS):
            before[seen[changed - 1][rank]], after[seen[changed][rank]] = rank, rank
        sizes = share_sizes(1000, weights)
        assert np.bincount(after).tolist() == sizes.tolist()
        assert np.count_nonzero(before != after) == np.maximum(0, np.bincount(before) - sizes).sum()
    assert state["choices"]["shares"] == "measured"


@pytest.mark.slow
@pytest.mark.parametrize("assignment", ["global", "local"])
@pytest.mark.parametrize("n_workers", [5, 3])
def test_a_session_goes_on_in_the_middle_of_an_epoch_with_measured_shares(
    threads, client_of, small, clock, assignment, n_workers
):
    """With as many workers, its shares are those before, and otherwise equal; each sample is trained on once."""

    def some(partition):
        partition.mark_trained(len(partition) // 3)
        return partition.sample_ids[: len(partition) // 3].copy()

    way = {"assignment": assignment, "seed": 3}
    with Shuffler(threads, small, shares="measured", **way) as shuffler:
        for epoch in shuffler.epochs(MEASURED_EPOCHS + 3):
            if epoch.number < MEASURED_EPOCHS + 2:
                threads.gather(epoch.map(slow_on_one_rank))
                continue
            done = threads.gather(epoch.map(some))
            state = json.loads(json.dumps(shuffler.state_dict()))
    weights = shuffler.records[-1].weights
    assert weights == (1000, 1000, 250, 1000, 1000)
    with client_of(n_workers) as client:
        with Shuffler.resume(client, small, state) as resumed:
            rest = [client.gather(epoch.map(lambda partition: partition.sample_ids)) for epoch in resumed.epochs(2)]
        assert np.array_equal(np.sort(np.concatenate([*done, *rest[0]])), np.arange(1000))
        assert np.array_equal(np.sort(np.concatenate(rest[1])), np.arange(1000))
        assert {record.weights for record in resumed.records} == {weights if n_workers == N_WORKERS else ()}
        with Shuffler.resume(client, small, state, shares=[1, 2, 3, 4, 5][:n_workers]) as resumed:  # others are allowed
            rest = [client.gather(epoch.map(lambda partition: partition.sample_ids)) for epoch in resumed.epochs(2)]
        assert np.array_equal(np.sort(np.concatenate([*done, *rest[0]])), np.arange(1000))
        assert [len(ids) for ids in rest[1]] == share_sizes(1000, (1, 2, 3, 4, 5)[:n_workers]).tolist()


def test_fewer_workers_begin_with_equal_shares(client_of, small, tmp_path):
    """They have kept partitions of some of the ranks before, whose shares are not theirs."""
    kept = {"cache_directory": tmp_path / "rows", "keep_cache": True}

    with (
        client_of(3) as client,
        Shuffler(client, small, shares=[1, 4, 4], cache_fraction=0.6, **kept) as shuffler,
    ):
        for epoch in shuffler.epochs(2):
            client.gather(epoch.map(len))
        state = shuffler.state_dict()
    with (
        client_of(2) as client,
        Shuffler.resume(client, small, state, shares="measured", **kept) as shuffler,
    ):
        for epoch in shuffler.epochs(1):
            assert client.gather(epoch.map(len)) == [500, 500]
    assert [record.weights for record in shuffler.records] == [()]
    assert shuffler.records[0].store_bytes == 0


@pytest.mark.parametrize(
    ("error", "n_attempts"),
    [
        (CacheBudgetError("two partitions do not fit"), 1),
        pytest.param(DatasetError("a row cannot be read"), 1, marks=pytest.mark.slow),
        pytest.param(ClusterError("a worker is paused"), 5, marks=pytest.mark.slow),
        (ExchangeError("a message was lost"), 5),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("operation", ["open", "advance"])
def test_shares_stay_if_the_session_with_other_ones_fails(
    threads, small, check_orders, monkeypatch, operation, error, n_attempts
):
    """It is tried again only if the error is one of the moment: other weights are proposed for every epoch."""
    sessions, failed = [], []

    def slightly_others(policy, weights, epochs, bounds):
        return (1000, 990 - len(epochs), 1000, 1000, 1000)

    ask = SessionClient.ask

    def failing(self, kind, name, **message):
        sessions.append(self.session_id)
        if name == operation and self.session_id != sessions[0]:
            failed.append(self.session_id)
            raise error
        return ask(self, kind, name, **message)

    monkeypatch.setattr(SharePolicy, "following", slightly_others)
    monkeypatch.setattr(SessionClient, "ask", failing)
    with Shuffler(threads, small, shares="measured", seed=3) as shuffler:
        check_orders(shuffler, 5)
    assert len(set(failed)) == len(failed) == n_attempts
    assert [record.weights for record in shuffler.records] == [()] * 5


@pytest.mark.slow
def test_time_that_tasks_wait_for_other_ranks_does_not_count(threads, small):
    """All ranks of a synchronous step take equally long, and only one of them is slow."""

    def step(partition, group):
        for _ in range(4):
            time.sleep(0.15 if partition.rank == SLOW_RANK else 0.01)
            group.mean(np.ones(3))

    with Shuffler(threads, small) as shuffler:
        for epoch in shuffler.epochs(3):
            epoch.together(step)
    parts = []
    for record in shuffler.records:
        seconds = np.array(record.rank_training_seconds)
        assert 0.6 <= seconds[SLOW_RANK] <= record.training_seconds
        parts.append(np.delete(seconds, SLOW_RANK).max() / record.training_seconds)
    # Less than 0.1 on a quiet machine. If waiting counted, all ranks would take equally long in every epoch.
    assert min(parts) < 0.8
