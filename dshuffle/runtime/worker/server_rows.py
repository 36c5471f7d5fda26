"""The server's rows: blocks of consecutive samples, kept in memory up to a budget and read ahead beyond it.

What stays in memory comes with the load of the first partitions, in which each chunk is read once for all.

An uncoded plan is in ascending sample order (`planning/delivery/definition.py`), so all destinations move through the
dataset together, block after block. The first blocks stay in memory permanently. The others pass through a small window
that the reader fills ahead of the requests. Therefore each chunk beyond the budget is read once per epoch, independent
of the number of workers. A packet XORs samples from anywhere in the dataset, so coded plans need all blocks in memory.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.coding import encode
from dshuffle.errors import CacheBudgetError
from dshuffle.exchange.cache_partition import SLOT_OVERHEAD, CachePartition
from dshuffle.exchange.messages import MIB
from dshuffle.planning import Packets
from dshuffle.rows import ByteMatrix, Checksums, RowLayout, checksum_rows
from dshuffle.store import Dataset

BLOCK_BYTES = 8 * MIB

Bring = Callable[..., Awaitable[None]]
"""Brings samples into slots: :meth:`.loading.Loader.bring` of a load."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of consecutive samples, with their checksums."""

    rows: ByteMatrix
    checksums: Checksums


