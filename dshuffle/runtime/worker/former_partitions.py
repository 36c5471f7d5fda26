"""Read a worker's first partition from the partitions of a former session, or of the worker that had the rank before.

Whoever has a sample sends its row, with the checksum from when it was read. What cannot be had in this way is read from
the dataset, so nothing depends on the former partitions.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
from distributed import Worker
from numpy.typing import NDArray

from dshuffle.errors import DShuffleError, ExchangeError
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.comms import request_rows
from dshuffle.exchange.endpoints import Meter
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.messages import rows_per_message
from dshuffle.exchange.receiver import check_arrays
from dshuffle.planning import name_of
from dshuffle.planning.grouping import group_by
from dshuffle.planning.remainder import workers_of
from dshuffle.runtime.dataset_inputs import with_data
from dshuffle.runtime.replies import Reply, unwrap, within
from dshuffle.runtime.session_spec import Former, Settings
from dshuffle.store import Dataset

logger = logging.getLogger(__name__)

LOOK_EVERY = 0.5
"""Seconds between looks at whether the rows are still wanted."""

RowsHere = Callable[[str, int, NDArray[np.int64]], Awaitable[Reply]]
"""Returns rows of a session on this worker: its id, the epoch, and the samples."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Rows of one message: the rank that holds them, and their places among the samples that are wanted."""

    rank: int
    places: NDArray[np.int64]


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
        former: Former,
        dataset: Dataset,
        settings: Settings,
        jobs: JobQueue,
        rows_here: RowsHere,
    ) -> None:
        self._worker = worker
        self._former = former
        self._dataset = dataset
        self._settings = settings
        self._jobs = jobs
        self._rows_here = rows_here

    async def read_into(
        self,
        cache: CachePartition,
        meter: Meter,
        sample_ids: NDArray[np.int64],
        slots: NDArray[np.int64],
        stop: Callable[[], bool],
    ) -> NDArray[np.int64]:
        """Read rows into reserved slots of a cache.

        Returns
        -------
        ndarray of int64
            Places of the samples that no former partition could send.
        """
        requests = await self._jobs.run(self._requests, sample_ids)
        left = np.ones(len(sample_ids), np.bool_)

        async def read(request: Request) -> None:
            places = request.places
            reply = await self._ask(request.rank, sample_ids[places], stop)
            rows, checksums = reply["rows"], reply["checksums"]
            await self._jobs.run(cache.unpack, sample_ids[places], slots[places], rows, checksums, nbytes=rows.nbytes)
            left[places] = False
            meter.received_bytes += 0 if self._is_here(request.rank) else rows.nbytes + checksums.nbytes

        await self._read_all(requests, read, stop)
        return np.flatnonzero(left)

    def _requests(self, sample_ids: NDArray[np.int64]) -> list[Request]:
        """Cut the samples into messages, one from each holder in turn."""
        former, settings = self._former, self._settings
        holders = sorted(former.holders)
        if former.shuffle is None:
            [rank] = holders
            places = {rank: np.arange(len(sample_ids))}
        else:
            ranks = workers_of(with_data(former.shuffle, self._dataset), former.epoch, sample_ids)
            order, offsets = group_by(ranks, former.shuffle.n_workers)
            places = {rank: order[offsets[rank] : offsets[rank + 1]] for rank in holders}
        at_most = rows_per_message(self._dataset.row_nbytes, settings.message_bytes)
        # Every worker begins with itself, or somewhere else, so that not all of them ask the same one first.
        somewhere = zlib.crc32(self._worker.address.encode()) % max(1, len(holders))
        first = next((place for place, rank in enumerate(holders) if self._is_here(rank)), somewhere)
        holders = holders[first:] + holders[:first]
        waiting = [deque(_cut(places[rank], at_most)) for rank in holders]
        found: list[Request] = []
        while any(waiting):
            found += [Request(rank, each.popleft()) for rank, each in zip(holders, waiting, strict=True) if each]
        return found

    def _is_here(self, rank: int) -> bool:
        return self._former.holders[rank][0] == self._worker.address

    async def _read_all(
        self, requests: list[Request], read: Callable[[Request], Awaitable[None]], stop: Callable[[], bool]
    ) -> None:
        """Read the rows of all requests, a window of them at a time. A holder that fails once is not asked again."""
        waiting, unable = deque(requests), set[int]()

        async def take() -> None:
            while waiting and not stop():
                request = waiting.popleft()
                if request.rank in unable:
                    continue
                try:
                    await read(request)
                except (OSError, DShuffleError) as error:
                    unable.add(request.rank)
                    reason = f"{type(error).__name__}: {error}"
                    logger.warning("dshuffle: rows of %s are read from the dataset (%s)", name_of(request.rank), reason)

        ended = await asyncio.gather(*(take() for _ in range(max(1, self._settings.window))), return_exceptions=True)
        for error in ended:  # raised when nobody writes to the slots any more
            if error is not None:
                raise error

    async def _ask(self, rank: int, sample_ids: NDArray[np.int64], stop: Callable[[], bool]) -> Reply:
        """Request rows of a rank. Ends soon after ``stop`` returns true."""
        former, (address, session_id) = self._former, self._former.holders[rank]
        if self._is_here(rank):
            return await self._rows_here(session_id, former.epoch, sample_ids)
        request = request_rows(self._worker, address, session_id, former.epoch, sample_ids)
        asking = asyncio.ensure_future(within(self._settings.timeout, request))
        try:
            while not asking.done():
                if stop():
                    raise ExchangeError("the rows are no longer wanted")
                await asyncio.wait([asking], timeout=LOOK_EVERY)
        finally:
            asking.cancel()
        reply = unwrap(asking.result(), address)
        check_arrays(reply)
        return reply


def _cut(places: NDArray[np.int64], at_most: int) -> list[NDArray[np.int64]]:
    return [places[first : first + at_most] for first in range(0, len(places), at_most)]
