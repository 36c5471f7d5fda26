"""Acknowledgements travel with the next request to the same sender, or at once, and are not lost with a request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Status

from dshuffle.exchange.comms import DaskNetwork
from dshuffle.exchange.messages import MessageId


class FakeWorker:
    """A worker whose rpc notes what is sent."""

    address = "here"
    status = Status.running

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[tuple[int, ...]]]] = []
        self.broken = False
        self._ongoing_background_tasks = SimpleNamespace(call_soon=lambda fn, *args: asyncio.ensure_future(fn(*args)))

    def rpc(self, address: str) -> Any:
        async def dshuffle_fetch(acknowledged: list[tuple[int, ...]], **_: Any) -> dict[str, str]:
            if self.broken:
                raise OSError("cut off")
            self.sent.append(("fetch", list(acknowledged)))
            return {"status": "OK"}

        async def dshuffle_acknowledge(acknowledged: list[tuple[int, ...]], **_: Any) -> None:
            self.sent.append(("acknowledge", list(acknowledged)))

        return SimpleNamespace(dshuffle_fetch=dshuffle_fetch, dshuffle_acknowledge=dshuffle_acknowledge)


def play(scenario: Any) -> list[tuple[str, list[tuple[int, ...]]]]:
    async def main() -> list[tuple[str, list[tuple[int, ...]]]]:
        worker = FakeWorker()
        addresses = {0: "here", 1: "there", 2: "elsewhere"}
        here: Any = None
        network = DaskNetwork(worker, "s", addresses, serve_here=here, acknowledge_here=here)  # type: ignore[arg-type]
        await scenario(worker, network)
        await asyncio.sleep(0.01)
        return worker.sent

    return asyncio.run(main())


def message(sender: int, sequence: int) -> MessageId:
    return MessageId(1, sender, 0, sequence)


def test_with_the_next_request_to_the_same_sender() -> None:
    async def scenario(worker: FakeWorker, network: DaskNetwork) -> None:
        await network.acknowledge(message(1, 0))
        await asyncio.create_task(network.fetch(message(1, 1)))

    assert play(scenario) == [("fetch", [(1, 1, 0, 0)])]


def test_at_once_if_the_next_request_goes_elsewhere() -> None:
    async def scenario(worker: FakeWorker, network: DaskNetwork) -> None:
        await network.acknowledge(message(1, 0))
        await asyncio.create_task(network.fetch(message(2, 0)))

    assert sorted(play(scenario)) == [("acknowledge", [(1, 1, 0, 0)]), ("fetch", [])]


def test_again_if_the_request_failed() -> None:
    async def scenario(worker: FakeWorker, network: DaskNetwork) -> None:
        await network.acknowledge(message(1, 0))
        worker.broken = True
        with pytest.raises(OSError, match="cut off"):
            await asyncio.create_task(network.fetch(message(1, 1)))

    assert play(scenario) == [("acknowledge", [(1, 1, 0, 0)])]


def test_not_by_a_worker_that_closes() -> None:
    async def scenario(worker: FakeWorker, network: DaskNetwork) -> None:
        await network.acknowledge(message(1, 0))
        worker.status = Status.closing

    assert play(scenario) == []
