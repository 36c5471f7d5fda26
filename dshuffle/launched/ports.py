"""Where the ranks of a job find rank 0's scheduler, with nothing but the variables of their launcher.

All ranks derive the same ports from the name of their job. Rank 0 listens on the first one that is free, and the others
ask on all of them whether the scheduler of their job is there. So other programs and other jobs may have some of these
ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from distributed import Security
from distributed.comm.addressing import unparse_host_port
from distributed.core import rpc
from distributed.utils import get_ip, get_ip_interface

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.launched.launcher import LOOPBACK, Place, is_loopback
from dshuffle.launched.secret import VARIABLE, OtherSecret
from dshuffle.runtime.messages import message_in, within

logger = logging.getLogger(__name__)

LOG_AFTER = 3.0
"""Seconds after which a wait for other ranks says what it waits for; then after twice that time, and so on."""

N_PORTS = 8
"""How many ports a loader has."""

FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Ports are in this range: below those that Linux gives to connections."""

ANSWER_WITHIN = 3.0
"""Seconds that a port has for an answer."""

RESOLVE_WITHIN = 20.0
"""Seconds in which the name of rank 0's host must be known. Some clusters know it only when that host is ready."""

PAUSE = 0.1
"""Seconds between two questions on a port."""

HELLO = "dshuffle_job"
"""The handler of rank 0's scheduler that says whether it is that of a job."""

Terms: TypeAlias = Mapping[str, tuple[str, str]]
"""What the caller of a rank has asked for, by name: what must be the same on all ranks, and how it is shown."""

_open: set[tuple[int, str, int | None, int]] = set()
"""The loaders of this process that are open: rank, job, port, and number among those that are alike."""

_opening = threading.Lock()


@contextlib.contextmanager
def ports_of(place: Place, port: int | None) -> Iterator[list[int]]:
    """The ports of a loader while it is open, in the order in which rank 0 tries them.

    Two loaders that are open at once have different ports. So all ranks must open them in the same order.
    """
    if port is not None and as_integer("port", port, 1) > 65535:
        raise InvalidParameter.of("port", port, "in [1, 65535]")
    if port is None and not place.job:
        hint = "Give the same free port to all ranks, and another one to each job."
        raise InvalidParameter.of("port", port, "an integer if no launcher says to which job a rank belongs", hint)
    with _opening:
        number = 0
        while (loader := (place.rank, place.job, port, number)) in _open:
            if port is not None:
                hint = "Give each loader of a script a port of its own, or close the other one before."
                raise InvalidParameter.of("port", port, "another one: a loader of this process is open on it", hint)
            number += 1
        _open.add(loader)
    try:
        job = f"{place.job}; loader {number}" if number else place.job
        yield [port] if port is not None else [_port(f"{job}; {attempt}") for attempt in range(N_PORTS)]
    finally:
        _open.discard(loader)


def _port(text: str) -> int:
    return FIRST_PORT + int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % (LAST_PORT - FIRST_PORT)


def job_key(place: Place, ports: Sequence[int]) -> str:
    """What the ranks of a job show each other, so that none of them meets another job."""
    return hashlib.sha256(f"{place.job}; ports {list(ports)}".encode()).hexdigest()


def free_port(host: str, ports: Sequence[int]) -> int:
    """The first port that can be listened on. Dask would not say why a scheduler does not start."""
    for port in ports:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Dask's sockets have it
            try:
                probe.bind((host, port))
                probe.listen()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    listed = ", ".join(map(str, ports))
    raise ClusterError(f"rank 0 cannot listen on {host}: these ports are in use: {listed}. Give a free one with port=")


