"""A Dask client whose calls let virtual time pass until they are answered."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dask
from distributed import Client, Future
from distributed.comm.core import CommClosedError

from .network import Rpc, Stream
from .worker import on_partition

if TYPE_CHECKING:
    from .cluster import SimulatedCluster

LIMIT = 3000.0
"""Virtual seconds that any call may take, whatever has happened."""


class SimulatedClient(Client):
    """Futures, and the calls that wait for them, as in Dask. Streams and calls go through the simulated network.

    Parameters
    ----------
    cluster
        The cluster that it is a client of.
    name
        Its id.
    """

    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        self.simulation, self.id, self.status = cluster, name, "running"
        self._Client__loop = None  # there is nothing to close
        self.futures, self.refcount, self.generation = {}, defaultdict(int), 0
        self._refcount_lock = threading.RLock()
        self._gather_semaphore, self._gather_keys, self._gather_future = asyncio.Semaphore(5), None, None
        self.direct_to_workers, self.cluster = False, None
        self._stream_handlers = {
            "key-in-memory": self._handle_key_in_memory,
            "lost-data": self._handle_lost_data,
            "cancelled-keys": self._handle_cancelled_keys,
            "task-retried": self._handle_retried_key,
            "task-erred": self._handle_task_erred,
        }
        self.process = cluster.network.add(f"tcp://{name}:1", reliable=True)
        self.scheduler = SchedulerRpc(self)
        self._unsent: list[dict[str, Any]] = []  # until it is connected again, as in Dask
        self._connect()

    @property
    def asynchronous(self) -> bool:
        """Scripts are synchronous."""
        return False

    @property
    def loop(self) -> Any:
        """What Dask's futures use of a Tornado loop."""
        return SimpleNamespace(add_callback=self._add_callback)

    def sync(
        self, func: Callable[..., Awaitable[Any]], *args: Any, asynchronous: Any = None, callback_timeout: Any = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Let time pass until the coroutine has ended. It must end."""
        work = self.process.spawn(func(*args, **kwargs))
        run = self.simulation.loop.run_until_complete
        run(asyncio.wait([work], timeout=LIMIT))
        assert work.done(), f"{func.__qualname__} does not end: {self.simulation.waiting_for()}"
        return work.result()

    def map(self, func: Any, *columns: Sequence[Any], key: Sequence[str], **_: Any) -> list[Future]:
        """Submit tasks of :func:`dshuffle.Epoch.map`."""
        of = dask.get_annotations()["workers"]
        tasks = {name: (on_partition, *row) for name, row in zip(key, zip(*columns, strict=True), strict=True)}
        return self.submit_tasks(tasks, {name: of(name) for name in key})

    def submit_tasks(self, tasks: dict[str, tuple[Any, ...]], workers: dict[str, list[str]]) -> list[Future]:
        """Submit tasks, which may run on the given workers."""
        futures = [Future(name, client=self) for name in tasks]
        self._send_to_scheduler({"op": "submit", "tasks": tasks, "workers": workers})
        return futures

    def lose_connection(self, seconds: float) -> None:
        """Lose the connection to the scheduler, and connect again later. Dask then cancels all futures."""
        self.status = "connecting"
        self.simulation.scheduler.disconnect(self.id)
        for state in self.futures.values():
            state.cancel(reason="scheduler-connection-lost")
        self.futures.clear()
        self.simulation.loop.call_later(seconds, self._connect)

    def _connect(self) -> None:
        cluster, scheduler = self.simulation, self.simulation.scheduler
        self.scheduler_comm = Stream(
            cluster.network, self.process, cluster.main, lambda message: scheduler.receive_from_client(self.id, message)
        )
        scheduler.connect(self.id, Stream(cluster.network, cluster.main, self.process, self._receive))
        self.status = "running"
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self.scheduler_comm.send(message)

    def _receive(self, message: dict[str, Any]) -> None:
        message = dict(message)
        self._stream_handlers[message.pop("op")](**message)

    def _send_to_scheduler(self, msg: dict[str, Any]) -> None:
        message = {key: value for key, value in msg.items() if key != "client"}
        if self.simulation.loop.is_closed():
            return
        if self.status == "running":
            self.scheduler_comm.send(message)
        else:
            self._unsent.append(message)

    def _add_callback(self, callback: Callable[..., Any], *args: Any) -> None:
        """As Tornado does, run what a coroutine function returns."""

        def call() -> None:
            result = callback(*args)
            if inspect.iscoroutine(result):
                self.process.spawn(result)

        if not self.simulation.loop.is_closed():
            self.simulation.loop.call_soon(call)


class SchedulerRpc(Rpc):
    """Calls of a client to the scheduler, which fail while it is not connected."""

    def __init__(self, client: SimulatedClient) -> None:
        super().__init__(client.simulation.network, client.process, client.simulation.main.address)
        self._client = client

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        call = super().__getattr__(operation)

        async def connected(**message: Any) -> Any:
            if self._client.status != "running":
                raise CommClosedError("not connected")
            return await call(**message)

        return connected


def as_completed(futures: Iterable[Future], loop: Any = None) -> Iterator[Future]:
    """In place of Dask's function, which waits in real time."""
    futures = list(futures)

    async def first() -> list[Future]:
        waiting = [asyncio.ensure_future(future._state.wait()) for future in futures]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        ended = [future for future, wait in zip(futures, waiting, strict=True) if wait.done()]
        for wait in waiting:
            wait.cancel()
        return ended

    yield from futures[0].client.sync(first)
