"""The simulated network: calls between processes, and streams of messages, with faults."""

from __future__ import annotations

import asyncio
import math
import pickle
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from distributed.comm.core import CommClosedError
from distributed.protocol.pickle import loads
from distributed.protocol.serialize import Serialize, ToPickle

from .processes import Process
from .virtual_time import VirtualLoop


class Network:
    """What connects processes.

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
        self.loop, self.rates, self.seen = loop, rates, seen
        self.rng: random.Random = loop.rng
        self.processes: dict[str, Process] = {}
        self.reliable: set[str] = set()  # processes whose messages are not lost: see Stream
        self.cut: set[frozenset[str]] = set()  # pairs that cannot reach each other

    def add(self, address: str, *, reliable: bool = False) -> Process:
        """Start a process."""
        process = self.processes[address] = Process(address, self.loop)
        if reliable:
            self.reliable.add(address)
        return process

    def rpc(self, source: Process) -> RpcPool:
        """What a process calls other processes with."""
        return RpcPool(self, source)

    def happens(self, fault: str) -> bool:
        """Whether a fault strikes a message."""
        happened = self.rng.random() < self.rates.get(fault, 0.0)
        self.seen[fault] += happened
        return happened

    async def call(self, source: Process, target: str, operation: str, message: dict[str, Any]) -> Any:
        """Call a handler of another process, as Dask does: errors of the connection are OSErrors."""
        sent = pickle.dumps({key: unpacked(value) for key, value in message.items() if key != "reply"})
        await self.travel(source.address, target, source)
        handler = self.processes[target].handlers.get(operation)
        if handler is None:
            return None
        work = self.processes[target].spawn(handler(**pickle.loads(sent)))
        if not message.get("reply", True):
            return None
        ended = self.loop.create_future()
        work.add_done_callback(lambda _: ended.cancelled() or ended.set_result(None))
        await ended
        if work.cancelled():
            raise CommClosedError("the other process has died")
        reply = work.result()
        await self.travel(target, source.address, source)
        return self._on_the_wire(reply)

    async def travel(self, source: str, target: str, caller: Process) -> None:
        """Let a message of a call arrive, or not: it may be lost, and processes may be dead, suspended or cut off."""
        reliable = self.reliable & {source, target}
        # A client that leaves gives up a scheduler that does not answer for a few seconds.
        await asyncio.sleep(min(1.0, self.latency()) if reliable else self.latency())
        for end in (source, target):
            process = self.processes[end]
            while self.loop.now < process.stopped_until:
                await asyncio.sleep(process.stopped_until - self.loop.now)
        if source != target and frozenset((source, target)) in self.cut:
            await asyncio.sleep(5)
            raise CommClosedError("cut off")
        if caller.dead:
            await asyncio.get_running_loop().create_future()  # nobody is there to be told
        if self.processes[source].dead or self.processes[target].dead:
            raise CommClosedError("connection refused")
        if not reliable and self.happens("lose"):
            raise CommClosedError("connection reset")

    def latency(self) -> float:
        """Seconds that a message takes."""
        return self.rng.uniform(1, 20) if self.happens("late") else self.rng.expovariate(200)

    def _on_the_wire(self, reply: Any) -> Any:
        if not isinstance(reply, dict):
            return reply
        reply = {key: unpacked(value) for key, value in reply.items()}
        rows = reply.get("rows")
        if isinstance(rows, np.ndarray) and rows.size and self.happens("corrupt"):
            rows.reshape(-1)[self.rng.randrange(rows.size)] ^= 1
        if "packed" in reply and self.happens("corrupt"):  # a short message: checksums, and then rows
            packed = bytearray(reply["packed"])
            packed[-self.rng.randrange(1, math.prod(reply["shape"]) + 1)] ^= 1
            reply["packed"] = bytes(packed)
        return reply


class Rpc:
    """In place of Dask's rpc objects: ``rpc.operation(**message)`` calls a handler of another process."""

    def __init__(self, network: Network, source: Process, target: str) -> None:
        self._network, self._source = network, source
        self.address = target

    def __getattr__(self, operation: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        return lambda **message: self._network.call(self._source, self.address, operation, message)


class RpcPool:
    """In place of Dask's pool of connections. No kernel knows of bytes on their way."""

    def __init__(self, network: Network, source: Process) -> None:
        self.occupied: dict[str, set[Any]] = {}
        self.available: dict[str, set[Any]] = {}
        self._network, self._source = network, source

    def __call__(self, target: str) -> Rpc:
        """What calls handlers of another process."""
        return Rpc(self._network, self._source, target)

    def remove(self, address: str) -> None:
        """There are no connections to close."""


class Stream:
    """In place of Dask's batched streams, one way: messages arrive late, but all of them, and in order.

    Parameters
    ----------
    network, source, target
        Where it leads.
    receive
        Called with each message, in the process that it leads to.
    """

    def __init__(self, network: Network, source: Process, target: Process, receive: Callable[[dict], None]) -> None:
        self._network, self._source, self._target, self._receive = network, source, target, receive
        self._sent: deque[dict[str, Any]] = deque()
        self._pump: asyncio.Task[None] | None = None
        self.is_closed = False

    @property
    def comm(self) -> Stream:
        """What is asked whether the connection is closed."""
        return self

    def closed(self) -> bool:
        """Whether it is."""
        return self.is_closed

    def send(self, *messages: dict[str, Any]) -> None:
        """Send messages."""
        if self.is_closed or self._source.dead:
            return
        self._sent.extend(messages)
        if self._pump is None or self._pump.done():
            self._pump = self._target.spawn(self._deliver())

    async def _deliver(self) -> None:
        pair = frozenset((self._source.address, self._target.address))
        while self._sent and not self.is_closed:
            await asyncio.sleep(self._network.latency())
            while pair in self._network.cut:  # the connection outlives it
                await asyncio.sleep(0.5)
            if self._source.dead or self.is_closed:
                return
            messages = list(self._sent)
            self._sent.clear()
            for message in messages:
                self._receive(message)


class Background:
    """In place of Dask's background tasks."""

    closed = False

    def __init__(self, process: Process) -> None:
        self._process = process

    def call_soon(self, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any) -> None:
        """Run a coroutine."""
        self._process.spawn(work(*args, **kwargs))

    def call_later(self, *_: Any) -> None:
        """Dask forgets its events later, of which there are none."""


def unpacked(value: Any) -> Any:
    """A value as it arrives in another process."""
    if isinstance(value, ToPickle):
        return loads(pickle.dumps(value.data)) if not isinstance(value.data, BaseException) else value.data
    if isinstance(value, Serialize):
        value = value.data
    return value.copy() if isinstance(value, np.ndarray) else value
