"""Ranks that take steps together: means over all of them, and no waiting for one that has failed."""

from __future__ import annotations

import asyncio
import os
import signal

import dask
import numpy as np
import pytest
from distributed import Client

import dshuffle.runtime.client.epoch
from dshuffle import Shuffler
from dshuffle.errors import InvalidParameter, PeerFailed
from dshuffle.runtime.client.session_client import SessionClient
from dshuffle.runtime.collective import Collective, CollectiveId, Group


@pytest.fixture
def means():
    def means(partition, group, steps):
        found = [group.mean(np.full(3, 10.0 * group.rank + step), weight=group.rank + 1) for step in range(steps)]
        return np.stack(found), group.size

    return means


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"step": 1}, "rank 1 called mean for step 1 while the others were at step 0"),
        ({"rank": 0}, "rank 0 called mean for step 0 while"),
        ({"values": np.ones(4)}, r"values.shape=\[\(3,\), \(4,\)\]"),
        ({"weight": -1.0}, "weight=0.0"),
        ({"values": np.full(3, "a")}, "UFuncTypeError"),
    ],
)
def test_ranks_that_do_not_fit_together_all_hear_of_it(second, message):
    async def meet():
        collective = Collective(1)
        one = {"size": 2, "step": 0, "rank": 0, "values": np.ones(3), "weight": 1.0}
        waits = asyncio.create_task(collective.mean(**one))
        await asyncio.sleep(0)
        with pytest.raises(PeerFailed, match=message):
            await collective.mean(**{**one, "rank": 1, **second})
        with pytest.raises(PeerFailed, match=message):
            await waits
        with pytest.raises(PeerFailed, match=message):
            await collective.mean(**one)

    asyncio.run(meet())


@pytest.mark.parametrize(
    ("values", "weight", "message"),
    [
        (["a"], 1.0, "values.dtype='<U1'"),
        ([None], 1.0, "values.dtype='object'"),
        ([1.0], -0.5, "weight=-0.5"),
        ([1.0], np.nan, "weight=nan"),
        ([1.0], np.inf, "weight=inf"),
    ],
)
def test_what_has_no_mean_is_refused_before_anything_is_sent(values, weight, message):
    group = Group(CollectiveId("session", 1, 2, "nowhere"), 0)
    with pytest.raises(InvalidParameter, match=message):
        group.mean(values, weight)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["threads", "processes"])
def test_all_ranks_get_the_same_means(request, small, means, cluster):
    client = request.getfixturevalue(cluster)
    with Shuffler(client, small) as shuffler:
        n = shuffler.n_workers
        weights = np.arange(1, n + 1)
        for epoch in shuffler.epochs(2):
            for _ in range(2):
                found = epoch.together(means, 4)
                assert [size for _, size in found] == [n] * n
                expected = np.average(10.0 * np.arange(n), weights=weights) + np.arange(4)
                np.testing.assert_allclose(found[0][0], np.repeat(expected[:, np.newaxis], 3, axis=1))
                assert all(np.array_equal(one, found[0][0]) for one, _ in found)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["threads", "processes"])
@pytest.mark.parametrize("bad", [0, 2])
def test_the_error_of_a_rank_is_raised_and_nobody_waits_for_it(request, small, check_ids, means, within, cluster, bad):
    client = request.getfixturevalue(cluster)

    def fails(partition, group):
        group.mean(np.ones(2))
        if group.rank == bad:
            raise RuntimeError("this one is broken")
        return group.mean(np.ones(2))

    with Shuffler(client, small) as shuffler:
        for epoch in shuffler.epochs(2):
            with pytest.raises(RuntimeError, match="this one is broken"):
                within(60, lambda epoch=epoch: epoch.together(fails))
            epoch.accept()
            assert len(epoch.together(means, 2)) == shuffler.n_workers, "the session goes on"
        assert sum(map(len, client.gather(epoch.map(check_ids)))) == 1000


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("cluster", ["threads", "processes"])
@pytest.mark.parametrize("short", [0, 2])
def test_nobody_waits_for_a_rank_that_has_returned(request, small, means, within, cluster, short):
    def uneven(partition, group):
        for _ in range(2 if group.rank == short else 2 + group.rank + 1):
            group.mean(np.ones(2))

    with Shuffler(request.getfixturevalue(cluster), small) as shuffler:
        for epoch in shuffler.epochs(2):
            with pytest.raises(PeerFailed, match=f"the task of rank {short} has ended"):
                within(60, lambda epoch=epoch: epoch.together(uneven))
            epoch.accept()
            assert len(epoch.together(means, 2)) == shuffler.n_workers, "the session goes on"


@pytest.mark.timeout(120)
def test_the_ranks_are_told_again_if_a_message_is_lost(threads, small, within, monkeypatch):
    """Rank 1 cannot reach rank 0, and the client cannot either, at first."""
    tell, reasons = SessionClient.end_collective, []

    def loses_the_first(session, collective, reason, **transient):
        reasons.append(reason)
        if len(reasons) > 1:
            tell(session, collective, reason, **transient)

    def cut_off(partition, group):
        if group.rank == 1:
            raise PeerFailed("rank 0 cannot be reached")
        return group.mean(np.ones(2))

    monkeypatch.setattr(SessionClient, "end_collective", loses_the_first)
    monkeypatch.setattr(dshuffle.runtime.client.epoch, "PATIENCE", 0.2)
    with Shuffler(threads, small) as shuffler:
        epoch = next(shuffler.epochs(1))
        with pytest.raises(PeerFailed):
            within(60, lambda: epoch.together(cut_off))
        epoch.accept()
    assert reasons == ["the task of rank 1 has failed"] * len(reasons)
    assert len(reasons) > 1


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("lost", [0, 1])
def test_after_a_worker_was_replaced_all_ranks_start_again(new_processes, small, within, tmp_path, lost):
    died = tmp_path / "died"

    def dies_once(partition, group):
        first = group.mean(np.full(2, len(partition)))
        if group.rank == lost and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return first + group.mean(np.ones(2))

    # Nobody may wait for a connection to the worker that is gone.
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "10m"}),
        new_processes(3) as cluster,
        Client(cluster) as client,
        Shuffler(client, small) as shuffler,
    ):
        for epoch in shuffler.epochs(2):
            means = within(60, lambda epoch=epoch: epoch.together(dies_once))
            assert [mean.tolist() for mean in means] == [[1000 / 3 + 1] * 2] * 3
    assert died.exists()
