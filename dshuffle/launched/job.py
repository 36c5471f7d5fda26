"""The job as rank 0's scheduler knows it: which ranks are there, which have left, and whether one has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.serialize import ToPickle

from dshuffle.errors import ClusterError, DShuffleError, InvalidParameter, PeerFailed, WorkerLost
from dshuffle.launched.launcher import Place
from dshuffle.launched.ports import HELLO, job_key
from dshuffle.runtime.replies import replying

POST = "dshuffle_post"
"""Stream message to a worker: a method of its mailbox, and the arguments."""

FAILED, LEFT = "dshuffle_rank_failed", "dshuffle_rank_left"
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
        self._left: set[int] = set()
        self._next_epoch: int | None = None  # rank 0 waits to begin it
        self._is_ending_epoch = False
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

    def _rank_left(self, rank: int, worker: str = "") -> None:
        self._left.add(rank)
        self._check_next(rank)
        if self._is_ending_epoch:
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
        await self._first([self._all_joined, self._failed], seconds)
        if not self._all_joined.is_set() and self.failure is None:
            missing = sorted(set(range(self.world_size)) - self._addresses.keys())
            names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            raise ClusterError(
                f"{len(missing)} of {self.world_size} ranks have not come within {seconds:g} s: {names}. Look at their "
                "output: every rank must call dshuffle.spmd, and reach the host of rank 0"
            )

    async def wait_until_left(self, seconds: float) -> bool:
        """Wait until all ranks have left their loops, or the job has failed; whether that is so."""
        await self._first([self._all_left, self._failed], seconds)
        return self._all_left.is_set() or self._failed.is_set()

    @property
    def present(self) -> list[int]:
        """Ranks that have not left their loops."""
        return sorted(set(range(self.world_size)) - self._left)

    def begin(self, epoch: int) -> None:
        """Rank 0 waits to begin an epoch, in which all ranks must take part."""
        self._next_epoch, self._is_ending_epoch = epoch, False
        for rank in sorted(self._left):
            self._check_next(rank)

    def begun(self) -> None:
        """The epoch has begun. Ranks may leave when they have trained on it."""
        self._next_epoch = None

    def end_epoch(self) -> None:
        """Rank 0 ends its last epoch. Ranks that have left give their partitions back."""
        self._is_ending_epoch = True
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
                asyncio.get_running_loop().run_in_executor(None, self.on_failure)
            self._post(self._addresses.values(), "post_failure", ToPickle(failure))

    def _check_next(self, rank: int) -> None:
        if self._next_epoch is not None:
            self.fail(
                PeerFailed(
                    f"rank {rank} of {self.world_size} has left its loop, and rank 0 begins epoch {self._next_epoch}. "
                    "All ranks must go through the same epochs",
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
