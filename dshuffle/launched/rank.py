"""One rank of a job: an event loop in a thread with its Dask worker, and on rank 0 with the scheduler of the job.

The ranks of a job talk through the streams that Dask has between each worker and its scheduler. Rank 0's scheduler
knows which ranks are there, where they meet, and whether one has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Container, Iterator, Sequence
from typing import Any, TypeVar

import dask
from distributed import Scheduler, Worker
from distributed.comm.addressing import get_address_host, unparse_host_port
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.system import MEMORY_LIMIT
from distributed.utils import LoopRunner, silence_logging_cmgr, sync

# Imported here, in the thread of the script: an import in the event loop would hold up all that the worker does.
import dshuffle.runtime.scheduler.scheduler_plugin
import dshuffle.runtime.worker.worker_plugin  # noqa: F401
from dshuffle.errors import ClusterError, DShuffleError, InvalidParameter, PeerFailed, WorkerLost
from dshuffle.launched.connections import LOG_AFTER, Place, find_port, hosts_of, job_scheme, port_of
from dshuffle.redaction import short_repr

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_WITHIN, FAIL_WITHIN = 5.0, 1.0
"""Seconds that a worker or a scheduler has to close, and what is left of them after a failure."""

LOOK = 0.2
"""Seconds between two looks at the connection to rank 0 while a rank waits."""

SAYS, HEARS, MARK = "dshuffle_rank_says", "dshuffle_rank_hears", "dshuffle_mark"
"""What a rank tells rank 0's scheduler, what it hears from there, and the request to note what was trained on."""

DASK_SETTINGS = {
    # Dask would pause a worker whose process has much memory. Here it is mostly the memory of the script.
    "distributed.worker.memory.pause": False,
    # What Dask's dashboard shows takes a twentieth of the interpreter's time from the loop, and there is no dashboard.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1s",
}
"""Dask's configuration of the scheduler and the worker in the process of a script."""

_CONFIGURING = threading.Lock()
"""The configuration is that of the process, and a process may have several ranks."""


ALIKE = "All ranks must ask for the same, go through the same epochs, and leave them at the same batch"


class Job(SchedulerPlugin):
    """The ranks of a job, on the event loop of rank 0's scheduler.

    Before each step, the ranks meet: rank 0 is told when all of them have come to the same one, and the others get what
    rank 0 answers then.
    """

    name = "dshuffle-job"

    def __init__(self, scheduler: Scheduler, world_size: int) -> None:
        self.scheduler, self.world_size = scheduler, world_size
        self.steps: dict[int, str] = {}  # of the ranks that have come
        self.empty = asyncio.Event()
        """Set when the workers of all ranks have gone."""
        self._ranks: dict[str, int] = {}  # by address of the worker
        self._failure: tuple[Any, ...] = ()  # whether a rank was lost, why the job fails, and whether that may pass
        self._ended = False
        scheduler.stream_handlers[SAYS] = self.hear
        scheduler.add_plugin(self, name=self.name)

    @property
    def absent(self) -> str:
        """Ranks for which the others wait."""
        return short_repr(sorted(set(range(self.world_size)) - self.steps.keys()))

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """A rank has come."""
        self._ranks[worker] = int(str(scheduler.workers[worker].name))

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        """A rank has gone."""
        rank, host = self._ranks.pop(worker, None), get_address_host(worker)
        self._fail(True, f"rank {rank} of {self.world_size} was lost: its process on {host} has ended", True)
        if not self._ranks:
            self.empty.set()

    def hear(
        self,
        worker: str,
        rank: int,
        failed: str = "",
        transient: bool = True,
        step: str = "",
        early: Sequence[int] = (),
    ) -> None:
        """A rank has failed, or has come to a step, for which it may have left an epoch before its end."""
        if failed:
            self._fail(False, f"rank {rank} of {self.world_size} has failed: {failed}", transient)
        elif self._failure:
            self._tell([rank], failure=self._failure)
        else:
            first, its = next(iter(self.steps.items()), (rank, step))
            if its != step:
                self._fail(False, f"rank {first} {its}, and rank {rank} {step}. {ALIKE}", False)
            if early and not self.steps:
                self._tell(range(self.world_size), early=(*early, f"rank {rank} {step}"))
            self.steps[rank] = step
            if len(self.steps) == self.world_size:
                self._tell([0], answer=None)

    def answer(self, answer: Any) -> None:
        """Let the ranks go on that have met, with what rank 0 tells them."""
        self.steps = {}
        self._tell(range(1, self.world_size), answer=answer)

    def end(self) -> None:
        """From now on ranks may go, and come to the next job."""
        self._ended = True
        self.scheduler._stop_listeners()

    def _fail(self, *failure: Any) -> None:
        """Let all ranks fail. Only the first reason counts."""
        if not self._failure and not self._ended:
            self._failure = failure
            self._tell(range(self.world_size), failure=failure)

    def _tell(self, ranks: Container[int], **news: Any) -> None:
        for address, rank in self._ranks.items():
            if rank in ranks:
                self.scheduler.worker_send(address, {"op": HEARS, **news})


