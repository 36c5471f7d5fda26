"""When bytes came over a connection: the kernel's own clock, against one that the test keeps."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dshuffle.exchange.comms import Refusal, seconds_since_data
from dshuffle.exchange.endpoints import Receiver
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.mailboxes import Inbox
from dshuffle.exchange.messages import Flow, MessageId


def worker_with(*comms: Any) -> Any:
    return SimpleNamespace(rpc=SimpleNamespace(occupied={"tcp://there": comms}))


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="this system does not say when bytes came")
def test_bytes_of_a_message_that_is_on_its_way_are_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        there, _ = server.accept()
        with there:
            comm = SimpleNamespace(stream=SimpleNamespace(socket=here))
            started = time.monotonic()
            for _ in range(5):  # nobody reads them yet, as Dask has not seen the whole message
                time.sleep(0.1)
                there.send(b"some")
                age = seconds_since_data(worker_with(comm), "tcp://there")
                assert age is not None
                assert age < 0.09
            assert time.monotonic() - started > 0.5
            time.sleep(0.5)
            assert 0.4 < (seconds_since_data(worker_with(comm), "tcp://there") or 0) < 5
            assert seconds_since_data(worker_with(comm), "tcp://elsewhere") is None
        here.close()
        assert seconds_since_data(worker_with(comm), "tcp://there") is None


def test_connections_that_are_no_sockets_say_nothing() -> None:
    comms = SimpleNamespace(), SimpleNamespace(stream=None), SimpleNamespace(stream=SimpleNamespace(socket=None))
    assert seconds_since_data(worker_with(*comms), "tcp://there") is None


@pytest.mark.parametrize("arrives", [True, False])
def test_a_request_has_its_time_since_bytes_came_last(arrives: bool) -> None:
    """A message takes 1 s, and 0.4 s are allowed without bytes."""

    class Slow:
        """A network on which a message takes long."""

        async def fetch(self, message: MessageId) -> Refusal:
            await asyncio.sleep(1)
            return Refusal("it came after all")

        async def acknowledge(self, message: MessageId) -> None:
            raise AssertionError

        def is_local(self, participant: int) -> bool:
            return False

    async def main() -> str:
        jobs, reason = JobQueue(1, "test"), asyncio.get_running_loop().create_future()
        receiver = Receiver(
            Inbox(0, window=1, attempts=1),
            Slow(),
            jobs,
            store=-9,
            report=lambda run_id, text, again: reason.done() or reason.set_result(text),
            timeout=0.4,
            open_gate=lambda run_id, gate: None,
        )
        receiver.begin(1, {1: Flow.evenly(0, 2, at_most=2)}, asyncio.get_running_loop().create_future())
        while not reason.done():
            await asyncio.sleep(0.05)
            receiver.hear({1: 0.05} if arrives else {2: 0.05})
            if receiver._inbox.outstanding and receiver._requests == {}:
                break  # it has given up asking, and reads the rows instead
        await receiver.close()
        await jobs.close()
        return reason.result() if reason.done() else "no reply"

    threads = threading.active_count()
    said = asyncio.run(main())
    assert ("it came after all" in said) == arrives
    assert threading.active_count() <= threads + 1
