"""What a session has on one worker: its dataset, cache partition, and the ends of its exchanges."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.endpoints import Meter
from dshuffle.exchange.forwarder import Forwarder
from dshuffle.exchange.receiver import Receiver
from dshuffle.exchange.sender import Sender
from dshuffle.planning import Remainder, ShuffleSpec
from dshuffle.runtime.worker.epoch_lock import EpochLock
from dshuffle.runtime.worker.loading import Loader
from dshuffle.runtime.worker.plans import Plans
from dshuffle.runtime.worker.server_rows import ServerRows
from dshuffle.runtime.worker.store_reader import StoreReader
from dshuffle.store import Dataset


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Objects that only a worker that trains has, not a dedicated server."""

    rank: int
    cache: CachePartition
    receiver: Receiver
    lock: EpochLock
    forwarder: Forwarder | None = None

    @property
    def meters(self) -> list[Meter]:
        """What the receivers of the rank, and of its forwarder, have measured in a run."""
        return [self.receiver.meter] + ([] if self.forwarder is None else [self.forwarder.receiver.meter])

    async def close(self) -> None:
        """Stop receiving, and free the rows that no task uses."""
        await self.receiver.close()
        if self.forwarder is not None:
            await self.forwarder.close()
        self.lock.close()
        self.cache.close()


@dataclass(frozen=True, slots=True)
class MemberParts:
    """What the runs of a session on one worker share."""

    shuffle: ShuffleSpec
    start: Remainder
    deliveries: tuple[str, ...]
    dataset: Dataset
    plans: Plans
    senders: Mapping[int, Sender]
    training: TrainingState | None
    server_rows: ServerRows | None
    loads_server: bool
    loader: Loader
    reader: StoreReader

    async def close(self) -> None:
        """Free everything. Runs have ended, and so have the jobs that read or write rows."""
        for sender in self.senders.values():
            sender.close()
        self.reader.close()
        if self.training is not None:
            await self.training.close()
        if self.server_rows is not None:
            await asyncio.to_thread(self.server_rows.close)  # it waits for a read that is under way
        self.plans.close()
        self.dataset.close()
