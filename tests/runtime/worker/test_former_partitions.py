"""Reading a first partition from other workers: what they cannot send is left for the dataset."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from distributed.protocol.serialize import Serialize

from dshuffle import create_dataset
from dshuffle.errors import ExchangeError
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.endpoints import Meter
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.replies import RowsReply, to_fields
from dshuffle.planning import Choices, ShuffleSpec
from dshuffle.runtime.session_spec import PartitionSources
from dshuffle.runtime.settings import Settings
from dshuffle.runtime.worker.former_partitions import FormerPartitions

Q, N = 120, 4
SPEC = ShuffleSpec(Q, N, Choices("global", seed=3))
EPOCH = 5


@pytest.fixture(scope="module")
def dataset():
    arrays = {"x": np.random.default_rng(0).random((Q, 3)), "y": np.arange(Q)}
    return create_dataset("memory://former-partitions", arrays, overwrite=True)


class Holders:
    """The workers that held the partitions; ``answer(rank, sample_ids, rows)`` may do something else with the rows."""

    def __init__(self, dataset, answer=None):
        self.dataset, self.answer, self.asked = dataset, answer, []
        self.truth = CachePartition(dataset.layout, capacity=Q, incoming=0)
        slots = self.truth.reserve(np.arange(Q))
        dataset.read_into(self.truth.rows, slots, np.arange(Q))
        self.truth.add_checksums(np.arange(Q), slots)
        self.truth.commit(self.truth.prepare(np.arange(Q)))

    async def rows(self, session_id, epoch, sample_ids):
        assert epoch == EPOCH
        ids = sample_ids.data if isinstance(sample_ids, Serialize) else sample_ids
        rank = int(session_id)
        assert set(SPEC.blocks(EPOCH).ranks_of(ids)) == {rank}, "asked the wrong worker"
        self.asked.append((rank, len(ids)))
        rows, checksums = self.dataset.layout.empty(len(ids)), np.empty(len(ids), np.uint32)
        self.truth.pack(ids, rows, checksums)
        await asyncio.sleep(0.01)
        if self.answer is not None:
            self.answer(rank, ids, rows)
        return RowsReply(rows, checksums)

    async def answer_elsewhere(self, **message):
        return {"status": "OK", **to_fields(await self.rows(**message))}

    def rpc(self, address):
        return SimpleNamespace(dshuffle_rows=self.answer_elsewhere)

    def read(self, sample_ids, *, here=None, missing=(), stop=lambda: False):
        """Read samples on another worker, and return the cache, the places that are left, and bytes received."""

        async def main():
            holders = {rank: (f"tcp://worker-{rank}", str(rank)) for rank in range(N) if rank not in missing}
            worker = SimpleNamespace(address=f"tcp://worker-{here}", rpc=self.rpc)
            settings = Settings(message_bytes=6 * self.dataset.row_nbytes, window_bytes=18 * self.dataset.row_nbytes)
            former, jobs, receiver = (
                PartitionSources(EPOCH, holders, SPEC),
                JobQueue(2, "test"),
                SimpleNamespace(meter=Meter()),
            )
            reader = FormerPartitions(worker, former, self.dataset, settings, jobs, self.rows)
            cache = CachePartition(self.dataset.layout, capacity=Q, incoming=0)
            slots = cache.reserve(sample_ids)
            try:
                left = await reader.read_into(cache, receiver, sample_ids, slots, stop)
            finally:
                await jobs.close()
            read = np.setdiff1d(np.arange(len(sample_ids)), left)
            truth = self.truth.rows[self.truth.index.find(sample_ids[read])]
            np.testing.assert_array_equal(cache.rows[slots[read]], truth)
            return sample_ids[left], receiver.meter.received_bytes

        return asyncio.run(main())


@pytest.fixture
def sample_ids():
    return np.random.default_rng(1).permutation(Q)[:50]


def ranks_of(sample_ids):
    return SPEC.blocks(EPOCH).ranks_of(sample_ids)


def test_every_row_comes_from_the_worker_that_holds_it(dataset, sample_ids):
    holders = Holders(dataset)
    left, received = holders.read(sample_ids, here=2)
    assert len(left) == 0
    assert max(count for _, count in holders.asked) == 6, "longer than a message"
    assert received == (dataset.row_nbytes + 4) * np.count_nonzero(ranks_of(sample_ids) != 2)


def test_rows_of_a_lost_worker_are_left(dataset, sample_ids):
    left, _ = Holders(dataset).read(sample_ids, missing=[1])
    np.testing.assert_array_equal(left, sample_ids[ranks_of(sample_ids) == 1])


@pytest.mark.parametrize("error", [OSError("gone"), ExchangeError("another epoch")])
def test_a_worker_that_fails_is_not_asked_for_ever(dataset, error, caplog):
    def answer(rank, ids, rows):
        if rank == 3:
            raise error

    holders = Holders(dataset, answer)
    left, _ = holders.read(np.arange(Q))
    np.testing.assert_array_equal(left, np.flatnonzero(ranks_of(np.arange(Q)) == 3))
    assert sum(rank == 3 for rank, _ in holders.asked) <= 3, "no more than a window"
    assert f"rows of rank 3 are read from the dataset ({type(error).__name__}" in caplog.text


def test_corrupted_rows_are_left(dataset, sample_ids):
    def answer(rank, ids, rows):
        if rank == 0:
            rows[-1, 0] ^= 1

    left, _ = Holders(dataset, answer).read(sample_ids)
    np.testing.assert_array_equal(left, sample_ids[ranks_of(sample_ids) == 0])


def test_it_stops(dataset, sample_ids):
    holders = Holders(dataset)
    left, _ = holders.read(sample_ids, stop=lambda: len(holders.asked) >= 3)
    assert 50 - 3 * 6 <= len(left) < 50


def test_nothing_is_written_after_an_error(dataset, sample_ids):
    """A mistake in the code is raised when all other requests have ended."""
    ended = []

    def answer(rank, ids, rows):
        if not ended:
            ended.append("failed")
            raise RuntimeError("a bug")
        ended.append(rank)

    with pytest.raises(RuntimeError, match="a bug"):
        Holders(dataset, answer).read(sample_ids)
    assert len(ended) > 3
