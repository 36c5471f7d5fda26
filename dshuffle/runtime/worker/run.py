"""State of a run on one worker, and the objects of a worker that trains."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from dshuffle.exchange.cache_partition import CachePartition, Swap
from dshuffle.exchange.endpoints import Receiver
from dshuffle.runtime.measure.processors import ProcessorTimes
from dshuffle.runtime.worker.epoch_lock import EpochLock, View
from dshuffle.runtime.worker.member_exchange import MemberExchange


@dataclass(slots=True)
class Run:
    """State of one attempt at an epoch's exchange on this worker."""

    run_id: int
    epoch: int
    delivery: str
    rate: float | None = None
    exchange: MemberExchange | None = None
    prepared: asyncio.Future[tuple[Swap, View]] | None = None
    ends: list[asyncio.Future[Any]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    ready: bool = False
    processors: ProcessorTimes = field(default_factory=ProcessorTimes.now)
    started: float = field(default_factory=time.perf_counter)
    cpu_idle: float = 0.0
    watched_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Objects that only a worker that trains has, not a dedicated server."""

    cache: CachePartition
    receiver: Receiver
    lock: EpochLock
