"""The threads of one rank: an event loop with its Dask worker, and on rank 0 with the scheduler of the job."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import dask
from distributed import Scheduler, Security, Worker
from distributed.comm.addressing import unparse_host_port
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.system import MEMORY_LIMIT
from distributed.utils import silence_logging_cmgr

# Imported here, in the thread of the script: an import in the event loop would hold up all that the worker does.
import dshuffle.runtime.scheduler.scheduler_plugin
import dshuffle.runtime.worker.worker_plugin  # noqa: F401
from dshuffle.errors import ClusterError, WorkerLost
from dshuffle.launched.job import FAILED, POST, PROGRESS, STAY, Job
from dshuffle.launched.launcher import Place
from dshuffle.launched.mailbox import MAILBOXES, Mailbox, Progress
from dshuffle.launched.ports import Terms, find_scheduler, hosts_of, is_free, ports_of
from dshuffle.launched.secret import PROTOCOL, SecretSecurity, key_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_WITHIN, FAIL_WITHIN = 5.0, 1.0
"""Seconds that a worker or a scheduler has to close, and what is left of them after a failure."""

HTTP_ADDRESS = "127.0.0.1:0"
"""Where the HTTP servers of worker and scheduler listen. Dask starts them without a dashboard, too, and without TLS."""

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


def rank_0_lost() -> WorkerLost:
    """The error of a rank without a connection to the scheduler."""
    return WorkerLost("rank 0 was lost: the connection to its scheduler has ended")


class ConnectionWatch(WorkerPlugin):
    """Lets a rank fail when its worker closes by itself, because the connection to rank 0's scheduler has ended."""

    name = "dshuffle-connection"

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def teardown(self, worker: Worker) -> None:
        """Post the failure. If this rank closes its worker itself, the job has ended or failed before."""
        self._mailbox.post_failure(rank_0_lost())


