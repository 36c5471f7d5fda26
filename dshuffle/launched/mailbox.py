"""What a rank's own thread, the thread of its Dask task and its event loop tell each other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from distributed import get_worker

from dshuffle.errors import ClusterError, DShuffleError, PeerFailed, WorkerLost
from dshuffle.runtime import Partition

logger = logging.getLogger(__name__)

LOG_AFTER = 3.0
"""Seconds after which a wait for other ranks says what it waits for; then after twice that time, and so on."""


@dataclass(frozen=True, slots=True)
class SessionStart:
    """What rank 0 says about the session that it has opened.

    Parameters
    ----------
    next_epoch
        Number of the first epoch.
    is_rest
        Whether another job has trained on a part of this epoch.
    attached
        Pickled states of the objects that were attached to the session that this one continues; empty without them.
    """

    next_epoch: int
    is_rest: bool
    attached: bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the loop of a rank has left an epoch. It must be the same on all ranks.

    Parameters
    ----------
    epoch
        The last epoch that the loop got; -1 before the first one.
    n_batches, n_all
        How many batches of how many it had.
    is_trained
        Whether the epoch counts as trained on: these are all batches, or the loop has asked for the next epoch.
    """

    epoch: int = -1
    n_batches: int = 0
    n_all: int = 0
    is_trained: bool = True

    def __str__(self) -> str:
        if self.epoch < 0:
            return "before the first epoch"
        count = f"{self.n_batches} of {self.n_all} batches"
        if not self.is_trained:
            return f"in the middle of epoch {self.epoch}, after {count}"
        return f"after epoch {self.epoch}" + (f", of which it had {count}" if self.n_batches < self.n_all else "")


def left_apart(rank: int, world_size: int, progress: Progress, other: int, does: str) -> PeerFailed:
    """The error of loops that do not go through the same batches."""
    return PeerFailed(
        f"rank {rank} of {world_size} has left its loop {progress}, and rank {other} {does}. "
        "All ranks must go through the same epochs, and leave them at the same batch",
        transient=False,
    )


class Batches(Protocol):
    """The batches of an epoch, as far as a mailbox knows them."""

    @property
    def n_trained(self) -> int:
        """Number of batches that count as trained on."""

    def mark(self, n_batches: int) -> None:
        """Note that the first batches were trained on."""


