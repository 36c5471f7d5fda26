"""Workers whose build draws other samples from the same seed: no epoch is trained on, although all counts are right."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal

import numpy as np
import pytest
from distributed import Client

from dshuffle import PerRank, Shuffler
from dshuffle.errors import CheckpointError, ExchangeError
from dshuffle.planning.planner import OwnPlanner
from dshuffle.planning.remainder import SampleDigest

pytestmark = pytest.mark.timeout(120)

NOT_THE_SAME = r"the workers drew 1000 samples, which are not the 1000 that are due.* Install the same build"


@pytest.fixture
def differently(monkeypatch):
    """Let one rank of this process draw with another seed."""

    def differently(rank):
        plan = OwnPlanner.plan

        def other(planner, epoch, delivery):
            if planner.rank != rank:
                return plan(planner, epoch, delivery)
            spec = planner.spec
            choices = dataclasses.replace(spec.choices, seed=spec.choices.seed + 1)
            return plan(OwnPlanner(dataclasses.replace(spec, choices=choices), rank), epoch, delivery)

        monkeypatch.setattr(OwnPlanner, "plan", other)

    return differently


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    ("way", "epochs"),
    [
        ({}, 0),
        ({"assignment": "local"}, 0),
        ({"assignment": "chunks"}, 0),
        ({"sharding": "contiguous"}, 1),
        ({"delivery": "storage", "sharding": "contiguous"}, 1),
        ({"delivery": "storage", "sharding": "contiguous", "assignment": "partial:0.3"}, 1),
    ],
    ids=str,
)
def test_one_worker_draws_other_samples(threads, small, check_orders, differently, rank, way, epochs):
    """The first epoch in which the draws differ is not trained on; contiguous shares are not drawn."""
    differently(rank)
    with Shuffler(threads, small, seed=3, **way) as shuffler:
        assert len(check_orders(shuffler, epochs)) == epochs
        for _ in range(2):  # also if it is tried again
            with pytest.raises(ExchangeError, match=rf"epoch {epochs}: {NOT_THE_SAME}"):
                next(shuffler.epochs(1))


def all_ids(partition):
    return partition.sample_ids.tolist()


def some(partition, count):
    partition.mark_trained(count)
    return partition.sample_ids[:count].tolist()


def stopped(client, dataset, counts):
    """The state of a session whose ranks have trained on some samples, and these samples."""
    with Shuffler(client, dataset, seed=3) as shuffler:
        epoch = next(shuffler.epochs(1))
        seen = client.gather(epoch.map(some, PerRank(counts)))
        return shuffler.state_dict(), list(itertools.chain(*seen))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_one_worker_draws_other_samples_of_what_is_left(threads, small, differently, rank):
    state, seen = stopped(threads, small, [20, 0, 7, 50, 1])
    with Shuffler.resume(threads, small, state) as shuffler:
        seen += itertools.chain(*threads.gather(next(shuffler.epochs(1)).map(all_ids)))
    assert sorted(seen) == list(range(1000))
    differently(rank)
    with (
        Shuffler.resume(threads, small, state) as shuffler,
        pytest.raises(ExchangeError, match=r"epoch 0: the workers drew 922 samples, which are not the 922"),
    ):
        next(shuffler.epochs(1))


@pytest.mark.slow
def test_a_state_has_the_digest_of_what_was_trained_on(threads, small):
    """Of three sessions in one epoch, and also of a task that ran twice."""
    state, seen = stopped(threads, small, [20, 0, 7, 50, 1])
    assert state["trained_digest"] == SampleDigest.of(np.array(seen), 3).fields
    for counts in ([[1, 2, 3, 4, 5]], [[9, 0, 0, 8, 4], [8, 0, 0, 9, 4]]):
        with Shuffler.resume(threads, small, state) as shuffler:
            epoch = next(shuffler.epochs(1))
            for attempt in counts:
                last = threads.gather(epoch.map(some, PerRank(attempt)))
            seen += itertools.chain(*last)
            state = shuffler.state_dict()
        assert state["trained_digest"] == SampleDigest.of(np.array(seen), 3).fields
    with Shuffler.resume(threads, small, state) as shuffler:
        seen += itertools.chain(*threads.gather(next(shuffler.epochs(1)).map(all_ids)))
    assert sorted(seen) == list(range(1000))


@pytest.mark.parametrize("noted", [[78, 1, 2], [78, 1, 2, "3"], 5])
def test_a_digest_that_is_damaged(threads, small, noted):
    state, _ = stopped(threads, small, [20, 0, 7, 50, 1])
    with pytest.raises(CheckpointError, match="the state is damaged"):
        Shuffler.resume(threads, small, {**state, "trained_digest": noted})


# -- real processes --------------------------------------------------------------------------------------------------


def is_another_build():
    """Draw the tables of small bijections from other random numbers, as another build might."""
    from dshuffle.planning import randomness as bijection

    permutation = bijection.permutation
    bijection.permutation = lambda size, *path: permutation(size, "another build", *path)


@pytest.mark.slow
def test_a_worker_that_draws_other_samples_does_not_take_a_rank(new_processes, small, check_ids, caplog):
    """The next one does: here the nanny of the lost worker starts it again."""
    with new_processes(2) as cluster, Client(cluster) as client, Shuffler(client, small, seed=3) as shuffler:
        members = set(shuffler.addresses)
        cluster.scale(3)
        client.wait_for_workers(3)
        [spare] = set(client.scheduler_info()["workers"]) - members
        client.run(is_another_build, workers=[spare])
        for epoch in shuffler.epochs(3):
            futures = epoch.map(check_ids)
            if epoch.number == 1:
                client.gather(futures)
                [pid] = client.run(os.getpid, workers=[shuffler.addresses[1]]).values()
                os.kill(pid, signal.SIGKILL)
            assert np.array_equal(np.sort(np.concatenate(client.gather(futures))), np.arange(1000))
        assert spare not in shuffler.addresses
    refused = f"({spare}): this worker would train on other samples of epoch 1 than the worker that was lost. Install"
    assert any(refused in record.getMessage() for record in caplog.records)
