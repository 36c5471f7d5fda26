"""A Dask worker without Dask: dshuffle's plugin, and tasks that take virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Status
from distributed.protocol.pickle import dumps
from numpy.typing import NDArray

from dshuffle.errors import PeerFailed, WorkerLost
from dshuffle.runtime.collective import CollectiveId, Group, run_together
from dshuffle.runtime.partition import Partition

from .network import Background, Network, Rpc, Stream
from .processes import Process
from .scheduler import N_THREADS

if TYPE_CHECKING:
    from .cluster import SimulatedCluster

Work = Callable[..., Awaitable[Any]]


@dataclass
class Execution:
    """A task on a worker."""

    run_id: int
    wanted: bool = True


class SimulatedWorker(SimpleNamespace):
    """What the plugin sees of a Dask worker, and the part of it that runs tasks.

    Parameters
    ----------
    cluster
        Where it runs.
    process
        Its process.
    """

    def __init__(self, cluster: SimulatedCluster, process: Process) -> None:
        network: Network = cluster.network
        scheduler = Rpc(network, process, cluster.main.address)
        super().__init__(
            address=process.address, status=Status.running, plugins={}, handlers=process.handlers, process=process,
            nanny=None, cluster=cluster, scheduler=scheduler, rpc=network.rpc(process), periodic_callbacks={},
            memory_manager=SimpleNamespace(memory_limit=0, memory_pause_fraction=False),
            monitor=SimpleNamespace(get_process_memory=lambda: 0), _ongoing_background_tasks=Background(process),
        )  # fmt: skip
        self.stream = Stream(network, process, cluster.main, cluster.scheduler.receive_from_worker)
        self.data: dict[str, Any] = {}
        self.executions: dict[str, Execution] = {}
        self.threads = asyncio.Semaphore(N_THREADS)
        process.handlers["get_data"] = self._get_data

    def receive(self, message: dict[str, Any]) -> None:
        """The scheduler sends a task, or does not need one any longer."""
        match message["op"]:
            case "compute-task":
                key, run_id = message["key"], message["run_id"]
                execution = self.executions.get(key)
                if execution is not None:  # it still runs, and is wanted again
                    execution.run_id, execution.wanted = run_id, True
                else:
                    execution = self.executions[key] = Execution(run_id)
                    self.process.spawn(self._execute(key, execution, *message["run_spec"].data))
            case "free-keys" | "remove-replicas":
                for key in message["keys"]:
                    self.data.pop(key, None)
                    if key in self.executions:  # a thread cannot be interrupted
                        self.executions[key].wanted = False

    async def _execute(self, key: str, execution: Execution, work: Work, *args: Any) -> None:
        started = self.cluster.loop.now
        async with self.threads if work is not on_partition or args[3] is not run_together else asyncio.Lock():
            try:
                result = await work(self, *args) if execution.wanted else None
            except Exception as error:
                told = {"op": "task-erred", "exception": dumps(error), "exception_text": str(error), "traceback": None}
            else:
                told = {"op": "task-finished", "nbytes": 8, "type": dumps(type(result)), "typename": "object"}
                told["metadata"] = {}
        del self.executions[key]
        if not execution.wanted:
            return
        if told["op"] == "task-finished":
            self.data[key] = result
        time = [{"action": "compute", "start": started, "stop": self.cluster.loop.now}]
        told |= {"key": key, "run_id": execution.run_id, "worker": self.address, "stimulus_id": key}
        self.stream.send({**told, "startstops": time})

    async def _get_data(self, key: str) -> dict[str, Any]:
        return {"data": self.data[key]}


async def on_partition(
    worker: SimulatedWorker, session_id: str, rank: int, epoch: int, fn: Work, args: Any, kwargs: Any
) -> Any:
    """``run_on_partition``, for a function that takes virtual time."""
    plugin = worker.plugins.get("dshuffle")
    session = None if plugin is None else plugin.sessions.get(session_id)
    if session is None or session.rank != rank:
        raise WorkerLost(f"worker {worker.address} does not hold rank {rank} of session {session_id}")
    with session.partition(epoch) as partition:
        if fn is run_together:
            return await in_group(worker, partition, *args)
        return await fn(worker, partition, *args)


async def in_group(
    worker: SimulatedWorker, partition: Partition, collective: CollectiveId, fn: Work, *args: Any
) -> Any:
    """``run_together``, for a function that takes virtual time."""
    group = SimulatedGroup(worker, collective, partition.rank)
    try:
        return await fn(worker, partition, *args, group=group)
    except PeerFailed:
        raise
    except Exception as error:
        await group.end(f"rank {partition.rank} has failed: {type(error).__name__}: {error}")
        raise


class SimulatedGroup(Group):
    """All ranks of a call of ``together``, for a function that takes virtual time."""

    def __init__(self, worker: SimulatedWorker, collective: CollectiveId, rank: int) -> None:
        super().__init__(collective, rank)
        self._worker: Any = worker

    async def mean_of(self, values: NDArray[np.float64], weight: float) -> NDArray[np.float64]:
        """The mean over all ranks."""
        step, self._step = self._step, self._step + 1
        message = {"size": self.size, "step": step, "rank": self.rank, "weight": weight}
        return await self._request_mean(self._worker, values=values, **message)

    async def end(self, reason: str) -> None:
        """Tell the other ranks that this rank has failed."""
        await self._end_collective(self._worker, reason)