class Rank:
    """The Dask worker of this rank, and on rank 0 the scheduler of the job.

    Parameters
    ----------
    asked
        What the caller has asked for, which must be the same on all ranks.
    port
        Port on which rank 0 listens, if it is not derived from the job.
    timeout
        Seconds to wait for the other ranks at the start.
    """

    worker: Worker

    def __init__(self, place: Place, asked: str, port: int | None, timeout: float) -> None:
        self.place, self._timeout, self.pid = place, timeout, os.getpid()
        self.job: Job | None = None  # on rank 0
        self.batches: Any = None  # the EpochBatches that the loop has
        self.closed = False
        self._failure: DShuffleError | None = None
        self._early: Sequence[Any] = -1, 0, ""  # an epoch that a rank has left early, after how many batches; its step
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._runner = LoopRunner()
        self._runner.start()
        self.loop: Any = self._runner.loop
        self._on_close = contextlib.ExitStack()
        # Dask logs pages when a connection ends. What ends a job is raised in the script.
        self._on_close.enter_context(silence_logging_cmgr(logging.CRITICAL))
        try:
            port = self._on_close.enter_context(port_of(place, port))
            self.scheme = job_scheme(place, port)
            sync(self.loop, self._start, port)  # Ctrl-C cancels it
            self.meet(f"asks for {asked}", limit=timeout)
        except BaseException as error:
            self.tell(error)
            self.close(failed=True)
            raise

    # The thread of the script

    def meet(
        self, step: str, work: Callable[[], Any] = lambda: None, *, early: Sequence[int] = (), limit: float = math.inf
    ) -> Any:
        """Wait until all ranks have come to a step. Then rank 0 works, and all ranks get what that returns."""
        self.check()
        self._say(step=step, early=early)
        began, log_after = time.monotonic(), LOG_AFTER
        while True:
            with contextlib.suppress(queue.Empty):
                answer = self._answers.get(timeout=LOOK)
                break
            self.check()
            waited = time.monotonic() - began
            if self.job is not None and waited >= limit:
                raise ClusterError(
                    f"ranks {self.job.absent} of {self.place.world_size} have not come within {limit:g} s. Look at "
                    "their output: each must call dshuffle.spmd, and reach the host of rank 0"
                )
            if waited >= log_after:
                others = "the other ranks" if self.job is None else f"ranks {self.job.absent}"
                logger.warning("dshuffle: rank %d has waited %.0f s for %s", self.place.rank, waited, others)
                log_after = 2 * waited
        self.check()
        if self.job is not None:
            with self.errors():
                answer = work()
            self.loop.add_callback(self.job.answer, answer)
        return answer

    def check(self) -> None:
        """Raise an error if the job has failed, or is not that of this process."""
        if os.getpid() != self.pid:
            raise other_process()
        if self.closed:
            raise ClusterError("this loader is closed. Make a new one", transient=False)
        if self._failure is None and self.worker.status != Status.running:
            self._fail(WorkerLost("rank 0 was lost: the connection to its scheduler has ended"))
        if self._failure is not None:  # a new one each time, because a traceback holds the frames that it passed
            raise type(self._failure)(*self._failure.args, transient=self._failure.transient)

    def check_batch(self, epoch: int, n_trained: int) -> None:
        """Raise an error if the job has failed, or another rank has left the epoch before this batch."""
        self.check()
        number, n_batches, step = self._early
        if number == epoch and n_trained > n_batches:
            raise PeerFailed(f"{step}, and rank {self.place.rank} was given {n_trained}. {ALIKE}", transient=False)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Raise the reason for which the job has failed in place of what the session makes of it."""
        try:
            yield
        except (DShuffleError, OSError) as error:
            if getattr(error, "transient", True):
                with contextlib.suppress(queue.Empty):  # the end of the session may be known before its reason
                    self._answers.get(timeout=FAIL_WITHIN)
            try:
                self.check()
            except DShuffleError as failure:
                raise failure from error
            raise

    def mark_all(self, epoch: int, n_batches: int) -> None:
        """Let all ranks note how many batches of an epoch were trained on. For rank 0."""
        message = {"op": MARK, "epoch": epoch, "n_batches": n_batches}
        assert self.job is not None
        sync(self.loop, self.job.scheduler.broadcast, msg=message)

    def tell(self, error: BaseException) -> None:
        """Tell the job of an error."""
        self._say(failed=f"{type(error).__name__}: {error}", transient=getattr(error, "transient", True))

    def close(self, *, failed: bool) -> None:
        """Close everything. Takes seconds at most."""
        self.closed = True
        with self._on_close:
            seconds = FAIL_WITHIN if failed else CLOSE_WITHIN
            try:
                sync(self.loop, self._close, seconds)
            finally:
                with contextlib.suppress(TimeoutError):  # of a server that has not closed, or a thread that is busy
                    self._runner.stop(seconds)

    def _say(self, **message: Any) -> None:
        if hasattr(self, "worker"):
            self.loop.add_callback(self.worker.batched_send, {"op": SAYS, "rank": self.place.rank, **message})

    # The event loop

    async def _start(self, port: int) -> None:
        place, scheme = self.place, self.scheme
        host, rank_0 = hosts_of(place)
        # Dask starts HTTP servers without a dashboard, too, and without TLS.
        options: dict[str, Any] = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
        options |= {"host": host, "protocol": scheme}
        if place.rank == 0:
            await find_port(place, scheme, host, port, 0.0)
            scheduler = _configured(Scheduler, port=port, **options)
            self.job = Job(scheduler, place.world_size)  # before it listens, because other ranks come at once
            await scheduler
            rank_0, port = host, scheduler.port
        else:
            await find_port(place, scheme, rank_0, port, self._timeout)
        options |= {"memory_limit": MEMORY_LIMIT // max(1, place.local_size), "death_timeout": self._timeout}
        address = f"{scheme}://{unparse_host_port(rank_0, port)}"
        worker = _configured(Worker, address, nthreads=1, name=str(place.rank), **options)
        worker.stream_handlers[HEARS], worker.handlers[MARK] = self._hear, self._mark
        self.worker = worker
        await worker

    def _hear(self, answer: Any = None, early: Sequence[Any] = (), failure: Sequence[Any] = ()) -> None:
        if failure:
            lost, text, transient = failure
            self._fail((WorkerLost if lost else PeerFailed)(text, transient=transient))
        elif not early:
            self._answers.put(answer)
        else:
            self._early = early
            try:
                if self.batches is not None:
                    self.check_batch(self.batches.number, self.batches.n_trained)
            except DShuffleError as error:  # the loop may be in a collective operation
                self._say(failed=str(error), transient=False)
                self._fail(error)

    def _fail(self, failure: DShuffleError) -> None:
        self._failure = self._failure or failure
        self._answers.put(None)

    def _mark(self, epoch: int, n_batches: int) -> None:
        batches = self.batches
        if batches is None or batches.number != epoch or n_batches > batches.n_trained:
            raise ClusterError(
                f"rank {self.place.rank} was not given {n_batches} batches of epoch {epoch}, and rank 0 was. Take a "
                "state at the same batch on all ranks",
                transient=False,
            )
        batches.mark(n_batches)

    async def _close(self, seconds: float) -> None:
        if hasattr(self, "worker"):
            await _quietly(self.worker.close(timeout=seconds, executor_wait=False, nanny=False), seconds)
        if self.job is not None:  # the others may not have heard of the end yet
            await _quietly(self.job.empty.wait(), seconds)
            await _quietly(self.job.scheduler.close(), seconds)


def _configured(server: Callable[..., T], *arguments: Any, **options: Any) -> T:
    with _CONFIGURING, dask.config.set(DASK_SETTINGS):
        return server(*arguments, **options)


async def _quietly(closing: Awaitable[Any], seconds: float) -> None:
    """Wait for something that ends. An error here must not hide the reason for which the job ends."""
    with contextlib.suppress(Exception):  # Dask raises RuntimeError if it closes a connection twice
        await asyncio.wait_for(closing, seconds)


def other_process() -> InvalidParameter:
    """The error of a process that is not the rank, such as a loader process of PyTorch."""
    hint = "The rows are in the memory of the rank's own process: a DataLoader around them needs num_workers=0."
    return InvalidParameter.because("num_workers", "the loader of dshuffle.spmd belongs to another process", hint)
