"""Dask's scheduler, with its own tables and transitions, on a simulated network."""

from __future__ import annotations

import operator
from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from distributed import Scheduler, Status
from distributed.collections import HeapSet
from distributed.scheduler import ClientState, SchedulerState, TaskState, WorkerState
from sortedcontainers import SortedDict

from .network import Background, Stream
from .processes import Process

if TYPE_CHECKING:
    from .cluster import SimulatedCluster

N_THREADS = 2
"""Threads of a worker."""


class SimulatedScheduler(Scheduler):
    """Tasks, clients, workers and plugins as in Dask; without comms, a dashboard, work stealing and timeouts.

    Parameters
    ----------
    cluster
        What it schedules for.
    process
        Where it runs.
    """

    def __init__(self, cluster: SimulatedCluster, process: Process) -> None:
        SchedulerState.__init__(
            self,
            aliases={},
            clients={},
            workers=SortedDict(),
            host_info={},
            resources={},
            tasks={},
            unrunnable={},
            queued=HeapSet(key=operator.attrgetter("priority")),
            validate=False,
        )
        self.cluster, self.process = cluster, process
        self.status = Status.running
        self.allowed_failures = 3
        self.client_comms, self.stream_comms = {}, {}
        self.worker_plugins = {}
        self.bandwidth_workers = defaultdict(float)
        self._no_workers_since = None
        self._workers_added_total = self._workers_removed_total = self._client_connections_removed_total = 0
        self._ongoing_background_tasks = Background(process)
        self._submitted = 0
        self.rpc = cluster.network.rpc(process)
        self.http_application = SimpleNamespace(applications=[], add_handlers=lambda *_: None)
        self.handlers = process.handlers
        self.handlers |= {
            "identity": self._identity,
            "gather": self.gather,
            "proxy": self.proxy,
            "register_scheduler_plugin": self.register_scheduler_plugin,
        }

    def __del__(self) -> None:
        """There is no server to close."""

    # -- workers ---------------------------------------------------------------------------------------------------

    def add(self, address: str, name: int | str, stream: Stream) -> None:
        """Let a worker join, as Dask's ``add_worker`` does."""
        self.workers[address] = worker = WorkerState(
            address=address, status=Status.running, pid=0, name=name, nthreads=N_THREADS, memory_limit=0,
            local_directory="", nanny="", server_id=address, scheduler=self,
        )  # fmt: skip
        self.host_info[worker.host] = {"addresses": {address}, "nthreads": N_THREADS}
        self.total_nthreads += N_THREADS
        self.aliases[name] = address
        self.running.add(worker)
        self.stream_comms[address] = stream
        self.check_idle_saturated(worker)
        self.transitions(self.bulk_schedule_unrunnable_after_adding_worker(worker), f"add-{address}")

    def receive_from_worker(self, message: dict[str, Any]) -> None:
        """A worker says what has become of a task."""
        operation = message.pop("op")
        (self.handle_task_finished if operation == "task-finished" else self.handle_task_erred)(**message)

    async def register_worker_plugin(self, comm: Any, plugin: bytes, name: str, idempotent: bool) -> dict[str, Any]:
        """Set up the worker plugin on all workers."""
        self.worker_plugins[name] = plugin
        for address in list(self.workers):
            await self.cluster.set_up(address)
        return {}

    async def broadcast(self, *, msg: dict[str, Any], workers: list[str], on_error: str) -> dict[str, Any]:
        """Call a handler of a worker."""
        message = dict(msg)
        called, [address] = message.pop("op"), workers
        if called == "plugin-add":
            await self.cluster.set_up(address)
            return {address: None}
        try:
            return {address: await self.cluster.network.call(self.process, address, called, message)}
        except OSError as error:
            return {address: error}

    async def proxy(self, msg: dict[str, Any], worker: str, serializers: Any = None) -> Any:
        """Call a handler of a worker for a client."""
        message = dict(msg)
        return await self.cluster.network.call(self.process, worker, message.pop("op"), message)

    # -- clients ---------------------------------------------------------------------------------------------------

    def receive_from_client(self, client: str, message: dict[str, Any]) -> None:
        """A client submits tasks, cancels them, or needs their results no longer."""
        message = dict(message)
        match message.pop("op"):
            case "submit":
                self.submit(client, **message)
            case "client-releases-keys":
                self.client_releases_keys(message["keys"], client)
            case "cancel-keys":
                self.stimulus_cancel(client=client, **message)
            case "report-key":
                self.report_on_key(message["key"], client=client)

    def submit(self, client: str, tasks: dict[str, tuple[Any, ...]], workers: dict[str, list[str]]) -> None:
        """Take tasks: key -> function and arguments, and the workers that may run it."""
        for key, spec in tasks.items():
            task: TaskState = self.new_task(key, spec, "released")
            task.worker_restrictions = set(workers[key])
            self._submitted += 1
            task.priority = (0, self._submitted)
        self.client_desires_keys(list(tasks), client)
        self.transitions(dict.fromkeys(reversed(tasks), "waiting"), "submit")

    def connect(self, client: str, stream: Stream) -> None:
        """Let a client come, or come back."""
        self.clients[client] = ClientState(client)
        self.client_comms[client] = stream

    def disconnect(self, client: str) -> None:
        """The connection to a client is lost."""
        self.client_comms[client].is_closed = True
        self.remove_client(client)
        del self.client_comms[client]

    async def gather(self, keys: list[str]) -> dict[str, Any]:
        """Fetch results from workers."""
        data, missing = {}, []
        for key in keys:
            task = self.tasks.get(key)
            holders = [] if task is None else [worker.address for worker in task.who_has or ()]
            try:
                reply = await self.cluster.network.call(self.process, holders[0], "get_data", {"key": key})
                data[key] = reply["data"]
            except (OSError, KeyError, IndexError):
                missing.append(key)
        return {"status": "error", "keys": missing} if missing else {"status": "OK", "data": data}

    async def _identity(self, n_workers: int = -1) -> dict[str, Any]:
        workers = {where: {"resources": {}, "status": one.status.name} for where, one in self.workers.items()}
        return {"address": self.process.address, "workers": workers}

    # -- what is left out --------------------------------------------------------------------------------------------

    def add_plugin(self, plugin: Any, *, idempotent: bool = False, name: str | None = None, **_: Any) -> None:
        """Dask writes errors of plugins to its log, which nobody reads here."""
        watch = plugin.transition

        def transition(*args: Any, **kwargs: Any) -> None:
            try:
                watch(*args, **kwargs)
            except Exception as error:
                self.cluster.errors.append(error)
                raise

        plugin.transition = transition
        super().add_plugin(plugin, idempotent=idempotent, name=name)

    def log_event(self, topic: Any, msg: Any) -> None:
        """Nobody reads the events."""

    def coerce_address(self, addr: Any, resolve: bool = True) -> str:
        """Addresses are not resolved."""
        return str(addr)
