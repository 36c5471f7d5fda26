"""Ranks find their own rank 0, whatever else listens on the ports that they draw, and with TLS."""

from __future__ import annotations

import os
import socket
import socketserver
import threading

import psutil
import pytest
from distributed import Scheduler, Security
from distributed.utils_test import gen_test

import dshuffle
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.launched.job import Job
from dshuffle.launched.launcher import Place, place_of
from dshuffle.launched.ports import find_scheduler, ports_of

PLACE = Place(1, 2, 2, "127.0.0.1", "run 17")


class Web(socketserver.StreamRequestHandler):
    """Another program, which answers in another language."""

    def handle(self):
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def test_other_programs_may_have_the_ports(in_threads, monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": f"{os.getpid()}"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    first, *_ = ports_of(place_of(variables), None)
    socketserver.ThreadingTCPServer.allow_reuse_address = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", first), Web) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            ranks = in_threads(2, lambda loader: sum(len(ids) for ids, _ in next(loader.epochs(1))), port=None)
        finally:
            server.shutdown()
            thread.join()
    assert sorted(ranks) == [51, 52]


@gen_test()
async def test_the_scheduler_of_another_job_is_not_joined(free_port):
    async with Scheduler(host="127.0.0.1", port=free_port, dashboard_address=":0") as scheduler:
        Job(scheduler, Place(0, 2, 2, "127.0.0.1", "run 17; restart 1"), [free_port])
        with pytest.raises(ClusterError, match="rank 1 did not find rank 0"):
            await find_scheduler(PLACE, [free_port], "tcp", Security(), 0.5)


@gen_test()
async def test_a_rank_of_another_world_size_is_refused(free_port):
    async with Scheduler(host="127.0.0.1", port=free_port, dashboard_address=":0") as scheduler:
        Job(scheduler, Place(0, 3, 3, "127.0.0.1", "run 17"), [free_port])
        with pytest.raises(InvalidParameter, match="world_size=2 is not allowed; it must be 3, as on rank 0"):
            await find_scheduler(PLACE, [free_port], "tcp", Security(), 5)


@gen_test()
async def test_a_scheduler_without_a_job_is_not_joined(free_port):
    async with Scheduler(host="127.0.0.1", port=free_port, dashboard_address=":0"):
        with pytest.raises(ClusterError, match="rank 1 did not find rank 0"):
            await find_scheduler(PLACE, [free_port], "tcp", Security(), 0.5)


def test_tls(in_threads):
    pytest.importorskip("cryptography", reason="Dask needs it to make certificates")

    def loop(loader):
        assert loader._process.address.startswith("tls://")
        return sum(len(ids) for ids, _ in next(loader.epochs(1)))

    assert sorted(in_threads(2, loop, security=Security.temporary())) == [51, 52]


def test_a_port_that_is_in_use_is_named(store, free_port):
    words = f"these ports are in use: {free_port}. Give a free one with port="
    with (
        socketserver.ThreadingTCPServer(("127.0.0.1", free_port), Web),
        pytest.raises(ClusterError, match=words),
    ):
        dshuffle.spmd(store, batch_size=8, rank=0, world_size=2, port=free_port)


@pytest.mark.parametrize("with_interface", [False, True])
def test_an_address_that_is_not_loopback(in_threads, with_interface):
    """As on several hosts: the ranks listen on all interfaces, or on one."""
    addresses = {
        address.address: name
        for name, listed in psutil.net_if_addrs().items()
        for address in listed
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    }
    if not addresses:
        pytest.skip("this host has no other address")
    host, interface = next(iter(addresses.items()))

    def loop(loader):
        worker = loader._process._worker.address
        return worker.partition("://")[2].rpartition(":")[0], sum(len(ids) for ids, _ in next(loader.epochs(1)))

    ranks = in_threads(2, loop, address=host, interface=interface if with_interface else None)
    assert sorted(ranks) == [(host, 51), (host, 52)]
