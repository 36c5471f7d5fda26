"""What an epoch costs the scheduler, with thousands of members that only answer.

    python tests/benchmarks/scheduler.py [--members 4096] [--epochs 5]

The coordinator of a session is the real one, and so are its messages: each is serialised and read as Dask does, and
each member votes and answers with the figures of a real one. Members and network take no further time here. So the
figures are what the scheduler computes for an epoch, without its sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from types import SimpleNamespace
from typing import Any

from distributed.protocol import dumps, loads

from dshuffle.planning import AutoDelivery, Choices, ShuffleSpec
from dshuffle.planning.sample_digest import SampleDigest
from dshuffle.records import Measures
from dshuffle.runtime.message_fields import to_fields
from dshuffle.runtime.messages import CommitReply, Counts, Report, TrainingTime, Vote
from dshuffle.runtime.scheduler.coordinator import Coordinator
from dshuffle.runtime.session_options import SessionOptions
from dshuffle.runtime.settings import Settings

ROWS = 244_141


class Members:
    """Workers that answer at once, and vote ready after the order to begin."""

    def __init__(self, count: int) -> None:
        self.addresses = {rank: f"tcp://10.0.{rank >> 8}.{rank & 255}:40000" for rank in range(count)}
        self._ranks = {address: rank for rank, address in self.addresses.items()}
        self.coordinator: Coordinator
        self.messages = 0

    def rpc(self, address: str) -> Any:
        return Member(self, self._ranks[address])

    def carried(self, message: dict[str, Any]) -> Any:
        """A message as it arrives."""
        self.messages += 1
        return loads(dumps(message))


class Member:
    def __init__(self, members: Members, rank: int) -> None:
        self._members, self._rank = members, rank

    def __getattr__(self, op: str) -> Any:
        async def answer(**message: Any) -> Any:
            message = self._members.carried({"op": op, **message})
            if op == "dshuffle_begin":
                asyncio.get_running_loop().call_soon(self._vote, message["run_id"])
            reply: dict[str, Any] = {"status": "OK"}
            if op == "dshuffle_commit":
                measures = Measures(wire_sent_bytes=(ROWS,), wire_received_bytes=(ROWS,), transfer_seconds=1.0)
                report = Report(measures=measures, training=TrainingTime(seconds=1.0), held=ROWS)
                reply["message"] = to_fields(CommitReply(report=report))
            return self._members.carried(reply)

        return answer

    def _vote(self, run_id: int) -> None:
        digest = SampleDigest(ROWS, 2**60 + self._rank, 2**63 + self._rank, 2**64 - 1 - self._rank)
        rows = dict.fromkeys(("packets", "needed", "expected", "arriving", "leaving", "rows"), ROWS)
        vote = to_fields(Vote(counts=Counts(digest=12345, drawn=digest, due=digest, **rows)))
        message = {"op": "dshuffle_report", "run_id": run_id, "participant": self._rank, "secret": "", "vote": vote}
        message = self._members.carried(message)
        del message["op"]
        self._members.coordinator.vote(**message)


async def run(count: int, epochs: int) -> list[float]:
    """Processor seconds of each epoch."""
    members = Members(count)
    shuffle = ShuffleSpec(count * ROWS, count, Choices("global"))
    spec = SimpleNamespace(
        session_id="session",
        addresses=members.addresses,
        shuffle=shuffle,
        settings=Settings(),
        options=SessionOptions(),
        secret="",
    )
    scheduler = SimpleNamespace(rpc=members.rpc, workers={})
    there = SimpleNamespace(spec=spec, server_role="")
    coordinator = members.coordinator = Coordinator(scheduler, there, "client", AutoDelivery({"peer": 0.0}))
    for order in coordinator.machine.open(now=0.0):
        coordinator.machine.answered(order, None, now=0.0)
    seconds = []
    for epoch in range(epochs):
        members.messages = 0
        started = time.process_time()
        await coordinator.advance(epoch)
        await asyncio.gather(*coordinator.driver.tasks)
        seconds.append(time.process_time() - started)
    print(f"{count:,} members: {members.messages / count:.1f} messages for each member and epoch")
    return seconds


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(argv)
    seconds = asyncio.run(run(options.members, options.epochs))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"seconds": min(seconds), "all": seconds, "peak_bytes": peak}
    print(f"{found['seconds']:.2f} s of a processor an epoch, {peak / 2**20:.0f} MiB at most in this process")
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
