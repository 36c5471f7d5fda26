"""Rows that a worker holds and that are corrupted in memory are read from the store again."""

from __future__ import annotations

import asyncio
import logging
import threading

from dshuffle.errors import DatasetError
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.store import Dataset

logger = logging.getLogger(__name__)


class Mending:
    """Verifies the rows of a partition, once in a run.

    Parameters
    ----------
    dataset
        From which corrupted rows are read.
    cache
        The partition; None on a worker that only serves.
    """

    def __init__(self, dataset: Dataset, cache: CachePartition | None) -> None:
        self.n_rows = 0
        self.stop = threading.Event()  # whether the run is ending, so that nobody reads from the store any more
        self._dataset = dataset
        self._cache = cache
        self._is_done = False
        self._lock = threading.Lock()

    def mend(self) -> int:
        """Verify all rows held here, once in a run, and read those that are corrupted from the store.

        Returns
        -------
        int
            Number of corrupted rows, whether or not they could be read again; 0 if the run is ending.
        """
        cache = self._cache
        if cache is None:
            return 0
        with self._lock:
            if self.stop.is_set():
                return 0
            if not self._is_done:
                samples, slots = cache.corrupted()
                self._is_done, self.n_rows = True, len(samples)
                if len(samples):
                    logger.warning("dshuffle: %d rows are corrupted in memory and are read again", len(samples))
                    try:
                        self._dataset.read_into(cache.rows, slots, samples, stop=self.stop.is_set)
                        self._dataset.check_unchanged()
                    except DatasetError:
                        logger.exception("dshuffle: corrupted rows could not be read again")
            return self.n_rows

    async def settle(self) -> None:
        """Return when no rows are being mended. Set ``stop`` before."""
        if self._lock.locked():
            await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        with self._lock:
            return
