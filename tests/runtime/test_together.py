"""Ranks that take steps together: means over all of them, and no waiting for one that has failed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import dask
import numpy as np
import pytest
from distributed import Client

import dshuffle.runtime.client.epoch
from dshuffle import Shuffler
from dshuffle.errors import InvalidParameter, PeerFailed, WorkerLost
from dshuffle.runtime.client.session_client import SessionClient
from dshuffle.runtime.collective import OFFLOAD_BYTES, Collective, CollectiveId, Group, weighted_mean
from dshuffle.runtime.session_spec import PLUGIN
from dshuffle.runtime.worker.session import MemberAddresses

DEAD = "tcp://192.0.2.1:1"


@pytest.fixture
def elsewhere(monkeypatch):
    """A group whose rank 0 never answers, the addresses of its session here, and a worker with this session."""
    calls = []

    async def no_answer(*_, **message):
        calls.append(message)
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr("dshuffle.runtime.collective.request", no_answer)

    def make():
        addresses = MemberAddresses({0: DEAD, 1: "tcp://192.0.2.2:1"})
        plugin = SimpleNamespace(sessions={"session": SimpleNamespace(addresses=addresses)})
        worker = SimpleNamespace(plugins={PLUGIN: plugin})
        return Group(CollectiveId("session", 1, 2, DEAD), 1), addresses, worker, calls

    return make


@pytest.mark.parametrize(
    "change", [{0: "tcp://192.0.2.3:1"}, None], ids=["rank 0 is replaced", "the session is closed"]
)
def test_a_rank_does_not_wait_for_a_worker_that_has_left_the_session(elsewhere, change):
    async def waits():
        group, addresses, worker, calls = elsewhere()
        mean = asyncio.create_task(group._request_mean(worker, values=np.ones(2)))
        failure = asyncio.create_task(group._end_collective(worker, "rank 1 has failed"))
        await asyncio.sleep(0)
        addresses.update({1: "tcp://192.0.2.4:1"})  # that of another rank
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(calls) == 2
        assert not mean.done()
        assert not failure.done()
        if change is None:
            addresses.closed = True
        else:
            addresses.update(change)
        with pytest.raises(PeerFailed, match=f"rank 0 has left {DEAD}, or the session"):
            await mean
        await failure

        with pytest.raises(PeerFailed, match="rank 0 has left"):  # that began after it
            await group._request_mean(worker, values=np.ones(2))
        worker.plugins[PLUGIN].sessions.clear()
        with pytest.raises(PeerFailed, match="rank 0 has left"):
            await group._request_mean(worker, values=np.ones(2))

    asyncio.run(asyncio.wait_for(waits(), 10))


@pytest.fixture
def means():
    def means(partition, group, steps):
        found = [group.mean(np.full(3, 10.0 * group.rank + step), weight=group.rank + 1) for step in range(steps)]
        return np.stack(found), group.size

    return means


@pytest.mark.parametrize("length", [3, OFFLOAD_BYTES // 8])
def test_a_mean_waits_for_all_and_does_not_depend_on_who_comes_first(length):
    async def meet(order):
        collective = Collective(1)
        coming = []
        for rank in order:
            values = np.random.default_rng(rank).random(length)
            coming.append(
                asyncio.create_task(collective.mean(size=3, step=0, rank=rank, values=values, weight=rank + 1))
            )
            if len(coming) < 3:
                await asyncio.sleep(0)
                assert not any(task.done() for task in coming)
        return await asyncio.gather(*coming)

    results = [one for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]) for one in asyncio.run(meet(order))]
    expected = np.average([np.random.default_rng(rank).random(length) for rank in range(3)], axis=0, weights=[1, 2, 3])
    np.testing.assert_allclose(results[0], expected)
    assert all(np.array_equal(one, results[0]) for one in results)


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


@pytest.mark.parametrize("length", [3, OFFLOAD_BYTES // 8])
def test_a_collective_that_ends_keeps_no_mean_from_anybody(length):
    async def meet():
        collective = Collective(1)
        coming = [
            asyncio.create_task(collective.mean(size=2, step=0, rank=rank, values=np.full(length, rank), weight=1.0))
            for rank in range(2)
        ]
        await asyncio.sleep(0)  # both have come; nobody has been answered, and the long sum is still being taken
        collective.fail("the task of rank 0 has ended")
        for mean in await asyncio.gather(*coming):
            np.testing.assert_array_equal(mean, np.full(length, 0.5))

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


def test_the_mean_of_scalars_is_an_array():
    mean = weighted_mean([(np.asarray(1.0), 1.0), (np.asarray(4), 2.0)])
    assert isinstance(mean, np.ndarray)
    assert (mean.shape, mean) == ((), 3.0)
    with pytest.raises(InvalidParameter, match="weight=inf"):
        weighted_mean([(np.ones(1), 1e308), (np.ones(1), 1e308)])


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
def test_the_error_of_a_rank_is_raised_and_nobody_waits_for_it(
    request, small, check_ids, means, within, caplog, cluster, bad
):
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
    logged = [record.getMessage() for record in caplog.records if "Compute Failed" in record.getMessage()]
    assert len(logged) == (2 if cluster == "threads" else 0), "not the consequences for the other ranks"
    assert all(f"-{bad}\n" in text and "this one is broken" in text for text in logged)


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


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_has_returned_keeps_no_mean_from_those_that_are_slow(threads, small):
    def slow(partition, group):
        found = [float(group.mean(float(step))) for step in range(20)]
        time.sleep(0.1 * group.rank)
        return found

    with Shuffler(threads, small) as shuffler:
        for epoch in shuffler.epochs(5):
            np.testing.assert_allclose(epoch.together(slow), [np.arange(20)] * shuffler.n_workers)


@pytest.mark.slow
def test_sessions_that_share_threads_do_not_wait_for_each_other(processes, small, means, within):
    # Each worker has one thread. Without precautions each session would soon hold one that another waits for.
    with contextlib.ExitStack() as stack:
        shufflers = [stack.enter_context(Shuffler(processes, small)) for _ in range(3)]
        epochs = [next(shuffler.epochs(1)) for shuffler in shufflers]
        with ThreadPoolExecutor() as pool:
            found = within(100, lambda: list(pool.map(lambda epoch: epoch.together(means, 50), epochs)))
    assert [len(one) for one in found] == [3, 3, 3]


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


@pytest.mark.timeout(120)
def test_a_call_that_failed_in_all_restarts_does_not_end_the_epoch(threads, small, within, monkeypatch):
    def fails(partition, group):
        raise PeerFailed(f"of rank {group.rank}")

    monkeypatch.setattr(Shuffler, "look_up_members", lambda shuffler: True)  # as if a worker were replaced each time
    with Shuffler(threads, small) as shuffler:
        epochs = shuffler.epochs(2)
        epoch = next(epochs)
        with pytest.raises(PeerFailed, match="of rank 0"):
            within(60, lambda: epoch.together(fails))
        with pytest.raises(PeerFailed, match="of rank"):
            next(epochs)
        epoch.accept()
        assert next(shuffler.epochs(1)).number == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("on_loss", ["raise", "replace"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_worker_is_killed_while_others_wait_for_it(new_processes, small, within, tmp_path, lost, on_loss):
    """All ranks start again if it is replaced. Nobody may wait for a connection to the worker that is gone."""
    died = tmp_path / "died"

    def dies_once(partition, group):
        first = group.mean(np.full(2, len(partition)))
        if group.rank == lost and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return first + group.mean(np.ones(2))

    with (
        dask.config.set({"distributed.comm.timeouts.connect": "10m"}),
        new_processes(3) as cluster,
        Client(cluster) as client,
        Shuffler(client, small, on_loss=on_loss) as shuffler,
    ):
        if on_loss == "raise":
            epoch = next(shuffler.epochs(2))
            with pytest.raises(WorkerLost, match=f"rank {lost}"):
                within(60, lambda: epoch.together(dies_once))
            return epoch.accept()
        for epoch in shuffler.epochs(2):
            means = within(60, lambda epoch=epoch: epoch.together(dies_once))
            assert [mean.tolist() for mean in means] == [[1000 / 3 + 1] * 2] * 3
    assert died.exists()
