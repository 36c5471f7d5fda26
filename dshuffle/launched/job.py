"""The job as rank 0's scheduler knows it: which ranks are there, which have left, and whether one has failed."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.serialize import ToPickle

from dshuffle.errors import ClusterError, DShuffleError, InvalidParameter, PeerFailed, WorkerLost
from dshuffle.launched.launcher import Place
from dshuffle.launched.mailbox import LOG_AFTER, Progress, left_apart
from dshuffle.launched.ports import HELLO, Terms, job_key
from dshuffle.runtime.messages import replying

logger = logging.getLogger(__name__)

POST = "dshuffle_post"
"""Stream message to a worker: a method of its mailbox, and the arguments."""

FAILED, PROGRESS = "dshuffle_rank_failed", "dshuffle_rank_progress"
"""Stream messages of a worker to the scheduler."""

STAY = "dshuffle_stay"
"""Request of a worker to the scheduler that is answered when the job has ended."""

NAME = "dshuffle-job"


def rank_failed(rank: int, world_size: int, reason: str) -> PeerFailed:
    """The error of a rank that has failed, for the other ranks."""
    return PeerFailed(f"rank {rank} of {world_size} has failed: {reason}")


class Job(SchedulerPlugin):
    """The ranks of a job. All of it runs on the event loop of rank 0's scheduler.

    Parameters
    ----------
    place
        The place of rank 0.
    terms
        What the caller of rank 0 has asked for.
    """

    name = NAME

    def __init__(self, scheduler: Scheduler, place: Place, ports: Sequence[int], terms: Terms) -> None:
        self.world_size = place.world_size
        self.failure: DShuffleError | None = None
        self.on_failure: Callable[[], None] | None = None
        """Called in a thread if the job fails."""
        self._scheduler = scheduler
        self._key, self._terms = job_key(place, ports), dict(terms)
        self._addresses: dict[int, str] = {}  # of the ranks that are there
        self._all_joined, self._all_left = asyncio.Event(), asyncio.Event()
        self._failed, self._ended = asyncio.Event(), asyncio.Event()
        self._left: dict[int, Progress] = {}
        self._reached = 0, Progress()  # rank that was the first one to leave the last epoch that any rank has left
        self._is_released = False
        self._begun = -1  # the epoch that rank 0 has begun
        scheduler.handlers |= {HELLO: replying(HELLO, self._hello), STAY: self._ended.wait}
        scheduler.stream_handlers |= {FAILED: self.rank_failed, PROGRESS: self.rank_progress}
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

    def _hello(self, key: str, rank: int, world_size: int, terms: Terms) -> bool:
        """Say whether this is the scheduler of a job."""
        if key != self._key or self._ended.is_set():
            return False
        if world_size != self.world_size:
            raise InvalidParameter.of("world_size", world_size, f"{self.world_size}, as on rank 0")
        if rank in self._addresses:
            hint = "Two processes have the same rank, or two jobs the same port."
            raise InvalidParameter.of("rank", rank, "another one on each process of the job", hint)
        for name, (own, shown) in self._terms.items():
            other, other_shown = terms.get(name, ("", "none"))
            if other != own:
                error = InvalidParameter(
                    f"rank {rank} has {name}={other_shown}, and rank 0 has {shown}. Call dshuffle.spmd alike on all "
                    "ranks"
                )
                self.rank_failed(rank, str(error))
                raise error
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

    def rank_progress(
        self,
        rank: int,
        epoch: int,
        n_batches: int,
        n_all: int,
        is_trained: bool,
        has_left: bool,
        worker: str = "",
    ) -> None:
        """The loop of a rank has ended an epoch, or has left the job."""
        progress = Progress(epoch, n_batches, n_all, is_trained)
        first, reached = self._reached
        if progress.epoch > reached.epoch:
            self._reached = rank, progress
            if n_batches < n_all:
                self._post(self._addresses.values(), "post_limit", rank, epoch, n_batches, n_all, is_trained)
        elif progress != reached:
            self.fail(left_apart(rank, self.world_size, progress, first, f"has left it {reached}"))
        if has_left:
            self._left[rank] = progress
            self._check_left()
            if self._is_released:
                self.release()
            if len(self._left) == self.world_size:
                self._all_left.set()

    # Rank 0

    async def wait_until_joined(self, seconds: float) -> None:
        """Wait for all ranks."""
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
        self._begun, self._is_released = epoch, False
        self._check_left()

    def release(self) -> None:
        """The epoch ends: ranks that have left, or leave now, give back what they hold."""
        self._is_released = True
        self._post([self._addresses[rank] for rank in self._left if rank in self._addresses], "post_release")

    def open(self, next_epoch: int, is_rest: bool, attached: bytes) -> None:
        """The session is open."""
        self._post(self._addresses.values(), "post_opened", next_epoch, is_rest, attached)

    def leave(self, last_epoch: int) -> None:
        """Rank 0 begins no other epoch."""
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
                # Not a thread that the process waits for: the client may wait for a scheduler that closes.
                threading.Thread(target=self.on_failure, daemon=True).start()
            self._post(self._addresses.values(), "post_failure", ToPickle(failure))

    def _check_left(self) -> None:
        """Let the job fail if a rank has left its loop, and rank 0 begins another epoch."""
        for rank, left in sorted(self._left.items()):
            if left.epoch < self._begun:
                self.fail(left_apart(rank, self.world_size, left, 0, f"trains on epoch {self._begun}"))

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
