"""When bytes came over a connection: the kernel's own clock, against one that the test keeps."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dshuffle.exchange.comms import seconds_since_data


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
