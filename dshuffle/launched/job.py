"""The job as rank 0's scheduler knows it: which ranks are there, which have left, and whether one has failed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.serialize import ToPickle

from dshuffle.errors import ClusterError, DShuffleError, InvalidParameter, PeerFailed, WorkerLost
from dshuffle.launched.launcher import Place
from dshuffle.launched.mailbox import LOG_AFTER
from dshuffle.launched.ports import HELLO, job_key
from dshuffle.runtime.replies import replying

logger = logging.getLogger(__name__)

POST = "dshuffle_post"
"""Stream message to a worker: a method of its mailbox, and the arguments."""

FAILED, LEFT = "dshuffle_rank_failed", "dshuffle_rank_left"
"""Stream messages of a worker to the scheduler."""

STAY = "dshuffle_stay"
"""Request of a worker to the scheduler that is answered when the job has ended."""

NAME = "dshuffle-job"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the loop of a rank has come.

    Parameters
    ----------
    epoch
        The last epoch that the loop got; -1 before the first one.
    is_complete
        Whether the epoch counts as trained on: the loop was given all of its batches, or has ended it.
    is_ended
        Whether the loop has asked for the next epoch after it.
    """

    epoch: int = -1
    is_complete: bool = True
    is_ended: bool = True

    def is_behind(self, other: Progress) -> bool:
        """Whether another rank counts an epoch as trained on, or has begun one, that this rank does not.

        Examples
        --------
        >>> Progress(0, is_complete=True, is_ended=True).is_behind(Progress(1, is_complete=False, is_ended=False))
        True
        >>> Progress(1, is_complete=True, is_ended=False).is_behind(Progress(1, is_complete=True, is_ended=True))
        False
        """
        return (self.epoch, self.is_complete) < (other.epoch, other.is_complete)

    def has_ended_more_than(self, other: Progress) -> bool:
        """Whether this rank got a later epoch than another rank, or has ended an epoch that the other has not."""
        return self.epoch > other.epoch or (self.epoch == other.epoch and self.is_ended and not other.is_complete)

    def __str__(self) -> str:
        if self.epoch < 0:
            return "before the first epoch"
        return f"after epoch {self.epoch}" if self.is_complete else f"in the middle of epoch {self.epoch}"


def rank_failed(rank: int, world_size: int, reason: str) -> PeerFailed:
    """The error of a rank that has failed, for the other ranks."""
    return PeerFailed(f"rank {rank} of {world_size} has failed: {reason}")


