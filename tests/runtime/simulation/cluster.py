"""A Dask cluster in virtual time: real plugins of dshuffle, and Dask's own tables of tasks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import itertools
import logging
import random
import time
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import dask
import pytest
from distributed import Future, Status

import dshuffle.exchange.endpoints
import dshuffle.runtime.client.cluster_view
import dshuffle.runtime.client.epoch
import dshuffle.runtime.client.session_client
import dshuffle.runtime.worker.session
import dshuffle.runtime.worker.worker_plugin
from dshuffle.errors import MixingWarning
from dshuffle.kernels import load_kernels
from dshuffle.planning.planner import OwnPlanner
from dshuffle.runtime.scheduler.members import Candidates
from dshuffle.runtime.scheduler.scheduler_plugin import DShuffleScheduler
from dshuffle.runtime.worker.worker_plugin import DShuffleWorker

from .client import as_completed
from .network import Network, Stream
from .processes import RUNNING_IN, Numbered, tracked
from .scheduler import SimulatedScheduler
from .virtual_time import SimulatedThreads, VirtualLoop
from .worker import SimulatedWorker

HEARTBEAT = 15.0
SETTINGS = {"message-bytes": 200, "window-bytes": 1000, "heartbeat": HEARTBEAT, "stopped-timeout": 2 * HEARTBEAT}


LOADED = functools.cache(load_kernels)


class SimulatedCluster:
    """Scheduler and workers.

    Parameters
    ----------
    loop
        The event loop that they all run on.
    rates
        Rates of messages that are lost, late, or corrupted on the way.
    seen
        Counts what happens.
    """

    def __init__(self, loop: VirtualLoop, rates: dict[str, float], seen: Counter[str]) -> None:
        self.loop, self.rng = loop, loop.rng
        self.network = Network(loop, rates, seen)
        self.workers: dict[str, SimulatedWorker] = {}
        self.errors: list[BaseException] = []  # that nobody would see otherwise
        self.restarting = 0
        self._ports = itertools.count(1)
        self.main = self.network.add("tcp://scheduler:1")
        self.scheduler = SimulatedScheduler(self, self.main)

    @property
    def plugin(self) -> DShuffleScheduler | None:
        """The plugin on the scheduler, if there is a session."""
        plugin = self.scheduler.plugins.get("dshuffle")
        assert plugin is None or isinstance(plugin, DShuffleScheduler)
        return plugin

    def waiting_for(self) -> str:
        """What the sessions wait for, in words."""
        sessions = [] if self.plugin is None else self.plugin.coordinators.values()
        return "; ".join(one.machine.waiting_for() for one in sessions)

    def alive(self) -> list[str]:
        """Workers that have not been killed."""
        return [address for address, worker in self.workers.items() if not worker.process.dead]

    def staying(self) -> list[str]:
        """Members of the cluster that have not been killed, and do not close."""
        members = [address for address in self.alive() if address in self.scheduler.workers]
        return [address for address in members if self.scheduler.workers[address].status == Status.running]

    def join(self, name: int | str) -> str:
        """Start a worker that is not set up yet."""
        address = f"tcp://{name}:{next(self._ports)}"
        worker = self.workers[address] = SimulatedWorker(self, self.network.add(address))
        stream = Stream(self.network, self.main, worker.process, worker.receive)
        self.main.context_run(self.scheduler.add, address, name, stream)
        return address

    async def add(self, name: int | str) -> None:
        """Let another worker join."""
        address = self.join(name)
        if self.scheduler.worker_plugins:
            with contextlib.suppress(asyncio.CancelledError):  # it is killed at once
                await self.set_up(address)

    async def set_up(self, address: str) -> None:
        """Install the plugin on a worker."""
        worker = self.workers[address]
        plugin = worker.plugins["dshuffle"] = DShuffleWorker()
        await asyncio.shield(worker.process.spawn(plugin.setup(worker)))  # it goes on if nobody waits any more

    def crash(self, address: str, *, comes_back: bool, noticed: bool) -> None:
        """Kill a worker. The scheduler may notice, and a nanny may start another one under the same name."""
        if self.workers[address].process.dead:
            return
        self.workers[address].process.kill()
        if address not in self.scheduler.workers:  # it has retired
            return
        name = self.scheduler.workers[address].name
        # Otherwise Dask removes the worker only when it has been silent for a long time.
        self.loop.call_later(self.rng.uniform(0, 5) if noticed else 100, self._leave, address)
        if comes_back:
            self.restarting += 1
            self.loop.call_later(self.rng.uniform(0.5, 10), lambda: self.main.spawn(self._come_back(address, name)))

    def _leave(self, address: str, stimulus_id: str = "close") -> asyncio.Task[Any]:
        removed = self.scheduler.remove_worker(address, stimulus_id=stimulus_id, expected=stimulus_id != "close")
        return self.main.spawn(removed)

    async def retire(self, address: str, *, asked: bool) -> None:
        """Close a worker as Dask does when it retires the worker, or (not ``asked``) when it gets SIGTERM."""
        worker, scheduler = self.workers[address], self.scheduler
        status = Status.closing_gracefully if asked else Status.closing
        self.main.context_run(scheduler.handle_worker_status_change, status, address, "retire")
        if asked:
            await asyncio.sleep(self.rng.uniform(0, 3))
            await self._leave(address, "retire-workers-1")
        worker.status = Status.closing
        if (plugin := worker.plugins.pop("dshuffle", None)) is not None:
            with contextlib.suppress(asyncio.CancelledError):  # it is killed meanwhile
                await worker.process.spawn(plugin.teardown(worker))
        self.crash(address, comes_back=False, noticed=True)

    async def _come_back(self, address: str, name: int | str) -> None:
        await self._leave(address)
        await self.add(name)
        self.restarting -= 1


@contextlib.contextmanager
def simulated(rng: random.Random) -> Iterator[VirtualLoop]:
    """A loop in virtual time, on which dshuffle's threads are simulated, too."""
    loop = VirtualLoop(rng)
    loop.set_task_factory(tracked)  # type: ignore[arg-type]
    ids = itertools.count()

    async def may_come(candidates: Any, lost: str) -> bool:
        cluster: SimulatedCluster = candidates._scheduler.cluster
        return cluster.restarting > 0

    plan = OwnPlanner.plan

    def plan_of_build(planner: OwnPlanner, epoch: int, delivery: str) -> Any:
        process = RUNNING_IN.get()
        if process is None or not process.draws_differently:
            return plan(planner, epoch, delivery)
        choices = dataclasses.replace(planner.spec.choices, seed=planner.spec.choices.seed + 1)
        return plan(OwnPlanner(dataclasses.replace(planner.spec, choices=choices), planner.rank), epoch, delivery)

    def sleep(seconds: float) -> None:
        loop.run_until_complete(asyncio.sleep(seconds))

    with (
        pytest.MonkeyPatch.context() as patch,
        dask.config.set({f"dshuffle.{name}": value for name, value in SETTINGS.items()}),
        warnings.catch_warnings(),
        quiet(),
    ):
        warnings.simplefilter("ignore", MixingWarning)
        for module in (
            dshuffle.exchange.endpoints,
            dshuffle.runtime.worker.session,
            dshuffle.runtime.worker.worker_plugin,
        ):
            threads = lambda n_threads, thread_name_prefix: SimulatedThreads(loop, n_threads)  # noqa: E731
            patch.setattr(module, "ThreadPoolExecutor", threads)
        patch.setattr("dshuffle.store.row_blocks.SMALLEST_BLOCK", 100)  # so that all workers read
        # Kernels are loaded once in a process.
        patch.setattr(dshuffle.runtime.worker.worker_plugin, "load_kernels", LOADED)
        patch.setattr(Candidates, "may_come", may_come)
        patch.setattr(time, "perf_counter", loop.time)  # measured rates decide how long messages are
        patch.setattr(OwnPlanner, "plan", plan_of_build)
        patch.setattr(Future, "_uid", "simulated")  # the order of sets of Dask's futures
        patch.setattr(Future, "_counter", itertools.count())
        patch.setattr(Numbered, "numbers", itertools.count())
        clock = types.SimpleNamespace(perf_counter=loop.time, monotonic=loop.time, sleep=sleep)
        for module in (dshuffle.runtime.client.session_client, dshuffle.runtime.client.cluster_view):
            patch.setattr(module, "time", clock)
        names = types.SimpleNamespace(uuid4=lambda: types.SimpleNamespace(hex=f"{next(ids):012}"))
        patch.setattr(dshuffle.runtime.client.session_client, "uuid", names)
        patch.setattr(dshuffle.runtime.client.epoch, "as_completed", as_completed)
        try:
            yield loop
        finally:
            loop.ends = True
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(1))
            loop.close()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without logs, and without collections of garbage, whose finalizers would run at any time."""
    disabled, collects = logging.root.manager.disable, gc.isenabled()
    logging.disable(logging.CRITICAL)
    gc.disable()
    try:
        yield
    finally:
        logging.disable(disabled)
        if collects:
            gc.enable()
