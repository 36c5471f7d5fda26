"""Aborts: nothing of a run is written after it, nothing waits for long, and the next run is as good as new."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

from dshuffle.exchange.mailboxes import MessageId
from dshuffle.exchange.transports import ArrivingRows

SERVER, STORE = -1, -2


@pytest.mark.parametrize("over", ["local", "wire"])
@pytest.mark.parametrize("seed", range(10))
def test_after_an_abort_nothing_is_written_and_the_next_run_is_right(new_cluster: Any, seed: int, over: str) -> None:
    cluster, rng = new_cluster(seed, attempts=1), random.Random(seed)
    writing: list[int] = []

    def slow(write: Callable[..., None]) -> Callable[..., None]:
        def slowly(*args: Any) -> None:
            writing.append(1)
            time.sleep(rng.choice([0, 0.001, 0.01]))
            write(*args)
            writing.pop()

        return slowly

    async def late(message: MessageId) -> dict[str, Any]:
        reply = await getattr(cluster, over)(message)
        await cluster.pause()
        return reply

    async def scenario() -> None:
        for peer in cluster.ranks.values():
            peer.cache.unpack = slow(peer.cache.unpack)
        cluster.read_store = slow(cluster.read_store)
        cluster.carry = late
        for run_id in range(2, 7):
            await cluster.begin(run_id)
            await asyncio.sleep(rng.choice([0, 0.001, 0.005, 0.01]))
            await cluster.abort()
            assert not writing
            before = [(peer.cache.rows.copy(), peer.cache.checksums.copy()) for peer in cluster.ranks.values()]
            await asyncio.sleep(rng.choice([0, 0.015]))
            for peer, (rows, checksums) in zip(cluster.ranks.values(), before, strict=True):
                np.testing.assert_array_equal(peer.cache.rows, rows)
                np.testing.assert_array_equal(peer.cache.checksums, checksums)
        assert await cluster.exchange(run_id + 1) == dict.fromkeys(cluster.ranks)
        cluster.commit()

    cluster.play(scenario)


def test_an_abort_does_not_wait_for_a_sender_that_never_begins(new_cluster: Any) -> None:
    cluster = new_cluster(n_ranks=2, senders=(SERVER,))

    async def scenario() -> None:
        cluster.run_id, cluster.votes, cluster.decided = 2, {}, asyncio.Event()
        cluster.begin_on(0)
        cluster.begin_on(1)  # and the server does not
        await asyncio.sleep(0.01)
        assert all(peer.receiver._tasks for peer in cluster.ranks.values())
        await asyncio.wait_for(cluster.abort(), 5)
        await asyncio.sleep(0.01)
        assert not any(peer.receiver._tasks for peer in cluster.ranks.values()), "they would wait for the time-out"
        await cluster.exchange(3)
        cluster.commit()

    cluster.play(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("aborted", [False, True])
def test_a_connection_that_outlives_its_request_does_not_keep_the_cache(new_cluster: Any, aborted: bool) -> None:
    """Dask keeps the frame of a connection that it gave up, and with it the frames that waited for it."""
    cluster = new_cluster(0, attempts=1)
    kept: list[FrameType] = []

    async def broken(message: MessageId) -> dict[str, Any]:
        kept.append(sys._getframe())
        await asyncio.sleep(60 if aborted else 0)
        raise OSError("the worker is lost")

    async def scenario() -> None:
        cluster.carry = broken
        if aborted:
            await cluster.begin(2)
            await asyncio.sleep(0)
        else:
            await cluster.exchange(2)
        gc.disable()
        try:
            await cluster.abort()
            await asyncio.sleep(0.1)  # requests that were cancelled end
            assert kept
            assert not [thing for thing in gc.get_objects() if isinstance(thing, ArrivingRows)]
        finally:
            gc.enable()

    gc.collect()
    cluster.play(scenario)