class Mailbox:
    """The messages for one rank. All methods may be called in any thread.

    Parameters
    ----------
    rank, world_size
        The rank, and the number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.opened: SessionStart | None = None
        self.ended = False
        self.failure: DShuffleError | None = None
        self.job_knows = False  # that it has failed
        self._changed = threading.Condition()
        self._partition: Partition | None = None
        self._is_released = False  # this rank has left, and the task of its last epoch need not wait
        self._batches: Batches | None = None  # of the partition
        self._limit: tuple[int, Progress] | None = None  # a rank has left an epoch early
        self._last_epoch: int | None = None  # rank 0 has left after this epoch

    # Messages

    def post_opened(self, next_epoch: int, is_rest: bool, attached: bytes) -> None:
        """Rank 0 has opened the session."""
        with self._changed:
            self.opened = SessionStart(next_epoch, is_rest, attached)
            self._changed.notify_all()

    def post_failure(self, failure: DShuffleError) -> None:
        """The job has failed. Only the first reason is kept."""
        self.job_knows = True
        self.fail(failure)

    def fail(self, failure: DShuffleError) -> None:
        """Let this rank fail. The job does not know it yet."""
        with self._changed:
            if self.failure is None and not self.ended:
                self.failure = failure
            self._changed.notify_all()

    def post_rank_0_left(self, last_epoch: int) -> None:
        """Rank 0 begins no other epoch."""
        with self._changed:
            self._last_epoch = last_epoch
            self._changed.notify_all()

    def post_limit(self, rank: int, *progress: Any) -> None:
        """A rank has left an epoch early. This rank fails if it has more batches of this epoch."""
        with self._changed:
            self._limit = rank, Progress(*progress)
            if self._partition is not None and self._batches is not None:
                self._check_limit(self._partition.epoch, self._batches.n_trained)

    def post_release(self) -> None:
        """The last epoch ends, although this rank has not said so."""
        with self._changed:
            self._is_released, self._partition, self._batches = True, None, None
            self._changed.notify_all()

    def post_end(self) -> None:
        """The session is closed, and all ranks may leave."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    # The task

    def hold(self, partition: Partition) -> None:
        """Hand a partition to the rank's own thread, and wait until that gives it back."""
        with self._changed:
            self.check()
            if self._is_released:
                return
            self._partition = partition
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._partition is not partition or self.failure is not None)
            if self._partition is partition:
                self._partition = self._batches = None
                self.check()

    # The rank's own thread

    def wait_opened(self) -> SessionStart:
        """Wait until rank 0 has opened the session."""
        self.wait(lambda: self.opened is not None or self._last_epoch is not None, "for rank 0 to open the session")
        if self.opened is None:
            raise ClusterError(
                f"rank {self.rank} waits for rank 0 to open the session, and rank 0 has left its loop. All ranks must "
                "go through the same epochs",
                transient=False,
            )
        return self.opened

    def take(self, epoch: int) -> Partition:
        """Wait for the partition of an epoch."""

        def there() -> bool:
            return self._partition is not None or (self._last_epoch is not None and self._last_epoch < epoch)

        self.wait(there, f"for the partition of epoch {epoch}")
        with self._changed:
            if self._partition is None:
                raise ClusterError(
                    f"rank {self.rank} waits for epoch {epoch}, and rank 0 has left its loop after epoch "
                    f"{self._last_epoch}. All ranks must go through the same epochs",
                    transient=False,
                )
            if self._partition.epoch != epoch:
                raise ClusterError(
                    f"rank {self.rank} waits for epoch {epoch}, and rank 0 has begun epoch {self._partition.epoch}",
                    transient=False,
                )
            return self._partition

    def set_batches(self, batches: Batches) -> None:
        """Set the batches of the partition."""
        with self._changed:
            self._batches = batches

    def give_back(self) -> None:
        """End the task that holds the partition, if there is one."""
        with self._changed:
            self._partition = self._batches = None
            self._changed.notify_all()

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until something is so, and say from time to time what this rank waits for."""
        began, pause = time.monotonic(), LOG_AFTER
        with self._changed:
            while not self._changed.wait_for(lambda: ready() or self.failure is not None, timeout=pause):
                logger.warning("dshuffle: rank %d waits %s, for %.0f s", self.rank, what, time.monotonic() - began)
                pause *= 2
        self.check()

    def check(self) -> None:
        """Raise an error if the job has failed."""
        if self.failure is not None:  # a new one each time, because a traceback holds the frames that it passed
            raise type(self.failure)(*self.failure.args, transient=self.failure.transient)

    def check_batch(self, epoch: int, n_trained: int) -> None:
        """Raise an error if the job has failed, or another rank has left the epoch before this batch."""
        with self._changed:
            self._check_limit(epoch, n_trained)
        self.check()

    def _check_limit(self, epoch: int, n_trained: int) -> None:
        if self._limit is not None and self._limit[1].epoch == epoch and n_trained > self._limit[1].n_batches:
            does = f"was given {n_trained}"
            self.fail(left_apart(self._limit[0], self.world_size, self._limit[1], self.rank, does))

    def mark(self, epoch: int, n_batches: int) -> None:
        """Note how many batches of the epoch count as trained on. For the worker's event loop."""
        with self._changed:
            is_current = self._partition is not None and self._partition.epoch == epoch
            if not is_current or n_batches > (0 if self._batches is None else self._batches.n_trained):
                raise ClusterError(
                    f"rank {self.rank} was not given {n_batches} batches of epoch {epoch}, and rank 0 was. Take a "
                    "state at the same batch on all ranks",
                    transient=False,
                )
            if self._batches is not None:
                self._batches.mark(n_batches)


MAILBOXES: dict[str, Mailbox] = {}
"""The mailboxes of this process, by address of the rank's Dask worker."""


def hold_partition(partition: Partition) -> None:
    """Hand a partition to the loop of this process; the task of an epoch."""
    address = get_worker().address
    if address not in MAILBOXES:
        raise WorkerLost(f"the process of worker {address} has left the job")
    MAILBOXES[address].hold(partition)


def mark_batches(epoch: int, n_batches: int, dask_worker: Any) -> str:
    """Note how many batches of an epoch this rank has trained on. Runs on each worker, outside of tasks."""
    mailbox = MAILBOXES.get(dask_worker.address)
    if mailbox is None:
        return f"the process of worker {dask_worker.address} has left the job"
    try:
        mailbox.mark(epoch, n_batches)
    except DShuffleError as error:
        return str(error)
    return ""
