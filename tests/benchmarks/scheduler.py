"""What a session costs the scheduler, with thousands of members that only answer.

    python tests/benchmarks/scheduler.py [--members 64 --members 1024] [--epochs 5]

The scheduler plugin is the real one, with its coordinator and its messages: each is serialised and read as Dask does,
and each member votes and answers with the figures of a real one. Members and network take no time here: what they
compute is not counted. So the figures are what the scheduler computes in each phase, without its sockets: processor
seconds, the peak of memory that Python allocates, and the largest message.

Phases: the session is opened; epochs without tasks (the median, and apart from it the orders of one exchange); each
member gives a sign of life during an exchange, and has heard all others; a worker is lost while rows are exchanged, and
another one takes its rank; the session is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import pickle
import statistics
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from distributed import Status
from distributed.protocol import dumps, loads

from dshuffle.planning import Choices, Remainder
from dshuffle.planning.remainder import SampleDigest
from dshuffle.records import Measures
from dshuffle.rows import RowLayout
from dshuffle.runtime.messages import CommitReply, Counts, Report, TrainingTime, Vote, to_fields
from dshuffle.runtime.scheduler.coordinator import Coordinator
from dshuffle.runtime.scheduler.scheduler_plugin import DShuffleScheduler
from dshuffle.runtime.session_spec import PLUGIN, PROTOCOL, DatasetReference, SessionOptions, SessionRequest
from dshuffle.runtime.settings import Settings
from dshuffle.runtime.worker.worker_plugin import MOST_HEARD

ROWS = 244_141
"""Rows of a member."""

MEMBERS = (64, 256, 1024, 4096)

MEMBER_SECONDS, EPOCH_SECONDS = 0.002, 0.020
"""Most processor seconds of an epoch: for each member, and beside these."""

LARGEST_MESSAGE = 10**6
"""Most bytes of a message."""


class Phase:
    """What the scheduler did in a phase."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.peak_bytes = self.sent_bytes = self.largest_bytes = self.messages = 0


class Cluster:
    """A scheduler without sockets, and members that answer at once, and vote ready after the order to begin."""

    def __init__(self, count: int) -> None:
        self.workers: dict[str, Any] = {}
        self.handlers: dict[str, Any] = {}
        self.extensions: dict[str, Any] = {}
        self.tasks: dict[str, Any] = {}
        self.clients = {"client": None}
        self.client_comms: dict[str, Any] = {}
        self.worker_plugins: dict[str, Any] = {}
        self.http_application = SimpleNamespace(applications=[], add_handlers=lambda *_: None)
        self.phase = Phase()
        self.votes = True
        self._members_seconds = 0.0
        self._numbers = itertools.count()
        for _ in range(count):
            self.join()

    def join(self) -> str:
        """Add a worker."""
        number = next(self._numbers)
        host = f"10.0.{number >> 8}.{number & 255}"
        address = f"tcp://{host}:40000"
        self.workers[address] = SimpleNamespace(
            address=address, name=number, host=host, nanny=f"tcp://{host}:40001", resources={}, status=Status.running,
            processing={},
        )  # fmt: skip
        return address

    async def register_worker_plugin(self, *_: Any, **__: Any) -> None:
        """Every worker is set up."""

    async def broadcast(self, *, msg: dict[str, Any], workers: list[str], on_error: str) -> dict[str, Any]:
        """Call a handler of a worker."""
        message = dict(msg)
        return {workers[0]: await getattr(self.rpc(workers[0]), message.pop("op"))(**message)}

    def rpc(self, address: str) -> Any:
        """A member that can be called."""
        return Member(self, address)

    def send(self, message: Any) -> list[Any]:
        """Frames of a message of the scheduler, which counts."""
        frames = dumps(message)
        nbytes = sum(memoryview(frame).nbytes for frame in frames)
        self.phase.messages += 1
        self.phase.sent_bytes += nbytes
        self.phase.largest_bytes = max(self.phase.largest_bytes, nbytes)
        return frames

    def outside(self, work: Callable[[], Any]) -> Any:
        """Do what is not the scheduler's work."""
        began = time.process_time()
        try:
            return work()
        finally:
            self._members_seconds += time.process_time() - began

    async def measured(self, work: Awaitable[Any], *, memory: bool = False) -> Phase:
        """What the scheduler does until some work has ended. Watching memory takes time, so seconds are left out."""
        self.phase, self._members_seconds = Phase(), 0.0
        if memory:
            tracemalloc.start()
        began = time.process_time()
        await work
        self.phase.seconds = time.process_time() - began - self._members_seconds
        if memory:
            self.phase.seconds, self.phase.peak_bytes = 0.0, tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return self.phase

    @property
    def coordinator(self) -> Coordinator:
        """The one session."""
        [coordinator] = self.extensions[PLUGIN].coordinators.values()
        return coordinator


