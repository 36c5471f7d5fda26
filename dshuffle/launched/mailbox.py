"""What a rank's own thread, the thread of its Dask task and its event loop tell each other."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distributed import get_worker

from dshuffle.errors import ClusterError, DShuffleError, InvalidParameter, WorkerLost
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
class Terms:
    """What must be the same on all ranks."""

    batch_size: int
    mode: str


class Mailbox:
    """The messages for one rank. All methods may be called in any thread.

    Parameters
    ----------
    rank
        The rank.
    terms
        What this rank was called with.
    """

    def __init__(self, rank: int, terms: Terms) -> None:
        self.rank = rank
        self.opened: SessionStart | None = None
        self.ended = False
        self.failure: DShuffleError | None = None
        self.job_knows = False  # that it has failed
        self._terms = terms
        self._changed = threading.Condition()
        self._process = os.getpid()
        self._partition: Partition | None = None
        self._is_released = False  # this rank has left, and the task of its last epoch need not wait
        self._mark: Callable[[int], bool] | None = None
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

    def post_release(self) -> None:
        """The last epoch ends, although this rank has not said so."""
        with self._changed:
            self._is_released, self._partition, self._mark = True, None, None
            self._changed.notify_all()

    def post_end(self) -> None:
        """The session is closed, and all ranks may leave."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    # The task

    def hold(self, partition: Partition, terms: Terms) -> None:
        """Hand a partition to the rank's own thread, and wait until that gives it back.

        Raises
        ------
        InvalidParameter
            If this rank was called with something else than rank 0.
        DShuffleError
            If the job fails meanwhile. The task then counts as failed, because its epoch may not be trained on.
        """
        with self._changed:
            for name in ("batch_size", "mode"):
                own, other = getattr(self._terms, name), getattr(terms, name)
                if own != other:
                    self.fail(
                        InvalidParameter(
                            f"rank {self.rank} has {name}={own!r}, and rank 0 has {other!r}. All ranks must have "
                            "equally many batches: call dshuffle.spmd alike on all ranks"
                        )
                    )
            self.check()
            if self._is_released:
                return
            self._partition = partition
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._partition is not partition or self.failure is not None)
            if self._partition is partition:
                self._partition = self._mark = None
                self.check()

    # The rank's own thread

    def wait_opened(self) -> SessionStart:
        """Wait until rank 0 has opened the session.

        Raises
        ------
        DShuffleError
            If the job has failed.
        ClusterError
            If rank 0 has left its loop, and does not open it.
        """
        self.wait(lambda: self.opened is not None or self._last_epoch is not None, "for rank 0 to open the session")
        if self.opened is None:
            raise ClusterError(
                f"rank {self.rank} waits for rank 0 to open the session, and rank 0 has left its loop. All ranks must "
                "go through the same epochs",
                transient=False,
            )
        return self.opened

    def take(self, epoch: int) -> Partition:
        """Wait for the partition of an epoch.

        Parameters
        ----------
        epoch
            Number of the epoch.

        Raises
        ------
        DShuffleError
            If the job has failed.
        ClusterError
            If rank 0 does not begin this epoch.
        """

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

    def set_mark(self, mark: Callable[[int], bool]) -> None:
        """Set the function that notes how many batches of the partition count as trained on.

        It returns whether the loop was given that many.
        """
        with self._changed:
            self._mark = mark

    def give_back(self) -> None:
        """End the task that holds the partition, if there is one."""
        with self._changed:
            self._partition = self._mark = None
            self._changed.notify_all()

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until something is so, and say from time to time what this rank waits for.

        Raises
        ------
        DShuffleError
            If the job has failed.
        """
        began, pause = time.monotonic(), LOG_AFTER
        with self._changed:
            while not self._changed.wait_for(lambda: ready() or self.failure is not None, timeout=pause):
                logger.warning("dshuffle: rank %d waits %s, for %.0f s", self.rank, what, time.monotonic() - began)
                pause *= 2
        self.check()

    def check(self) -> None:
        """Raise an error if the job has failed, or this is a fork of the rank, which has no part in the job."""
        if os.getpid() != self._process:
            raise ClusterError(
                f"this loader works only in process {self._process}, which made it, and this is a process that was "
                "forked later. Pass arrays to it instead (num_workers=0)",
                transient=False,
            )
        if self.failure is not None:  # a new one each time, because a traceback holds the frames that it passed
            raise type(self.failure)(*self.failure.args, transient=self.failure.transient)

    def mark(self, epoch: int, n_batches: int) -> None:
        """Note how many batches of the epoch count as trained on. For the worker's event loop.

        Raises
        ------
        ClusterError
            If this rank is not there.
        """
        with self._changed:
            is_current = self._partition is not None and self._partition.epoch == epoch
            if not is_current or not (n_batches == 0 if self._mark is None else self._mark(n_batches)):
                raise ClusterError(
                    f"rank {self.rank} was not given {n_batches} batches of epoch {epoch}, and rank 0 was. Take a "
                    "state at the same batch on all ranks",
                    transient=False,
                )


MAILBOXES: dict[str, Mailbox] = {}
"""The mailboxes of this process, by address of the rank's Dask worker."""


def hold_partition(partition: Partition, terms: Terms) -> None:
    """Hand a partition to the loop of this process; the task of an epoch."""
    address = get_worker().address
    if address not in MAILBOXES:
        raise WorkerLost(f"the process of worker {address} has left the job")
    MAILBOXES[address].hold(partition, terms)


def mark_batches(epoch: int, n_batches: int, dask_worker: Any) -> str:
    """Note how many batches of an epoch this rank has trained on. Runs on each worker, outside of tasks.

    Returns
    -------
    str
        What is wrong; empty if nothing is.
    """
    mailbox = MAILBOXES.get(dask_worker.address)
    if mailbox is None:
        return f"the process of worker {dask_worker.address} has left the job"
    try:
        mailbox.mark(epoch, n_batches)
    except DShuffleError as error:
        return str(error)
    return ""
