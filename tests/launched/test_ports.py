"""Ranks find their own rank 0, whatever else listens on the ports that they draw; secrets and TLS."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import socket
import socketserver
import threading

import dask
import psutil
import pytest
from distributed import Scheduler, Security

import dshuffle
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.launched.job import Job
from dshuffle.launched.launcher import Place, place_of
from dshuffle.launched.ports import find_scheduler, ports_of

PLACE = Place(1, 2, 2, "127.0.0.1", "run 17")


def in_event_loop(test):
    """Run a test that is a coroutine. (Dask's gen_test would reset the configuration for all tests that follow.)"""

    @functools.wraps(test)
    def run(*fixtures, **named_fixtures):
        asyncio.run(asyncio.wait_for(test(*fixtures, **named_fixtures), 60))

    return run


class Web(socketserver.StreamRequestHandler):
    """Another program, which answers in another language."""

    def handle(self):
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.slow
def test_other_programs_may_have_the_ports(in_threads, monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": f"{os.getpid()}"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with ports_of(place_of(variables), None) as ports:
        first = ports[0]
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


@pytest.mark.slow
def test_two_jobs_that_derive_the_same_ports(store, in_threads, free_port, eventually, monkeypatch):
    """Rank 0 of the first job waits for its rank 1 meanwhile. The ranks of the second one do not take it for theirs."""
    attempts = itertools.cycle(range(8))
    monkeypatch.setattr("dshuffle.launched.ports._port", lambda text: free_port + next(attempts))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    given = {}

    def run_rank(rank):
        with dshuffle.spmd(store, batch_size=8, rank=rank, world_size=2, timeout=120) as loader:
            given[rank] = sum(len(ids) for ids, _ in next(loader.epochs(1)))

    def rank_0_listens():
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", free_port)) == 0

    rank_0 = threading.Thread(target=run_rank, args=(0,), daemon=True)
    rank_0.start()
    eventually(rank_0_listens, 60)
    monkeypatch.setenv("MASTER_PORT", "2")
    ranks = in_threads(2, lambda loader: sum(len(ids) for ids, _ in next(loader.epochs(1))), port=None)
    assert sorted(ranks) == [51, 52]
    monkeypatch.setenv("MASTER_PORT", "1")
    run_rank(1)
    rank_0.join(60)
    assert sorted(given.values()) == [51, 52]


@pytest.mark.parametrize(
    ("place", "error", "words"),
    [
        (None, ClusterError, "rank 1 did not find rank 0"),
        (Place(0, 2, 2, "127.0.0.1", "run 17; restart 1"), ClusterError, "rank 1 did not find rank 0"),
        (Place(0, 3, 3, "127.0.0.1", "run 17"), InvalidParameter, "world_size=2 is not allowed; it must be 3, as on"),
    ],
)
@in_event_loop
async def test_schedulers_that_are_not_joined(free_port, monkeypatch, caplog, place, error, words):
    """One without a job, one of another job, and one of another number of ranks."""
    monkeypatch.setattr("dshuffle.launched.ports.LOG_AFTER", 0.0)
    async with Scheduler(host="127.0.0.1", port=free_port, dashboard_address=":0") as scheduler:
        if place is not None:
            Job(scheduler, place, [free_port], {})
        with pytest.raises(error, match=words):
            await find_scheduler(PLACE, "127.0.0.1", [free_port], {}, "tcp", Security(), 0.5)
    if error is ClusterError:
        assert "dshuffle: rank 1 has waited 0 s for rank 0 on 127.0.0.1" in caplog.text


@pytest.mark.parametrize("given", [False, True])
def test_tls(in_threads, tmp_path, given):
    """Certificates as a parameter, or those of Dask's configuration and the default scheme."""
    pytest.importorskip("cryptography", reason="Dask needs it to make certificates")
    certificates = Security.temporary()
    settings = {"distributed.comm.default-scheme": "tls"}
    for name, role in (("ca-file", "ca_file"), ("worker.cert", "worker_cert"), ("worker.key", "worker_key")):
        path = tmp_path / name
        path.write_text(getattr(certificates, f"tls_{role}"))
        settings[f"distributed.comm.tls.{name}"] = str(path)
    for role in ("scheduler", "client"):
        for part in ("cert", "key"):
            settings[f"distributed.comm.tls.{role}.{part}"] = settings[f"distributed.comm.tls.worker.{part}"]

    def loop(loader):
        worker = loader._rank.worker
        return worker.address.partition(":")[0], sum(len(ids) for ids, _ in next(loader.epochs(1)))

    with dask.config.set({} if given else settings):
        assert sorted(in_threads(2, loop, security=certificates if given else None)) == [("tls", 51), ("tls", 52)]


@in_event_loop
async def test_an_ipv6_address(free_port):
    try:
        scheduler = await Scheduler(host="[::1]", port=free_port, dashboard_address=":0")
    except OSError:
        pytest.skip("this host has no IPv6")
    async with scheduler:
        Job(scheduler, Place(0, 2, 2, "::1", "run 17"), [free_port], {})
        place = Place(1, 2, 2, "::1", "run 17")
        found = await find_scheduler(place, "::1", [free_port], {}, "tcp", Security(), 5)
        assert found == f"tcp://[::1]:{free_port}"


def test_a_port_that_is_in_use_is_named(store, free_port):
    words = f"these ports are in use: {free_port}. Give a free one with port="
    with (
        socketserver.ThreadingTCPServer(("127.0.0.1", free_port), Web),
        pytest.raises(ClusterError, match=words),
    ):
        dshuffle.spmd(store, batch_size=8, rank=0, world_size=2, port=free_port)


def outer_addresses():
    """The IPv4 addresses of this host that other hosts may reach, and their interfaces."""
    return {
        address.address: name
        for name, listed in psutil.net_if_addrs().items()
        for address in listed
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    }


def http_addresses(loader):
    return {server.http_server.address for server in loader._rank._servers}


@pytest.mark.parametrize("with_interface", [False, True])
def test_an_address_that_is_not_loopback(in_threads, with_interface):
    """As on several hosts: the ranks listen on one interface. HTTP is for this host only."""
    addresses = outer_addresses()
    if not addresses:
        pytest.skip("this host has no other address")
    host, interface = next(iter(addresses.items()))

    def loop(loader):
        worker = loader._rank.worker.address
        http = http_addresses(loader)
        return worker.partition("://")[2].rpartition(":")[0], http, sum(len(ids) for ids, _ in next(loader.epochs(1)))

    ranks = in_threads(2, loop, address=host, interface=interface if with_interface else None)
    assert sorted(ranks) == [(host, {"127.0.0.1"}, 51), (host, {"127.0.0.1"}, 52)]


def test_a_name_that_this_host_resolves_to_loopback(in_threads):
    """Debian resolves the name of a host to 127.0.1.1 there. Workers must have an address for other hosts all the same.

    The resolver takes 127.1 for 127.0.0.1, although it is not written as an IP address.
    """
    if not outer_addresses():
        pytest.skip("this host has no other address")

    def loop(loader):
        return loader._rank.worker.address.partition("://")[2].rpartition(":")[0]

    hosts = in_threads(2, loop, address="127.1")
    assert set(hosts) <= outer_addresses().keys()


@pytest.mark.slow
def test_without_an_address_for_other_hosts_an_interface_is_asked_for(in_threads, monkeypatch):
    monkeypatch.setattr("dshuffle.launched.ports.get_ip", lambda host="": "127.0.1.1")
    errors = in_threads(2, len, address="127.1", timeout=2)
    assert "rank 0 finds no address at which other hosts reach it: here, 127.1" in str(errors[0])