class Member:
    """A worker as the scheduler calls it."""

    def __init__(self, cluster: Cluster, address: str) -> None:
        self._cluster, self._address = cluster, address

    def __getattr__(self, op: str) -> Any:
        async def answer(**message: Any) -> Any:
            cluster = self._cluster
            frames = cluster.send({"op": op, **message})
            await asyncio.sleep(0)  # all are on the way at the same time
            del frames
            if op == "dshuffle_begin" and cluster.votes:
                asyncio.get_running_loop().call_soon(self._vote, message["run_id"])
            reply = cluster.outside(lambda: dumps(self._reply(op)))
            return loads(reply)

        return answer

    def _reply(self, op: str) -> dict[str, Any]:
        if op == "dshuffle_protocol":
            return {"protocol": PROTOCOL, "is_set_up": True}
        reply: dict[str, Any] = {"status": "OK"}
        if op == "dshuffle_commit":
            measures = Measures(wire_sent_bytes=(ROWS,), wire_received_bytes=(ROWS,), transfer_seconds=1.0)
            reply["message"] = to_fields(
                CommitReply(report=Report(measures=measures, training=TrainingTime(seconds=1.0), held=ROWS))
            )
        return reply

    def _vote(self, run_id: int) -> None:
        cluster = self._cluster
        coordinator = cluster.coordinator
        rank = next((rank for rank, at in coordinator.addresses.items() if at == self._address), None)
        if rank is None:
            return
        message = loads(cluster.outside(lambda: dumps(self._vote_message(run_id, rank))))
        coordinator.vote(**message)

    def _vote_message(self, run_id: int, rank: int) -> dict[str, Any]:
        digest = SampleDigest(ROWS, 2**60 + rank, 2**63 + rank, 2**64 - 1 - rank)
        rows = dict.fromkeys(("packets", "needed", "expected", "leaving", "rows"), ROWS)
        vote = to_fields(Vote(counts=Counts(digest=12345, drawn=digest, due=digest, **rows)))
        return {
            "run_id": run_id,
            "participant": rank,
            "vote": vote,
        }


def request(count: int, number: int) -> SessionRequest:
    """A session on a dataset that nobody opens."""
    layout = RowLayout.of({"x": (np.dtype("f8"), (100,))})
    return SessionRequest(
        session_id=f"session{number}",
        client_id="client",
        dataset=DatasetReference(count * ROWS, layout, "identity", b"dataset" * 100),
        choices=Choices("global"),
        deliveries={"peer": 0.0},
        options=SessionOptions(),
        settings=Settings(),
        start=Remainder(0, ()),
    )


async def session(count: int, epochs: int, *, memory: bool) -> dict[str, Phase]:
    """The phases of a session."""
    cluster = Cluster(count)
    plugin = DShuffleScheduler()
    await plugin.start(cluster)

    async def epoch(number: int) -> None:
        await plugin.coordinators["session0"].advance(number)
        await asyncio.gather(*cluster.coordinator.tasks)

    async def exchange_orders() -> None:
        cluster.votes = False
        await cluster.coordinator.begin()
        await asyncio.gather(*cluster.coordinator.tasks)

    async def signs() -> None:
        for rank in range(count):
            heard = dict.fromkeys(range(min(count, MOST_HEARD)), 1.0)
            sign = {"participant": rank, "heard": heard}
            plugin.coordinators["session0"].alive(**loads(cluster.outside(lambda sign=sign: dumps(sign))))

    async def loss() -> None:
        cluster.votes = True
        address = cluster.coordinator.addresses[0]
        cluster.join()
        del cluster.workers[address]
        plugin.remove_worker(cluster, address, stimulus_id="lost")
        await cluster.coordinator.advance(epochs)
        await asyncio.gather(*cluster.coordinator.tasks)

    opening = plugin.open("session0", pickle.dumps(request(count, 0)), PROTOCOL)
    phases = {"open": await cluster.measured(opening, memory=memory)}
    every = [await cluster.measured(epoch(number), memory=memory) for number in range(epochs)]
    phases["epoch"] = every[-1]
    phases["epoch"].seconds = statistics.median(phase.seconds for phase in every)
    phases["orders"] = await cluster.measured(exchange_orders(), memory=memory)
    phases["signs"] = await cluster.measured(signs(), memory=memory)
    phases["loss"] = await cluster.measured(loss(), memory=memory)
    phases["close"] = await cluster.measured(plugin.close_session("session0"), memory=memory)
    return phases


def measure(count: int, epochs: int) -> dict[str, Phase]:
    """Each phase, once for its seconds and once for its memory."""
    phases = asyncio.run(session(count, epochs, memory=False))
    for name, phase in asyncio.run(session(count, 1, memory=True)).items():
        phases[name].peak_bytes = phase.peak_bytes
    return phases


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, action="append", help=f"Default: {', '.join(map(str, MEMBERS))}.")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(argv)
    results: dict[str, Any] = {}
    print("| members | phase | processor | for each member | memory | sent | largest message |")
    print("|---|---|---|---|---|---|---|")
    for count in options.members or MEMBERS:
        phases = measure(count, options.epochs)
        results[str(count)] = {name: vars(phase) for name, phase in phases.items()}
        for name, phase in phases.items():
            print(
                f"| {count:,} | {name} | {phase.seconds:.3f} s | {1e3 * phase.seconds / count:.2f} ms "
                f"| {phase.peak_bytes / 1e6:.1f} MB | {phase.sent_bytes / 1e6:.1f} MB "
                f"| {phase.largest_bytes / 1e3:.1f} kB |"
            )
        if phases["epoch"].seconds > MEMBER_SECONDS * count + EPOCH_SECONDS:
            print(f"An epoch takes more than {MEMBER_SECONDS} s for each of {count:,} members and {EPOCH_SECONDS} s.")
        if max(phase.largest_bytes for phase in phases.values()) > LARGEST_MESSAGE:
            print(f"A message is longer than {LARGEST_MESSAGE / 1e6} MB.")
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
