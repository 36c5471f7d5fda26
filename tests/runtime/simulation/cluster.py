"""A Dask cluster in virtual time: real plugins of dshuffle on a simulated scheduler, workers and network."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import math
import pickle
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Status
from distributed.comm.core import CommClosedError
from distributed.protocol.pickle import loads
from distributed.protocol.serialize import Serialize, ToPickle

import dshuffle.exchange.jobs
import dshuffle.runtime.worker.plans
import dshuffle.runtime.worker.server_rows
import dshuffle.runtime.worker.worker_plugin
from dshuffle.runtime.scheduler.replacements import Candidates
from dshuffle.runtime.scheduler.scheduler_plugin import DShuffleScheduler
from dshuffle.runtime.worker.worker_plugin import DShuffleWorker

from .virtual_time import ImmediateThreads, SimulatedThreads, VirtualLoop

SCHEDULER = "sim://scheduler"
RUNNING_IN: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


@dataclass(eq=False)
class Process:
    """A process of the cluster, and what happens in it."""

    address: str
    handlers: dict[str, Any] = field(default_factory=dict)
    tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict)  # in order, so that a seed says everything
    dead: bool = False
    stopped_until: float = 0.0

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine, and all tasks that it starts, in this process."""
        context = contextvars.copy_context()
        context.run(RUNNING_IN.set, self)
        return asyncio.get_running_loop().create_task(work, context=context)

    def kill(self) -> None:
        self.dead = True
        for task in list(self.tasks):
            task.cancel()


def tracked(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """Task factory that notes in which process a task runs."""
    context = options.get("context")
    process = context.get(RUNNING_IN) if context is not None else RUNNING_IN.get()
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **options)
    if process is not None:
        process.tasks[task] = None
        task.add_done_callback(process.tasks.pop)
        if process.dead:
            task.cancel()
    return task