class RankProcess:
    """The Dask worker of this rank, in a thread with an event loop of its own, and on rank 0 the scheduler of the job.

    Parameters
    ----------
    place
        The place of this process in its job.
    terms
        What the caller has asked for.
    port
        Port on which rank 0 listens; None for one of those that follow from the job.
    interface
        Network interface on which worker and scheduler listen; None for the one that leads to rank 0.
    security
        TLS certificates, or no TLS.
    secret
        The secret of connections without TLS, as :func:`.key_of` takes it.
    timeout
        Seconds to wait for the other ranks.
    """

    def __init__(
        self,
        place: Place,
        mailbox: Mailbox,
        terms: Terms,
        *,
        port: int | None,
        interface: str | None,
        security: Security,
        secret: str | None,
        timeout: float,
    ) -> None:
        self.place = place
        self.job: Job | None = None
        self.address = ""
        """Address of the scheduler."""
        self._mailbox, self._terms = mailbox, terms
        self._interface, self._timeout = interface, timeout
        self._set_protocol(security, secret)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._stay: asyncio.Task[None] | None = None
        self._on_close = contextlib.ExitStack()
        ports = self._on_close.enter_context(ports_of(place, port)) if place.world_size > 1 else []
        self._loop = asyncio.new_event_loop()
        # Dask logs pages when a connection ends. What ends a job is raised in the script.
        self._on_close.enter_context(silence_logging_cmgr(logging.CRITICAL))
        self._thread = threading.Thread(target=self._loop.run_forever, name="dshuffle-rank", daemon=True)
        self._thread.start()
        try:
            self.run(self._start(ports))
        except BaseException as error:
            self.say_failed(f"{type(error).__name__}: {error}")
            self.close(failed=True)
            raise

    def _set_protocol(self, security: Security, secret: str | None) -> None:
        """Choose how connections are protected."""
        self._is_open = False
        if security.require_encryption or dask.config.get("distributed.comm.default-scheme") == "tls":
            self._protocol, self.security, self._protection = "tls", security, "connections use TLS"
            return
        key, self._protection = key_of(secret, one_host=self.place.on_one_host)
        self._is_open = key is None
        self._protocol, self.security = (PROTOCOL, SecretSecurity(key)) if key is not None else ("tcp", security)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop, and wait for it. Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Any, *arguments: Any) -> None:
        """Call a function on the event loop soon, unless that is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def tell_job(self, method: str, *arguments: Any) -> None:
        """Call a method of the job soon, on rank 0."""
        assert self.job is not None
        self.call(getattr(self.job, method), *arguments)

    def say_progress(self, progress: Progress, *, has_left: bool) -> None:
        """Say where the loop of this rank has ended an epoch, or has left the job."""
        fields = {"rank": self.place.rank, **asdict(progress), "has_left": has_left}
        if self.job is not None:
            self.call(functools.partial(self.job.rank_progress, **fields))
        else:
            self.call(self._send, {"op": PROGRESS, **fields})

    def say_failed(self, reason: str) -> None:
        """Say that this rank has failed, before it closes."""
        if self.job is not None:
            self.tell_job("rank_failed", self.place.rank, reason)
            return
        self.call(self._send, {"op": FAILED, "rank": self.place.rank, "reason": reason})

    def close(self, *, failed: bool) -> None:
        """Close worker and scheduler, and stop the event loop. Takes seconds at most."""
        if self._loop.is_closed():
            return
        with self._on_close:
            try:
                self.run(self._close(FAIL_WITHIN if failed else CLOSE_WITHIN))
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(CLOSE_WITHIN)
                if not self._thread.is_alive():
                    self._loop.close()

    async def _start(self, ports: Sequence[int]) -> None:
        place = self.place
        host, rank_0 = await hosts_of(place, self._interface)
        if place.rank == 0:
            await self._start_scheduler(host, ports)
        else:
            self.address = await find_scheduler(
                place, rank_0, ports, self._terms, self._protocol, self.security, self._timeout
            )
        with _CONFIGURING, dask.config.set(DASK_SETTINGS):
            self._worker = Worker(
                self.address,
                nthreads=1,
                name=str(place.rank),
                host=host,
                protocol=self._protocol,
                security=self.security,
                dashboard=False,
                dashboard_address=HTTP_ADDRESS,
                memory_limit=MEMORY_LIMIT // max(1, place.local_size),
                death_timeout=self._timeout,
                plugins=(ConnectionWatch(self._mailbox),),
            )
        self._worker.stream_handlers[POST] = self._post
        await self._worker
        MAILBOXES[self._worker.address] = self._mailbox
        self._stay = asyncio.create_task(self._stay_in_job(self._worker))
        if self.job is not None:
            await self.job.wait_until_joined(self._timeout)
            if self.job.failure is not None:
                raise self.job.failure

    async def _start_scheduler(self, host: str, ports: Sequence[int]) -> None:
        place = self.place
        free = [0] if place.world_size == 1 else [port for port in ports if is_free(host, port)][:1]
        if not free:
            raise ClusterError(
                f"rank 0 cannot listen on {host}: these ports are in use: {', '.join(map(str, ports))}. Give a free "
                "one with port="
            )
        with _CONFIGURING, dask.config.set(DASK_SETTINGS):
            self._scheduler = Scheduler(
                host=host,
                port=free[0],
                protocol=self._protocol,
                security=self.security,
                dashboard=False,
                dashboard_address=HTTP_ADDRESS,
            )
        self.job = Job(self._scheduler, place, ports, self._terms)  # before it listens, because other ranks ask at once
        await self._scheduler
        self.address = f"{self._protocol}://{unparse_host_port(host, self._scheduler.port)}"
        if place.world_size > 1:
            said = f"dshuffle: rank 0 of {place.world_size} listens on {host}; {self._protection}"
            if self._is_open:
                logger.warning("%s", said)
            else:
                print(said, file=sys.stderr)

    async def _stay_in_job(self, worker: Worker) -> None:
        """Hold a connection to rank 0 open, because a worker takes seconds to notice that the scheduler is gone."""
        try:
            await getattr(worker.scheduler, STAY)()
        except OSError:
            self._mailbox.post_failure(rank_0_lost())

    def _post(self, method: str, arguments: list[Any]) -> None:
        mailbox = self._mailbox
        getattr(mailbox, method)(*arguments)
        if mailbox.failure is not None and not mailbox.job_knows:  # the loop may be in a collective operation
            self.say_failed(str(mailbox.failure))

    def _send(self, message: dict[str, Any]) -> None:
        if self._worker is not None and self._worker.status is Status.running:
            self._worker.batched_send(message)

    async def _close(self, seconds: float) -> None:
        if self._stay is not None:
            self._stay.cancel()
        if self._worker is not None:
            MAILBOXES.pop(self._worker.address, None)
            await self._closed(self._worker.close(timeout=seconds, executor_wait=False, nanny=False), seconds)
        if self._scheduler is not None:
            await self._closed(self._scheduler.close(), seconds)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    @staticmethod
    async def _closed(closing: Coroutine[Any, Any, Any], seconds: float) -> None:
        """Wait until something is closed. An error here must not hide the reason for which the job ends."""
        try:
            await asyncio.wait_for(closing, seconds)
        except Exception as error:
            # Dask raises RuntimeError if it closes a connection twice that is being opened.
            logger.debug("dshuffle: closing failed: %r", error)
