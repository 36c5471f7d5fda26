"""One rank of a job: an event loop in a thread with its Dask worker, and on rank 0 with the scheduler of the job."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import dask
from distributed import Scheduler, Security, Worker
from distributed.comm.addressing import unparse_host_port
from distributed.system import MEMORY_LIMIT
from distributed.utils import LoopRunner, silence_logging_cmgr, sync

# Imported here, in the thread of the script: an import in the event loop would hold up all that the worker does.
import dshuffle.runtime.scheduler.scheduler_plugin
import dshuffle.runtime.worker.worker_plugin  # noqa: F401
from dshuffle.errors import ClusterError, DShuffleError, WorkerLost
from dshuffle.launched.job import FAILED, MEET, WATCH, Job, Step, apart
from dshuffle.launched.launcher import Place
from dshuffle.launched.ports import LOG_AFTER, Terms, find_scheduler, free_port, hosts_of, ports_of
from dshuffle.launched.secret import protection_of
from dshuffle.redaction import short_repr
from dshuffle.runtime.messages import replying, unwrap

logger = logging.getLogger(__name__)

CLOSE_WITHIN, FAIL_WITHIN = 5.0, 1.0
"""Seconds that a worker or a scheduler has to close, and what is left of them after a failure."""

MARK = "dshuffle_mark"
"""Request of rank 0 to all workers: note how many batches of an epoch were trained on."""

DASK_SETTINGS = {
    # Dask would pause a worker whose process has much memory. Here it is mostly the memory of the script.
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    # What Dask's dashboard shows takes a twentieth of the interpreter's time from the loop, and there is no dashboard.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1s",
}
"""Dask's configuration of the scheduler and the worker in the process of a script."""

_CONFIGURING = threading.Lock()
"""The configuration is that of the process, and a process may have several ranks."""