class ServerRows:
    """Rows of any sample of a dataset, for a :class:`~dshuffle.exchange.endpoints.Sender`.

    Parameters
    ----------
    dataset
        Dataset from which rows are read if they are not in memory.
    budget
        Maximum bytes of rows to keep; ``None`` keeps all rows.
    window_bytes
        Maximum bytes of rows on their way to the receivers. The moving window holds this much if the budget allows.
    whole
        Whether all rows must be kept, in order to encode packets.
    """

    def __init__(self, dataset: Dataset, *, budget: int | None, window_bytes: int, whole: bool = False) -> None:
        self._dataset = dataset
        self._layout: RowLayout = dataset.layout
        row_bytes = dataset.row_nbytes + SLOT_OVERHEAD
        # Blocks are whole chunks of the array with the widest rows. A chunk of labels may span the whole dataset.
        widest = max(dataset.arrays.values(), key=lambda info: info.dtype.itemsize * math.prod(info.shape))
        chunk_rows = widest.chunk_rows
        self._block_rows = max(1, -(-BLOCK_BYTES // row_bytes // chunk_rows)) * chunk_rows
        n_blocks = -(-dataset.n_samples // self._block_rows)
        block_bytes = min(self._block_rows, dataset.n_samples) * row_bytes
        fitting = n_blocks if budget is None else budget // block_bytes
        if fitting < min(3, n_blocks):
            raise CacheBudgetError(
                f"the server needs room for {min(3, n_blocks)} blocks of {block_bytes} bytes "
                f"({min(3, n_blocks) * block_bytes} bytes in total); memory_limit leaves {budget} bytes. Raise it or "
                "serve from a worker with more memory"
            )
        if whole and fitting < n_blocks:
            raise CacheBudgetError(
                f"a coded delivery needs all rows in the server's memory ({n_blocks} blocks of {block_bytes} bytes, "
                f"{n_blocks * block_bytes} bytes in total); memory_limit leaves {budget} bytes. Serve from a worker "
                "with more memory, or use the delivery 'server' or 'peer'"
            )
        window = 0 if fitting >= n_blocks else min(fitting, max(3, -(-window_bytes // block_bytes) + 2))
        self._n_blocks = n_blocks
        self._n_resident = n_blocks if window == 0 else fitting - window
        self._n_moving = window
        # One matrix, so that packets can be encoded from any rows. Pages that are never written do not take memory.
        n_rows = min(self._n_resident * self._block_rows, dataset.n_samples)
        self._kept = CachePartition(self._layout, capacity=n_rows, incoming=0)
        self._loaded = np.zeros(n_rows, np.bool_)
        self._resident: dict[int, Future[Block]] = {}
        self._moving: OrderedDict[int, Future[Block]] = OrderedDict()
        self._lock = threading.Lock()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="dshuffle-server-read")

    async def load(self, bring: Bring, stop: Callable[[], bool]) -> None:
        """Load the rows that stay in memory, together with the workers that load their partitions."""
        samples = np.arange(len(self._loaded))
        await bring(self._kept, samples, samples, stop, done=self._loaded)
        with self._lock:
            for number in range(self._n_resident):
                self._resident[number] = loaded = Future[Block]()
                loaded.set_result(self._block_in_memory(number))

    def pack(self, sample_ids: NDArray[np.int64], rows: ByteMatrix, checksums: Checksums) -> None:
        """Copy rows and checksums of samples into buffers, in the given order. Each block is looked up once."""
        blocks = sample_ids // self._block_rows
        order = np.argsort(blocks, kind="stable")
        present, starts = np.unique(blocks[order], return_index=True)
        for number, places in zip(present.tolist(), np.split(order, starts[1:]), strict=True):
            block = self._block(number)
            within = sample_ids[places] - number * self._block_rows
            rows[places] = block.rows[within]
            checksums[places] = block.checksums[within]

    def encode(self, plan: Packets, packets: NDArray[np.int64], rows: ByteMatrix, checksums: Checksums) -> None:
        """Encode packets of a plan into buffers. All rows must be in memory."""
        encode(self._kept.rows, self._kept.checksums, plan.offsets, plan.samples, packets, rows, checksums)

    def encoded(self, plan: Packets, leaving: NDArray[np.int64]) -> EncodedPackets:
        """Make a source whose items are these packets of a plan. It waits for all rows."""
        return EncodedPackets(self, plan, leaving)

    def wait(self) -> None:
        """Wait until all rows are in memory. Raise the error if reading fails; another call tries again."""
        for future in self._request_all():
            future.result()

    def _request_all(self) -> list[Future[Block]]:
        with self._lock:
            return [self._request(number) for number in range(self._n_resident)]

    def close(self) -> None:
        """Stop reading and drop all rows."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._resident.clear()
        self._moving.clear()
        self._kept.close()

    def _block(self, number: int) -> Block:
        with self._lock:
            future = self._request(number)
            if number + 1 < self._n_blocks:
                self._request(number + 1)
        return future.result()

    def _request(self, number: int) -> Future[Block]:
        resident = number < self._n_resident
        blocks: dict[int, Future[Block]] = self._resident if resident else self._moving
        future = blocks.get(number)
        if future is None or (future.done() and future.exception() is not None):
            future = blocks[number] = self._reader.submit(self._read, number)
        if not resident:
            self._moving.move_to_end(number)
            while len(self._moving) > self._n_moving:
                self._moving.popitem(last=False)
        return future

    def _read(self, number: int) -> Block:
        first = number * self._block_rows
        last = min(first + self._block_rows, self._dataset.n_samples)
        sample_ids = np.arange(first, last, dtype=np.int64)
        resident = number < self._n_resident
        rows = self._kept.rows[first:last] if resident else self._layout.empty(last - first)
        self._dataset.read_into(rows, np.arange(last - first, dtype=np.int64), sample_ids)
        self._dataset.check_unchanged()
        checksums = checksum_rows(rows, sample_ids)
        if resident:
            self._kept.checksums[first:last] = checksums
        return Block(rows, checksums)

    def _block_in_memory(self, number: int) -> Block:
        part = slice(number * self._block_rows, (number + 1) * self._block_rows)
        return Block(self._kept.rows[part], self._kept.checksums[part])


class EncodedPackets:
    """The packets that the server sends in a run: a :class:`~dshuffle.exchange.endpoints.RowSource`.

    The constructor waits for all rows, so that encoding does not have to wait.

    Parameters
    ----------
    server_rows
        All rows of the dataset.
    plan, leaving
        The plan, and the packet of each item that is sent.
    """

    def __init__(self, server_rows: ServerRows, plan: Packets, leaving: NDArray[np.int64]) -> None:
        server_rows.wait()
        self._server_rows = server_rows
        self._plan = plan
        self._leaving = leaving

    def pack(self, first: int, last: int, rows: ByteMatrix, checksums: Checksums) -> None:
        """Encode packets into buffers."""
        self._server_rows.encode(self._plan, self._leaving[first:last], rows, checksums)