class Rpc:
    """In place of Dask's rpc objects: ``rpc.operation(**message)`` calls a handler of another process."""

    def __init__(self, cluster: SimulatedCluster, source: Process, target: str) -> None:
        self._call = (cluster, source, target)

    def __getattr__(self, operation: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        cluster, source, target = self._call
        return lambda **message: cluster.call(source, target, operation, message)


class Connections:
    """In place of Dask's pool of connections. No kernel knows of bytes on their way."""

    def __init__(self, cluster: SimulatedCluster, source: Process) -> None:
        self.occupied: dict[str, set[Any]] = {}
        self._cluster, self._source = cluster, source

    def __call__(self, target: str) -> Rpc:
        return Rpc(self._cluster, self._source, target)


class Background:
    """In place of Dask's background tasks."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def call_soon(self, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> None:
        self._process.spawn(work(*args))


class SimulatedCluster:
    """Scheduler, workers and the network between them.

    Parameters
    ----------
    loop
        The event loop that they all run on.
    faults
        Rates of messages that are lost, late, or corrupted on the way.
    """

    def __init__(self, loop: VirtualLoop, faults: dict[str, float], seen: Counter[str]) -> None:
        self.loop, self.rng, self.faults, self.seen = loop, loop.rng, faults, seen
        self.processes: dict[str, Process] = {}
        self.workers: dict[str, Any] = {}  # address -> in place of distributed.Worker
        self.cut: set[frozenset[str]] = set()  # pairs that cannot reach each other
        self.restarting = 0
        self._ports = itertools.count(1)
        self.main = Process(SCHEDULER)
        self.processes[SCHEDULER] = self.main
        self.scheduler: Any = SimpleNamespace(
            workers={}, handlers=self.main.handlers, extensions={}, clients={"client": None}, client_comms={}, tasks={},
            worker_plugins={}, _ongoing_background_tasks=Background(self.main), log_event=lambda *_: None,
            http_application=SimpleNamespace(applications=[], add_handlers=lambda *_: None),
            rpc=lambda address: Rpc(self, self.main, address), broadcast=self._broadcast,
            register_worker_plugin=self._register, cluster=self,
        )  # fmt: skip
        self.plugin = DShuffleScheduler()

    async def start(self, n_workers: int) -> None:
        for name in range(n_workers):
            self._join(name)
        await self.main.spawn(self.plugin.start(self.scheduler))

    # -- processes -----------------------------------------------------------------------------------------------

    def _join(self, name: int | str) -> str:
        address = f"sim://{name}:{next(self._ports)}"
        process = self.processes[address] = Process(address)
        self.workers[address] = SimpleNamespace(
            address=address, status=Status.running, plugins={}, handlers=process.handlers, process=process,
            nanny=None,
            memory_manager=SimpleNamespace(memory_limit=0, memory_pause_fraction=False),
            monitor=SimpleNamespace(get_process_memory=lambda: 0),
            scheduler=Rpc(self, process, SCHEDULER), rpc=Connections(self, process),
            _ongoing_background_tasks=Background(process), periodic_callbacks={},
        )  # fmt: skip
        self.scheduler.workers[address] = SimpleNamespace(
            host=address, address=address, name=name, nanny="", status=Status.running, resources={}
        )
        return address

    async def add(self, name: int | str) -> None:
        """Let another worker join."""
        with contextlib.suppress(asyncio.CancelledError):  # it is killed at once
            await self._set_up(self._join(name))

    async def _set_up(self, address: str) -> None:
        worker = self.workers[address]
        plugin = worker.plugins["dshuffle"] = DShuffleWorker()
        await worker.process.spawn(plugin.setup(worker))

    async def _register(self, *_: Any, **__: Any) -> None:
        self.scheduler.worker_plugins["dshuffle"] = b""
        for address in list(self.workers):
            await self._set_up(address)

    def crash(self, address: str, *, comes_back: bool, noticed: bool) -> None:
        """Kill a worker. The scheduler may notice, and a nanny may start another one under the same name."""
        if self.processes[address].dead:
            return
        self.processes[address].kill()
        if address not in self.scheduler.workers:  # it has retired
            return
        name = self.scheduler.workers[address].name
        # Otherwise Dask removes the worker only when it has been silent for a long time.
        self.loop.call_later(self.rng.uniform(0, 5) if noticed else 100, self._leave, address)
        if comes_back:
            self.restarting += 1
            self.loop.call_later(self.rng.uniform(0.5, 10), lambda: self.main.spawn(self._come_back(address, name)))

    def _leave(self, address: str, stimulus_id: str = "close") -> None:
        if self.scheduler.workers.pop(address, None) is not None:
            self.plugin.remove_worker(self.scheduler, address, stimulus_id=stimulus_id)

    async def retire(self, address: str, *, asked: bool) -> None:
        """Close a worker as Dask does when it retires the worker, or (not ``asked``) when it gets SIGTERM."""
        if asked:
            self.scheduler.workers[address].status = Status.closing_gracefully
            await asyncio.sleep(self.rng.uniform(0, 3))
            self._leave(address, "retire-workers-1")
        elif address in self.scheduler.workers:
            self.scheduler.workers[address].status = Status.closing
        worker = self.workers[address]
        worker.status = Status.closing
        if (plugin := worker.plugins.pop("dshuffle", None)) is not None:
            with contextlib.suppress(asyncio.CancelledError):  # it is killed meanwhile
                await worker.process.spawn(plugin.teardown(worker))
        self.crash(address, comes_back=False, noticed=True)

    async def _come_back(self, address: str, name: int | str) -> None:
        self._leave(address)
        with contextlib.suppress(asyncio.CancelledError):
            await self._set_up(self._join(name))
        self.restarting -= 1

    # -- network -------------------------------------------------------------------------------------------------

    async def call(self, source: Process, target: str, operation: str, message: dict[str, Any]) -> Any:
        """Call a handler of another process, as Dask does: errors of the connection are OSErrors."""
        sent = pickle.dumps({key: unpacked(value) for key, value in message.items() if key != "reply"})
        await self._travel(source.address, target)
        handler = self.processes[target].handlers.get(operation)
        if handler is None:
            return None
        work = self.processes[target].spawn(handler(**pickle.loads(sent)))
        if not message.get("reply", True):
            return None
        await asyncio.wait([work])
        if work.cancelled():
            raise CommClosedError("the other process has died")
        reply = work.result()
        await self._travel(target, source.address)
        return self._on_the_wire(reply)

    async def _travel(self, source: str, target: str) -> None:
        """Let a message arrive, or not: it may be lost, and processes may be dead, stopped or cut off."""
        await asyncio.sleep(self.rng.uniform(1, 20) if self.happens("late") else self.rng.expovariate(200))
        for end in (source, target):
            process = self.processes[end]
            while self.loop.now < process.stopped_until:
                await asyncio.sleep(process.stopped_until - self.loop.now)
        if source != target and frozenset((source, target)) in self.cut:
            await asyncio.sleep(5)
            raise CommClosedError("cut off")
        if self.processes[source].dead:
            await asyncio.get_running_loop().create_future()  # nobody is there to be told
        if self.processes[target].dead:
            raise CommClosedError("connection refused")
        if self.happens("lose"):
            raise CommClosedError("connection reset")

    def _on_the_wire(self, reply: Any) -> Any:
        if not isinstance(reply, dict):
            return reply
        found = {key: unpacked(value) for key, value in reply.items()}
        rows = found.get("rows")
        if isinstance(rows, np.ndarray) and rows.size and self.happens("corrupt"):
            rows.reshape(-1)[self.rng.randrange(rows.size)] ^= 1
        if "packed" in found and self.happens("corrupt"):  # a short message: checksums, and then rows
            packed = bytearray(found["packed"])
            packed[-self.rng.randrange(1, math.prod(found["shape"]) + 1)] ^= 1
            found["packed"] = bytes(packed)
        return found

    def happens(self, fault: str) -> bool:
        happened = self.rng.random() < self.faults.get(fault, 0.0)
        self.seen[fault] += happened
        return happened

    async def _broadcast(self, msg: dict[str, Any], workers: list[str], on_error: str) -> dict[str, Any]:
        message = dict(msg)
        operation, [address] = message.pop("op"), workers
        if operation == "plugin-add":
            await self._set_up(address)
            return {address: None}
        try:
            return {address: await self.call(self.main, address, operation, message)}
        except OSError as error:
            return {address: error}


def unpacked(value: Any) -> Any:
    """A value as it arrives in another process."""
    if isinstance(value, ToPickle):
        return loads(pickle.dumps(value.data)) if not isinstance(value.data, BaseException) else value.data
    if isinstance(value, Serialize):
        value = value.data
    return value.copy() if isinstance(value, np.ndarray) else value


@contextlib.contextmanager
def simulated(rng: random.Random) -> Iterator[VirtualLoop]:
    """A loop in virtual time, on which dshuffle's threads are simulated, too."""
    loop = VirtualLoop(rng)
    loop.set_task_factory(tracked)  # type: ignore[arg-type]

    async def may_come(candidates: Any, lost: str) -> bool:
        cluster: SimulatedCluster = candidates._scheduler.cluster
        return cluster.restarting > 0

    with pytest.MonkeyPatch.context() as patch:
        for module in (dshuffle.exchange.jobs, dshuffle.runtime.worker.plans, dshuffle.runtime.worker.worker_plugin):
            threads = lambda n_threads, thread_name_prefix: SimulatedThreads(loop, n_threads)  # noqa: E731
            patch.setattr(module, "ThreadPoolExecutor", threads)
        patch.setattr(dshuffle.runtime.worker.server_rows, "ThreadPoolExecutor", lambda *_, **__: ImmediateThreads())
        patch.setattr(Candidates, "may_come", may_come)
        patch.setattr(time, "perf_counter", loop.time)  # measured rates decide how long messages are
        try:
            yield loop
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(1))
            loop.close()
