"""Read a worker's first partition from the partitions of a former session, or of the worker that had the rank before.

The former session may still be open, or have kept its partitions on disks. The worker that holds a sample sends its
row, with the checksum from when the row was read. All other rows are read from the dataset, so nothing depends on the
former partitions.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

import numpy as np
from distributed import Worker
from numpy.typing import NDArray

from dshuffle.errors import DShuffleError, ExchangeError
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.comms import received, request_rows
from dshuffle.exchange.endpoints import Meter
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.messages import MIB, rows_per_message
from dshuffle.exchange.replies import RowsReply, rows_from_fields
from dshuffle.planning import ShuffleSpec, name_of
from dshuffle.planning.grouping import group_by
from dshuffle.planning.remainder import workers_of
from dshuffle.runtime.dataset_inputs import with_data
from dshuffle.runtime.replies import unwrap, within
from dshuffle.runtime.session_spec import PartitionSources
from dshuffle.runtime.settings import Settings
from dshuffle.store import Dataset

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 2 * MIB
"""Longest message. Many workers may ask the same holder, and all of them must be answered in time."""

SILENT_HEARTBEATS = 4
"""Heartbeats within which a holder must answer a request."""

LOOK_EVERY = 0.5
"""Seconds between looks at whether the rows are still wanted."""

IN_FLIGHT = 2
"""Messages that are requested from a holder at a time."""


class Metered(Protocol):
    """Whoever counts the bytes of the run that is under way."""

    @property
    def meter(self) -> Meter:
        """The bytes of this run."""


LocalRows = Callable[[str, int, NDArray[np.int64]], Awaitable[RowsReply]]
"""Returns rows of a session on this worker: its id, the epoch, and the samples."""


class FormerPartitions:
    """The former partitions, as one worker reads them.

    Parameters
    ----------
    worker
        Dask worker of this process.
    former
        Where the partitions are.
    dataset, settings
        Dataset and settings of the session.
    jobs
        Threads that unpack rows.
    rows_here
        Returns the rows of partitions on this worker.
    """

    def __init__(
        self,
        worker: Worker,
        former: PartitionSources,
        dataset: Dataset,
        settings: Settings,
        jobs: JobQueue,
        rows_here: LocalRows,
    ) -> None:
        self._worker = worker
        self._former = former
        self._dataset = dataset
        self._settings = settings
        self._jobs = jobs
        self._rows_here = rows_here
        self._window = asyncio.Semaphore(max(1, settings.window))
        self._unable: set[int] = set()  # holders that are not asked any more
        self._ranks_of: Callable[[NDArray[np.int64]], NDArray[np.int32]] | None = None
        self._looking_up = threading.Lock()

    async def read_into(
        self,
        cache: CachePartition,
        receiver: Metered,
        sample_ids: NDArray[np.int64],
        slots: NDArray[np.int64],
        stop: Callable[[], bool],
    ) -> NDArray[np.int64]:
        """Read rows into reserved slots of a cache, and count their bytes as the receiver's.

        Returns
        -------
        ndarray of int64
            Places of the samples that no former partition could send.
        """
        requests = await self._jobs.run(self._messages, sample_ids)
        left = np.ones(len(sample_ids), np.bool_)

        async def read(rank: int, places: NDArray[np.int64]) -> None:
            reply = await self._ask(rank, sample_ids[places], stop)
            rows, checksums, present = reply.rows, reply.checksums, reply.present
            if present is not None and not present.all():  # a kept partition may lack some
                places, rows, checksums = places[present], rows[present], checksums[present]
            await self._jobs.run(cache.unpack, sample_ids[places], slots[places], rows, checksums, nbytes=rows.nbytes)
            left[places] = False
            if not self._is_here(rank):
                receiver.meter.received_bytes += rows.nbytes + checksums.nbytes

        async def read_all(rank: int, messages: deque[NDArray[np.int64]]) -> None:
            while True:
                async with self._window:
                    if not messages or rank in self._unable or stop():
                        return
                    places = messages.popleft()
                    try:
                        await read(rank, places)
                    except (OSError, DShuffleError) as error:
                        if rank not in self._unable and not stop():
                            self._unable.add(rank)
                            reason = f"{type(error).__name__}: {error}"
                            logger.warning("dshuffle: rows of %s are read from the dataset (%s)", name_of(rank), reason)

        # No holder that hangs takes the whole window, and none packs many messages at a time.
        reading = [read_all(rank, messages) for _ in range(IN_FLIGHT) for rank, messages in requests.items()]
        for error in await asyncio.gather(*reading, return_exceptions=True):
            if error is not None:  # raised when nobody writes to the slots any more
                raise error
        return np.flatnonzero(left)

    def _messages(self, sample_ids: NDArray[np.int64]) -> dict[int, deque[NDArray[np.int64]]]:
        """Holder -> places of the samples of each message. Every worker has another order of holders."""
        former, settings = self._former, self._settings
        holders = sorted(former.holders)
        if former.shuffle is None:
            [rank] = holders
            places = {rank: np.arange(len(sample_ids))}
        else:
            ranks = self._look_up(former.shuffle)(sample_ids)
            order, offsets = group_by(ranks, former.shuffle.n_workers)
            places = {rank: order[offsets[rank] : offsets[rank + 1]] for rank in holders}
        at_most = rows_per_message(self._dataset.row_nbytes, min(MESSAGE_BYTES, settings.message_bytes))
        first = zlib.crc32(self._worker.address.encode()) % max(1, len(holders))
        return {rank: deque(_cut(places[rank], at_most)) for rank in (*holders[first:], *holders[:first])}

    def _look_up(self, shuffle: ShuffleSpec) -> Callable[[NDArray[np.int64]], NDArray[np.int32]]:
        """What tells the ranks of samples. If all of them have to be planned for that, this is done once."""
        with self._looking_up:
            if self._ranks_of is None:
                shuffle = with_data(shuffle, self._dataset)
                self._ranks_of = shuffle.ranks_at(self._former.epoch)
            if self._ranks_of is None:
                all_samples = np.arange(shuffle.n_samples)
                self._ranks_of = workers_of(shuffle, self._former.epoch, all_samples).__getitem__
            return self._ranks_of

    def _is_here(self, rank: int) -> bool:
        return self._former.holders[rank][0] == self._worker.address

    async def _ask(self, rank: int, sample_ids: NDArray[np.int64], stop: Callable[[], bool]) -> RowsReply:
        """Request rows of a rank. Ends soon after ``stop`` returns true."""
        former, (address, session_id) = self._former, self._former.holders[rank]
        if self._is_here(rank):
            return await self._rows_here(session_id, former.epoch, sample_ids)

        async def request() -> RowsReply:
            fields = unwrap(await request_rows(self._worker, address, session_id, former.epoch, sample_ids), address)
            return await received(self._worker, rows_from_fields(fields, address))

        limit = min(self._settings.timeout, SILENT_HEARTBEATS * self._settings.heartbeat)
        asking = asyncio.ensure_future(within(limit, request()))
        try:
            while not (await asyncio.wait([asking], timeout=LOOK_EVERY))[0]:
                if stop():
                    raise ExchangeError("reading was stopped: the run has ended")
        finally:
            asking.cancel()
        return asking.result()


def _cut(places: NDArray[np.int64], at_most: int) -> list[NDArray[np.int64]]:
    return [places[first : first + at_most] for first in range(0, len(places), at_most)]