async def hosts_of(place: Place, interface: str | None) -> tuple[str, str]:
    """The address on which this rank listens, and the one at which it asks for rank 0."""
    if place.on_one_host:
        return LOOPBACK, LOOPBACK
    rank_0 = await _resolved(place)
    if interface is not None:
        try:
            own: str = get_ip_interface(interface)
        except ValueError as error:
            raise InvalidParameter.of("interface", interface, f"a network interface of this host ({error})") from error
    else:
        own = get_ip(rank_0)
        # On rank 0's host it may be a loopback address, because many systems resolve their own name to 127.0.1.1. Then
        # it is the address that leads to other networks.
        own = get_ip() if is_loopback(own) else own
    if is_loopback(own):
        raise ClusterError(
            f"rank {place.rank} finds no address at which other hosts reach it: here, {place.address} is a loopback "
            "address. Give interface=, or address='127.0.0.1' if all ranks are on this host",
            transient=False,
        )
    return own, own if is_loopback(rank_0) else rank_0


async def _resolved(place: Place) -> str:
    """The IP address of rank 0's host."""
    loop = asyncio.get_running_loop()
    end = loop.time() + RESOLVE_WITHIN
    while True:
        try:
            # SOCK_STREAM, because some systems refuse to resolve without a type
            found = await loop.getaddrinfo(place.address, None, type=socket.SOCK_STREAM)
            return str(found[0][4][0])
        except (OSError, UnicodeError) as error:
            if loop.time() > end:
                raise ClusterError(
                    f"rank {place.rank} does not find the host of rank 0: the name {place.address!r} is not known here "
                    f"({error}). Set MASTER_ADDR, or address=, to a name or an IP address that all hosts know. With "
                    "srun --kill-on-bad-exit=1, the other ranks end as well",
                    transient=False,
                ) from error
        await asyncio.sleep(PAUSE)


async def find_scheduler(
    place: Place, host: str, ports: Sequence[int], terms: Terms, protocol: str, security: Security, seconds: float
) -> str:
    """The address of the scheduler of a job, on a host."""
    hello = {"key": job_key(place, ports), "rank": place.rank, "world_size": place.world_size, "terms": dict(terms)}
    loop, log_after = asyncio.get_running_loop(), LOG_AFTER
    began = loop.time()
    while True:
        other_secret = None
        for port in ports:
            address = f"{protocol}://{unparse_host_port(host, port)}"
            try:
                # Dask would try to connect for all of its time, also if the port is closed.
                _, writer = await within(ANSWER_WITHIN, asyncio.open_connection(host, port))
                writer.close()
                answer = await within(2 * ANSWER_WITHIN, _ask(address, security, hello))
            except OtherSecret:
                other_secret = port
            except (OSError, MemoryError, ValueError):
                pass  # the port is closed, or belongs to another program, which speaks another language
            else:
                is_answer = isinstance(answer, dict) and answer.get("status") in ("OK", "error")
                if is_answer and message_in(answer, bool, "the scheduler of rank 0"):
                    return address
        waited = loop.time() - began
        if other_secret is not None and waited >= min(LOG_AFTER, seconds):
            raise ClusterError(
                f"rank {place.rank} has another secret than rank 0 on {place.address}, port {other_secret}: their "
                "hosts do not share this user's home, or another user's job is there.\n"
                f"Set {VARIABLE} to the same 16 or more random characters on all ranks, or give another port=",
                transient=False,
            )
        if waited >= seconds:
            raise ClusterError(
                f"rank {place.rank} did not find rank 0 on {place.address} within {seconds:g} s (ports "
                f"{', '.join(map(str, ports))}). Look whether rank 0 runs and calls dshuffle.spmd as well, and whether "
                "this host reaches it there; address= and port= give another address. With srun --kill-on-bad-exit=1, "
                "a rank that fails ends the others as well"
            )
        if waited >= log_after:
            logger.warning("dshuffle: rank %d has waited %.0f s for rank 0 on %s", place.rank, waited, place.address)
            log_after = 2 * waited
        await asyncio.sleep(PAUSE)


async def _ask(address: str, security: Security, hello: Mapping[str, Any]) -> Any:
    arguments = security.get_connection_args("worker")
    async with rpc(address, timeout=ANSWER_WITHIN, connection_args=arguments) as scheduler:
        return await getattr(scheduler, HELLO)(**hello)