class Rank:
    """The Dask worker of this rank, and on rank 0 the scheduler of the job.

    Parameters
    ----------
    place
        The place of this process in its job.
    terms
        What the caller has asked for.
    port, interface
        Where rank 0 listens, as :func:`dshuffle.spmd` takes them.
    security, secret
        TLS certificates, and the secret of connections without TLS.
    timeout
        Seconds to wait for the other ranks at the start.
    """

    worker: Worker
    address: str
    """Address of the scheduler."""

    def __init__(
        self,
        place: Place,
        terms: Terms,
        *,
        port: int | None,
        interface: str | None,
        security: Security,
        secret: str | None,
        timeout: float,
    ) -> None:
        self.place = place
        self.job: Job | None = None  # on rank 0
        self.batches: Any = None  # the EpochBatches that the loop has
        self._terms, self._interface, self._timeout = terms, interface, timeout
        self.protected = protection_of(security, secret, one_host=place.on_one_host)
        self._failure: DShuffleError | None = None
        self._early = 0, Step("")  # a rank that has left an epoch early
        self._servers: list[Worker | Scheduler] = []
        self._watching: asyncio.Task[None] | None = None
        self._on_close = contextlib.ExitStack()
        ports = self._on_close.enter_context(ports_of(place, port)) if place.world_size > 1 else [0]
        # Dask logs pages when a connection ends. What ends a job is raised in the script.
        self._on_close.enter_context(silence_logging_cmgr(logging.CRITICAL))
        self._runner = LoopRunner()
        self._runner.start()
        try:
            self.run(self._start, ports)
            self.meet(Step("joins"))
        except BaseException as error:
            self.tell(error)
            self.close(failed=True)
            raise

    @property
    def loop(self) -> Any:
        """The event loop, as Dask takes it."""
        return self._runner.loop

    # The thread of the script

    def run(self, function: Callable[..., Awaitable[Any]], *arguments: Any, **options: Any) -> Any:
        """Run a coroutine on the event loop, and wait for it. Ctrl-C cancels it."""
        return sync(self.loop, function, *arguments, **options)

    def meet(self, step: Step, work: Callable[[], Any] = lambda: None) -> Any:
        """Wait until all ranks have come to a step. Then rank 0 works, and all ranks get what that returns."""
        self.check()
        answer = self.run(self._meet, step)
        if self.job is not None:
            answer = work()
            self.loop.add_callback(self.job.answer, answer)
        return answer

    def check(self) -> None:
        """Raise an error if the job has failed."""
        failure = self._failure or (self.job and self.job.failure)
        if failure:  # a new one each time, because a traceback holds the frames that it passed
            raise type(failure)(*failure.args, transient=failure.transient)

    def hear(self) -> None:
        """Raise the error of the job, if there is one. The end of the session may be known here before its reason."""
        if self.job is None and self._watching is not None:
            self.run(asyncio.wait, [self._watching], timeout=FAIL_WITHIN)
        self.check()

    def check_batch(self, epoch: int, n_trained: int) -> None:
        """Raise an error if the job has failed, or another rank has left the epoch before this batch."""
        self.check()
        rank, step = self._early
        if step.epoch == epoch and n_trained > step.n_batches:
            raise apart(rank, step, f"rank {self.place.rank} was given {n_trained}")

    def mark_all(self, epoch: int, n_batches: int) -> None:
        """Let all ranks note how many batches of an epoch were trained on. For rank 0."""
        assert self.job is not None
        message = {"op": MARK, "epoch": epoch, "n_batches": n_batches}
        for reply in self.run(self.job.scheduler.broadcast, msg=message).values():
            unwrap(reply, "a rank")

    def tell(self, error: BaseException) -> None:
        """Tell the job of an error, unless it has failed already."""
        if self._failure is None:
            self.run(_quietly, self._tell(f"{type(error).__name__}: {error}"), FAIL_WITHIN)

    def close(self, *, failed: bool) -> None:
        """Close everything. Takes seconds at most."""
        with self._on_close:
            seconds = FAIL_WITHIN if failed else CLOSE_WITHIN
            try:
                self.run(self._close, seconds)
            finally:
                with contextlib.suppress(TimeoutError):  # of a server that has not closed, or a thread that is busy
                    self._runner.stop(seconds)

    # The event loop

    async def _start(self, ports: Sequence[int]) -> None:
        place, protected = self.place, self.protected
        host, rank_0 = await hosts_of(place, self._interface)
        options: dict[str, Any] = {"host": host, "protocol": protected.protocol, "security": protected.security}
        # Dask starts HTTP servers without a dashboard, too, and without TLS.
        options |= {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
        if place.rank == 0:
            port = free_port(host, ports)
            with _CONFIGURING, dask.config.set(DASK_SETTINGS):
                scheduler = Scheduler(port=port, **options)
            self._servers.append(scheduler)
            self.job = Job(scheduler, place, ports, self._terms)  # before it listens, because other ranks ask at once
            await scheduler
            self.address = f"{protected.protocol}://{unparse_host_port(host, scheduler.port)}"
            if place.world_size > 1:
                said = f"dshuffle: rank 0 of {place.world_size} listens on {host}; {protected.words}"
                if protected.is_open:
                    logger.warning("%s", said)
                else:
                    print(said, file=sys.stderr)
        else:
            self.address = await find_scheduler(
                place, rank_0, ports, self._terms, protected.protocol, protected.security, self._timeout
            )
        options |= {"memory_limit": MEMORY_LIMIT // max(1, place.local_size), "death_timeout": self._timeout}
        with _CONFIGURING, dask.config.set(DASK_SETTINGS):
            self.worker = Worker(self.address, nthreads=1, name=str(place.rank), **options)
        self.worker.handlers[MARK] = replying(MARK, self._mark)
        self._servers.insert(0, self.worker)
        await self.worker
        self._watching = asyncio.create_task(self._watch())

    async def _meet(self, step: Step) -> Any:
        call = asyncio.ensure_future(self._ask(MEET, step=list(step)))
        limit = self._timeout if self.job is not None and step.does == "joins" else math.inf
        began, pause = time.monotonic(), LOG_AFTER
        try:
            while not (await asyncio.wait([call], timeout=min(pause, limit)))[0]:
                waited = time.monotonic() - began
                if self.job is not None and waited >= limit:
                    absent = self.job.absent
                    raise ClusterError(
                        f"{len(absent)} of {self.place.world_size} ranks have not come within {limit:g} s: "
                        f"{short_repr(absent)}. Look at their output: each must call dshuffle.spmd, and reach the "
                        "host of rank 0"
                    )
                others = "the other ranks" if self.job is None else f"ranks {short_repr(self.job.absent)}"
                logger.warning("dshuffle: rank %d has waited %.0f s for %s", self.place.rank, waited, others)
                pause = min(2 * pause, limit - waited)
            return call.result()["answer"]
        finally:
            call.cancel()

    async def _ask(self, request: str, **fields: Any) -> dict[str, Any]:
        """Ask rank 0's scheduler."""
        try:
            return unwrap(await getattr(self.worker.scheduler, request)(**fields, rank=self.place.rank), "rank 0")
        except OSError as error:
            raise WorkerLost("rank 0 was lost: the connection to its scheduler has ended") from error

    async def _watch(self) -> None:
        """Hear of what happens to the job. A worker takes seconds to notice by itself that the scheduler is gone."""
        try:
            while True:
                news = await self._ask(WATCH, seen=self._early[1].epoch)
                self._early = news["early"], Step(*news["step"])
                if (batches := self.batches) is not None:
                    self.check_batch(batches.number, batches.n_trained)
        except DShuffleError as error:
            self._failure = error
            if self.job is None or self.job.failure is None:  # the loop may be in a collective operation
                await _quietly(self._tell(str(error)), FAIL_WITHIN)

    async def _tell(self, reason: str) -> None:
        """Tell the job that this rank has failed."""
        if self.job is not None:
            self.job.rank_failed(self.place.rank, reason)
        elif self._servers:
            await self._ask(FAILED, reason=reason)

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
        if self._watching is not None:
            self._watching.cancel()
        for server in self._servers:
            if isinstance(server, Scheduler) and self.job is not None:  # the others may not have heard of the end yet
                await _quietly(self.job.empty.wait(), seconds)
                await _quietly(server.close(), seconds)
            elif isinstance(server, Worker):
                await _quietly(server.close(timeout=seconds, executor_wait=False, nanny=False), seconds)


async def _quietly(closing: Awaitable[Any], seconds: float) -> None:
    """Wait for something that ends. An error here must not hide the reason for which the job ends."""
    try:
        await asyncio.wait_for(closing, seconds)
    except Exception as error:
        # Dask raises RuntimeError if it closes a connection twice that is being opened.
        logger.debug("dshuffle: closing failed: %r", error)