class Job(SchedulerPlugin):
    """The ranks of a job. All of it runs on the event loop of rank 0's scheduler.

    Parameters
    ----------
    scheduler
        The scheduler.
    place
        The place of rank 0.
    ports
        Ports of the job.
    """

    name = NAME

    def __init__(self, scheduler: Scheduler, place: Place, ports: Sequence[int]) -> None:
        self.world_size = place.world_size
        self.failure: DShuffleError | None = None
        self.on_failure: Callable[[], None] | None = None
        """Called in a thread if the job fails."""
        self._scheduler = scheduler
        self._key = job_key(place, ports)
        self._addresses: dict[int, str] = {}  # of the ranks that are there
        self._all_joined, self._all_left = asyncio.Event(), asyncio.Event()
        self._failed, self._ended = asyncio.Event(), asyncio.Event()
        self._left: dict[int, Progress] = {}
        self._progress = Progress()  # of rank 0
        self._rank_0_left = self._is_released = False
        scheduler.handlers |= {HELLO: replying(HELLO, self._hello), STAY: self._ended.wait}
        scheduler.stream_handlers |= {FAILED: self.rank_failed, LEFT: self._rank_left}
        scheduler.add_plugin(self, name=NAME)

    # Events

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """A rank has come."""
        rank = int(str(scheduler.workers[worker].name))
        self._addresses[rank] = worker
        if self.failure is not None:
            self._post([worker], "post_failure", ToPickle(self.failure))
        if len(self._addresses) == self.world_size:
            self._all_joined.set()

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """A rank has gone."""
        for rank, address in list(self._addresses.items()):
            if address == worker:
                del self._addresses[rank]
                if not self._ended.is_set():
                    host = worker.partition("://")[2].rpartition(":")[0]
                    self.fail(WorkerLost(f"rank {rank} of {self.world_size} was lost: its process on {host} has ended"))

    def _hello(self, key: str, rank: int, world_size: int) -> bool:
        """Say whether this is the scheduler of a job.

        Raises
        ------
        InvalidParameter
            If it is, and the rank cannot be one of it.
        """
        if key != self._key:
            return False
        if world_size != self.world_size:
            raise InvalidParameter.of("world_size", world_size, f"{self.world_size}, as on rank 0")
        if rank in self._addresses:
            hint = "Two processes have the same rank, or two jobs the same port."
            raise InvalidParameter.of("rank", rank, "another one on each process of the job", hint)
        return True

    def rank_failed(self, rank: int, reason: str, worker: str = "") -> None:
        """A rank has failed."""
        self.fail(rank_failed(rank, self.world_size, reason))

    def task_failed(self, worker: str, reason: str) -> None:
        """The task of a worker has failed. The session has an order of its own of the workers, so an address says which
        rank it is. If the worker is gone, the job has failed already.
        """
        for rank, address in list(self._addresses.items()):
            if address == worker:
                self.rank_failed(rank, reason)

    def _rank_left(self, rank: int, epoch: int, is_complete: bool, is_ended: bool, worker: str = "") -> None:
        self._left[rank] = Progress(epoch, is_complete, is_ended)
        self._check_left()
        if self._is_released and self.failure is None:
            self._post([self._addresses[rank]], "post_release")
        if len(self._left) == self.world_size:
            self._all_left.set()

    # Rank 0

    async def wait_until_joined(self, seconds: float) -> None:
        """Wait for all ranks.

        Raises
        ------
        ClusterError
            If they do not all come in time.
        """
        began, pause = time.monotonic(), LOG_AFTER
        while not (self._all_joined.is_set() or self._failed.is_set()):
            waited = time.monotonic() - began
            if waited >= seconds:
                raise ClusterError(
                    f"{self.world_size - len(self._addresses)} of {self.world_size} ranks have not come within "
                    f"{seconds:g} s: {self._absent()}. Look at their output: every rank must call dshuffle.spmd, and "
                    "reach the host of rank 0"
                )
            if waited >= LOG_AFTER:
                logger.warning("dshuffle: rank 0 has waited %.0f s for ranks %s", waited, self._absent())
            await self._first([self._all_joined, self._failed], min(pause, seconds - waited))
            pause *= 2

    def _absent(self) -> str:
        absent = sorted(set(range(self.world_size)) - self._addresses.keys())
        return ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")

    async def wait_until_left(self, seconds: float) -> bool:
        """Wait until all ranks have left their loops, or the job has failed; whether that is so."""
        await self._first([self._all_left, self._failed], seconds)
        return self._all_left.is_set() or self._failed.is_set()

    @property
    def present(self) -> list[int]:
        """Ranks that have not left their loops."""
        return sorted(set(range(self.world_size)) - self._left.keys())

    def begin(self, epoch: int) -> None:
        """The loop of rank 0 gets an epoch, in which all ranks must take part."""
        self._progress, self._is_released = Progress(epoch, is_complete=False, is_ended=False), False
        self._check_left()

    def end_epoch(self, epoch: int) -> None:
        """Rank 0 ends its last epoch, which counts as trained on."""
        self._progress = Progress(epoch)
        self._check_left()
        self.release()

    def release(self) -> None:
        """Let ranks that have left give their partitions back."""
        if self.failure is None:
            self._is_released = True
            self._post([self._addresses[rank] for rank in self._left if rank in self._addresses], "post_release")

    def open(self, next_epoch: int, is_rest: bool, attached: bytes) -> None:
        """The session is open."""
        self._post(self._addresses.values(), "post_opened", next_epoch, is_rest, attached)

    def leave(self, last_epoch: int, progress: Progress) -> None:
        """Rank 0 begins no other epoch."""
        self._progress, self._rank_0_left = progress, True
        self._check_left()
        self._post(self._addresses.values(), "post_rank_0_left", last_epoch)

    def end(self) -> None:
        """The session is closed. From now on ranks may go."""
        self._ended.set()
        self._post(self._addresses.values(), "post_end")

    def fail(self, failure: DShuffleError) -> None:
        """Let all ranks fail. Only the first reason counts."""
        if self.failure is None and not self._ended.is_set():
            self.failure = failure
            self._failed.set()
            if self.on_failure is not None:
                asyncio.get_running_loop().run_in_executor(None, self.on_failure)
            self._post(self._addresses.values(), "post_failure", ToPickle(failure))

    def _check_left(self) -> None:
        """Let the job fail if a rank has left its loop before another one that trains on."""
        own = self._progress
        for rank, left in sorted(self._left.items()):
            if left.is_behind(own):
                does = f"has ended {'it' if left.epoch == own.epoch else f'epoch {own.epoch}'}"
                self._fail_apart(rank, left, 0, does if own.is_complete else f"trains on epoch {own.epoch}")
            elif self._rank_0_left and left.has_ended_more_than(own):
                does = f"has ended {'it' if left.epoch == own.epoch else f'epoch {left.epoch}'}"
                self._fail_apart(0, own, rank, does if left.is_complete else f"has trained on epoch {left.epoch}")

    def _fail_apart(self, rank: int, left: Progress, other: int, does: str) -> None:
        self.fail(
            PeerFailed(
                f"rank {rank} of {self.world_size} has left its loop {left}, and rank {other} {does}. "
                "All ranks must go through the same epochs, and leave them at the same batch",
                transient=False,
            )
        )

    def _post(self, addresses: Any, method: str, *arguments: Any) -> None:
        for address in list(addresses):
            if address in self._scheduler.stream_comms:
                self._scheduler.worker_send(address, {"op": POST, "method": method, "arguments": list(arguments)})

    @staticmethod
    async def _first(events: Sequence[asyncio.Event], seconds: float) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
