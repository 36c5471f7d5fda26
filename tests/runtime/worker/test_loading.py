"""Bringing rows to a worker: from former partitions, and from the store through the workers that read it."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import zarr
from distributed.protocol.serialize import Serialize

from dshuffle import create_dataset, open_dataset
from dshuffle.errors import ExchangeError
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.comms import RowsReply, to_fields
from dshuffle.exchange.endpoints import JobQueue
from dshuffle.planning import Choices, ShuffleSpec
from dshuffle.rows import checksum_rows
from dshuffle.runtime.session_spec import PartitionSources
from dshuffle.runtime.settings import Settings
from dshuffle.runtime.worker import loading
from dshuffle.runtime.worker.loading import Load, Loader, StoreReader
from dshuffle.store.row_blocks import RowBlocks

Q, N, EPOCH = 600, 4, 5
SPEC = ShuffleSpec(Q, N, Choices("global", seed=3))


@pytest.fixture(scope="module")
def dataset():
    rng = np.random.default_rng(0)
    arrays = {"x": rng.random((Q, 3)), "label": rng.integers(0, 9, Q), "y": np.arange(Q, dtype="i4")}
    return create_dataset("memory://loading", arrays, chunk_rows=20, overwrite=True)


def truth_of(dataset):
    rows = dataset.layout.empty(dataset.n_samples)
    dataset.read_into(rows, np.arange(dataset.n_samples), np.arange(dataset.n_samples))
    return rows


class Workers:
    """Workers that load together, in one event loop. ``answer(address, block, reply)`` may do something to a reply."""

    def __init__(self, dataset, n_workers=N, *, former=None, rows_of=None, answer=None, message_rows=6):
        self.dataset, self.n_workers, self.former, self.rows_of = dataset, n_workers, former, rows_of
        self.answer = answer
        self.truth = truth_of(dataset)
        row = dataset.row_nbytes
        self.settings = Settings(message_bytes=message_rows * row, window_bytes=3 * message_rows * row)
        self.blocks = RowBlocks(dataset, n_workers)
        self.read = Counter()  # (address, block) -> how often
        self.substitutes = {}
        self.named = []
        self.lock = threading.Lock()

    @staticmethod
    def address(rank):
        return f"tcp://worker-{rank}"

    def loader(self, rank):
        worker = SimpleNamespace(
            address=self.address(rank), rpc=self.rpc, scheduler=SimpleNamespace(dshuffle_reader=self.name_reader)
        )
        jobs, reading = JobQueue(2, "test"), JobQueue(2, "test-read")
        read = self.blocks.read

        def counted(block, stop):
            with self.lock:
                self.read[self.address(rank), block] += 1
            return read(block, stop)

        blocks = RowBlocks(self.dataset, self.n_workers)
        blocks.read = counted
        reader = StoreReader(blocks, reading, jobs, 60.0)
        self.queues += [jobs, reading]
        self.readers[self.address(rank)] = reader
        spec = SimpleNamespace(session_id="session", settings=self.settings, former=self.former)
        return Loader(worker, spec, self.dataset, blocks, jobs, reading, reader, self.rows_of)

    def rpc(self, address):
        async def block(session_id, numbers, load, owner, n_owners, block):
            numbers = numbers.data if isinstance(numbers, Serialize) else numbers
            reader = self.readers[address]
            if block < 0:
                reader.announce(load, owner, n_owners, numbers.tolist())
                return {"status": "OK"}
            reply = await reader.rows(load, owner, block, numbers)
            if self.answer is not None:
                reply = await self.answer(address, block, reply)
            return {"status": "OK", **to_fields(reply)}

        async def rows(session_id, epoch, sample_ids):
            ids = sample_ids.data if isinstance(sample_ids, Serialize) else sample_ids
            return {"status": "OK", **to_fields(await self.rows_of(session_id, epoch, ids))}

        return SimpleNamespace(dshuffle_block=block, dshuffle_rows=rows)

    async def name_reader(self, session_id, load, address, reason):
        self.named.append((address, reason))
        others = [self.address(rank) for rank in range(self.n_workers) if self.address(rank) != address]
        return {"status": "OK", "message": self.substitutes.setdefault((load, address), others[0])}

    def load(self, partitions, *, alone=True, readers=None, stop=lambda: False, former=False, together=True):
        """Load these samples of each rank, or let it join; the caches, after they were compared with the store."""

        async def main():
            self.queues, self.readers, caches = [], {}, {}
            loaders = {rank: self.loader(rank) for rank in range(self.n_workers)}
            addresses = tuple(map(self.address, range(self.n_workers) if readers is None else readers))

            async def bring(rank, samples):
                if samples is None:
                    load = Load("load", rank, len(partitions), addresses)
                    return await loaders[rank].join(load, CachePartition(self.dataset.layout, capacity=0, incoming=0))
                cache = caches[rank] = CachePartition(self.dataset.layout, capacity=len(samples), incoming=0)
                load = Load("load", rank, len(partitions) if together else 0, addresses, alone)
                slots = cache.reserve(samples)
                done = np.zeros(len(samples), np.bool_)
                await loaders[rank].bring(load, cache, samples, slots, stop, done=done, former=former)
                assert done.all()
                np.testing.assert_array_equal(cache.rows[slots], self.truth[samples])
                np.testing.assert_array_equal(cache.checksums[slots], checksum_rows(self.truth[samples], samples))

            try:
                ends = await asyncio.gather(*(bring(*item) for item in partitions.items()), return_exceptions=True)
                for error in filter(None, ends):
                    raise error
                await asyncio.sleep(0.05)
                if together and not self.named:  # a reader that failed keeps its blocks until the next commit
                    assert all(not reader._held for reader in self.readers.values()), "blocks stay in memory"
                self.received = {rank: loader.received_bytes for rank, loader in loaders.items()}
                return caches
            finally:
                for reader in self.readers.values():
                    reader.close()
                for queue in self.queues:
                    await queue.close()

        return asyncio.run(main())

    @property
    def read_once(self):
        return sorted(block for _, block in self.read) == sorted({block for _, block in self.read}) and set(
            self.read.values()
        ) <= {1}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr("dshuffle.store.row_blocks.SMALLEST_BLOCK", 1000)


def random_partitions(n_samples, n_workers=N, seed=0):
    owners = np.random.default_rng(seed).integers(0, n_workers, n_samples)
    return {rank: np.flatnonzero(owners == rank) for rank in range(n_workers)}


def test_every_block_is_read_once_by_its_reader(dataset, small_blocks):
    workers = Workers(dataset)
    workers.load(random_partitions(Q))
    assert workers.read_once
    assert len(workers.read) == workers.blocks.n_blocks > 2 * N
    assert all(address == workers.address(block % N) for address, block in workers.read)


def test_what_one_worker_needs_alone_is_not_sent(dataset, small_blocks):
    workers = Workers(dataset)
    step = workers.blocks.groups[0].step
    bounds = [0, 3 * step, 5 * step + 7, 8 * step, Q]
    workers.load({rank: np.arange(first, last) for rank, (first, last) in enumerate(itertools.pairwise(bounds))})
    assert {block for _, block in workers.read} == {5}, "only the block that two workers share"


@pytest.mark.parametrize("view", ["selected", "windows", "selected windows", "patches", "chunks of other sizes"])
def test_views_and_arrays_with_other_chunks(view, small_blocks, monkeypatch):
    monkeypatch.setattr("dshuffle.store.row_blocks.LARGEST_BLOCK", 4000)
    rng = np.random.default_rng(1)
    arrays = {"x": rng.random((Q, 4, 4)), "label": rng.integers(0, 9, Q), "z": rng.random(Q).astype("f4")}
    dataset = create_dataset(
        "memory://loading-views", arrays, chunk_rows=None if "chunks" in view else 20, overwrite=True
    )
    if view == "chunks of other sizes":
        monkeypatch.setattr("dshuffle.store.create._CHUNK_NBYTES", 2000)
        dataset = create_dataset("memory://loading-chunks", arrays, overwrite=True)
        assert len({info.chunk_rows for info in dataset.arrays.values()}) == 3
        assert len(RowBlocks(dataset, N).groups) > 1
    if "windows" in view:
        dataset = dataset.windows({"x": [-2, 0, 1], "label": 3})
    if "selected" in view:
        dataset = dataset.select(np.sort(rng.permutation(dataset.n_samples)[:200]))
    if view == "patches":
        group = zarr.create_group(zarr.storage.MemoryStore())
        for name, dims in (("x", "sab"), ("label", "s")):
            sizes = (20, *arrays[name].shape[1:])
            group.create_array(name, data=arrays[name], chunks=sizes, dimension_names=dims)
        dataset = open_dataset(group).patches(a=2, b=3)
    workers = Workers(dataset)
    workers.load(random_partitions(dataset.n_samples))
    assert workers.read_once


def test_others_read_for_workers_that_take_lost_ranks(dataset, small_blocks):
    workers = Workers(dataset, 5)
    partitions = random_partitions(Q, 5)
    workers.load({1: partitions[1], 3: partitions[3]}, readers=[0, 2, 4], alone=False)
    assert workers.read_once
    counts = Counter(address for address, _ in workers.read)
    assert set(counts) == {workers.address(rank) for rank in (0, 2, 4)}
    assert max(counts.values()) - min(counts.values()) <= 1


def test_memory_is_bounded_and_blocks_are_still_read_once(dataset, small_blocks, monkeypatch):
    """One worker is slow: the others wait for it rather than let blocks be read twice."""
    monkeypatch.setattr(loading, "READING_NBYTES", 6 * 20 * dataset.row_nbytes)

    async def late(address, block, reply):
        await asyncio.sleep(0.02)
        return reply

    workers = Workers(dataset, answer=late)
    workers.load(random_partitions(Q))
    assert workers.read_once


def test_another_worker_reads_in_place_of_one_that_fails(dataset, small_blocks):
    async def fails(address, block, reply):
        if address == Workers.address(2):
            raise ConnectionResetError("gone")
        return reply

    workers = Workers(dataset, answer=fails)
    workers.load(random_partitions(Q))
    assert {address for address, _ in workers.named} == {workers.address(2)}
    reads = Counter(block for _, block in workers.read)
    assert max(reads.values()) <= 2, "by the reader that failed, and by the one in its place"


def test_another_worker_reads_in_place_of_one_that_never_has_the_rows(dataset, small_blocks, monkeypatch):
    monkeypatch.setattr(loading, "LATE_AFTER", 0.2)

    async def later(address, block, reply):
        await asyncio.sleep(0.01)
        return {"status": "later"} if address == Workers.address(2) else reply

    workers = Workers(dataset, answer=later)
    workers.load(random_partitions(Q))
    assert (workers.address(2), f"ExchangeError: {workers.address(2)} has sent no rows for 0.2 s") in workers.named


@pytest.mark.parametrize("late", [0, 3])
def test_an_owner_that_begins_late_finds_the_blocks(dataset, small_blocks, monkeypatch, late):
    """It has not said what it needs when the others have their rows."""
    monkeypatch.setattr(loading, "READING_NBYTES", 8 * 20 * dataset.row_nbytes)
    monkeypatch.setattr(loading, "ABANDONED_AFTER", 0.2)
    bring = Loader._bring_stored

    async def begins_late(self, attempt):
        if attempt.load.owner == late:
            await asyncio.sleep(0.6)  # less than 5 times as long
        await bring(self, attempt)

    monkeypatch.setattr(Loader, "_bring_stored", begins_late)
    workers = Workers(dataset)
    workers.load(random_partitions(Q))
    assert workers.read_once


def test_another_attempt_goes_on_without_an_owner_that_has_all_its_rows(dataset, small_blocks):
    """It says that it needs nothing, so that blocks do not wait for it."""
    workers = Workers(dataset)
    workers.load(random_partitions(Q) | {3: None})
    assert workers.read_once


def test_rows_that_arrive_corrupted_are_asked_for_again(dataset, small_blocks):
    corrupted = set()

    async def corrupt(address, block, reply):
        if block not in corrupted and isinstance(reply, RowsReply):
            corrupted.add(block)
            reply.rows[0, 0] ^= 1
        return reply

    workers = Workers(dataset, answer=corrupt)
    workers.load(random_partitions(Q))
    assert corrupted
    assert not workers.named


def test_it_stops(dataset, small_blocks):
    calls = []

    def stop():
        calls.append(1)
        return len(calls) > 20

    with pytest.raises(ExchangeError, match="loading was stopped"):
        Workers(dataset).load(random_partitions(Q), stop=stop)


def test_whoever_recovers_rows_of_a_block_shares_one_read(dataset, small_blocks):
    """Nobody has announced what it needs."""
    workers = Workers(dataset)
    samples = np.sort(np.random.default_rng(0).permutation(Q)[:40])
    workers.load({rank: samples[rank::N] for rank in range(N)}, together=False, alone=False)
    assert workers.read_once


class Holders:
    """Workers that hold the partitions of a former session."""

    def __init__(self, dataset, answer=None):
        self.dataset, self.answer, self.asked, self.truth = dataset, answer, [], truth_of(dataset)

    async def rows(self, session_id, epoch, sample_ids):
        assert epoch == EPOCH
        rank = int(session_id)
        assert set(SPEC.blocks(EPOCH).ranks_of(sample_ids)) == {rank}, "asked the wrong worker"
        self.asked.append((rank, len(sample_ids)))
        rows = self.truth[sample_ids]
        checksums = checksum_rows(rows, sample_ids)
        await asyncio.sleep(0.002)
        if self.answer is not None:
            self.answer(rank, rows)
        return RowsReply(rows, checksums)

    def load(self, samples, *, missing=()):
        """Load samples on worker 2; the numbers of those that were read from the store."""
        holders = {rank: (Workers.address(rank), str(rank)) for rank in range(N) if rank not in missing}
        sources = PartitionSources(EPOCH, holders, SPEC)
        workers = Workers(self.dataset, former=sources, rows_of=self.rows)
        asked = []

        async def note(address, block, reply):
            asked.append(len(reply.rows))
            return reply

        workers.answer = note
        workers.load({2: samples}, former=True, alone=False, readers=[0, 1, 3])
        self.received = workers.received[2]
        return sum(asked)


@pytest.fixture
def sample_ids():
    return np.random.default_rng(1).permutation(Q)[:150]


def ranks_of(sample_ids):
    return SPEC.blocks(EPOCH).ranks_of(sample_ids)


def test_every_row_comes_from_the_worker_that_holds_it(dataset, sample_ids):
    holders = Holders(dataset)
    assert holders.load(sample_ids) == 0
    assert max(count for _, count in holders.asked) == 6, "longer than a message"
    assert holders.received == (dataset.row_nbytes + 4) * np.count_nonzero(ranks_of(sample_ids) != 2)


def test_rows_of_a_lost_worker_come_from_the_store(dataset, sample_ids):
    assert Holders(dataset).load(sample_ids, missing=[1]) == np.count_nonzero(ranks_of(sample_ids) == 1)


@pytest.mark.parametrize("error", [OSError("gone"), ExchangeError("another epoch")])
def test_a_holder_that_fails_is_not_asked_for_ever(dataset, error, caplog):
    def answer(rank, rows):
        if rank == 3:
            raise error

    holders = Holders(dataset, answer)
    assert holders.load(np.arange(Q)) == np.count_nonzero(ranks_of(np.arange(Q)) == 3)
    assert sum(rank == 3 for rank, _ in holders.asked) <= 3, "no more than a window"
    assert f"rows of rank 3 are read from the dataset ({type(error).__name__}" in caplog.text


def test_corrupted_rows_of_a_holder_come_from_the_store(dataset, sample_ids):
    def answer(rank, rows):
        if rank == 0:
            rows[-1, 0] ^= 1

    assert Holders(dataset, answer).load(sample_ids) == np.count_nonzero(ranks_of(sample_ids) == 0)
