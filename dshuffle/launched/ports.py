"""On which port the ranks of a job find rank 0's scheduler, with nothing but the variables of their launcher.

All ranks derive the same ports from the name of their job. Rank 0 listens on the first one that is free, and the others
ask on all of them whether the scheduler of their job is there. So other programs and other jobs may have some of these
ports.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import socket
import time
from collections.abc import Sequence
from typing import Any

from distributed import Security
from distributed.comm.addressing import unparse_host_port
from distributed.comm.core import connect

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.launched.launcher import Place
from dshuffle.launched.mailbox import LOG_AFTER
from dshuffle.runtime.replies import message_in, within

logger = logging.getLogger(__name__)

N_PORTS = 8
"""How many ports a job has."""

FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Ports are in this range: below those that Linux gives to connections."""

ANSWER_WITHIN = 3.0
"""Seconds that a port has for an answer."""

PAUSE = 0.2
"""Seconds between two rounds over all ports."""

HELLO = "dshuffle_job"
"""The handler of rank 0's scheduler that says whether it is that of a job."""


def ports_of(place: Place, port: int | None) -> list[int]:
    """The ports of a job, in the order in which rank 0 tries them.

    Raises
    ------
    InvalidParameter
        If the port is not one, or nothing tells this job from others of the same host.

    Examples
    --------
    >>> ports_of(Place(0, 2, 2, "127.0.0.1", "run 17"), None)[:3]
    [22589, 22665, 25402]
    """
    if port is not None:
        if as_integer("port", port, 1) > 65535:
            raise InvalidParameter.of("port", port, "in [1, 65535]")
        return [port]
    if not place.job:
        hint = "Give the same free port to all ranks, and another one to each job."
        raise InvalidParameter.of("port", port, "an integer if no launcher says to which job a rank belongs", hint)
    digests = (hashlib.sha256(f"{place.job}; {number}".encode()).digest() for number in range(N_PORTS))
    return [FIRST_PORT + int.from_bytes(digest[:8]) % (LAST_PORT - FIRST_PORT) for digest in digests]


def job_key(place: Place, ports: Sequence[int]) -> str:
    """What the ranks of a job show each other, so that none of them meets another job."""
    return hashlib.sha256(f"{place.job}; ports {list(ports)}".encode()).hexdigest()


def is_free(host: str, port: int) -> bool:
    """Whether a port can be listened on. Dask does not say why a scheduler does not start, and leaves a socket open."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Dask's sockets have it
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


async def find_scheduler(place: Place, ports: Sequence[int], protocol: str, security: Security, seconds: float) -> str:
    """The address of the scheduler of a job.

    Raises
    ------
    ClusterError
        If it is not there in time.
    InvalidParameter
        If it refuses this rank.
    """
    began, next_message_at = time.monotonic(), LOG_AFTER
    while True:
        addresses = [f"{protocol}://{unparse_host_port(place.address, port)}" for port in ports]
        answers = await asyncio.gather(*(_ask(address, place, ports, security) for address in addresses))
        for address, answer in zip(addresses, answers, strict=True):
            if answer is not None and message_in(answer, bool, "the scheduler of rank 0"):
                return address
        waited = time.monotonic() - began
        if waited > seconds:
            raise ClusterError(
                f"rank {place.rank} did not find rank 0 on {place.address} within {seconds:g} s (ports "
                f"{', '.join(map(str, ports))}). Look whether rank 0 runs and calls dshuffle.spmd as well, and whether "
                "this host reaches it there; address= and port= give another address"
            )
        if waited >= next_message_at:
            logger.warning("dshuffle: rank %d has waited %.0f s for rank 0 on %s", place.rank, waited, place.address)
            next_message_at = 2 * waited
        await asyncio.sleep(PAUSE)


async def _ask(address: str, place: Place, ports: Sequence[int], security: Security) -> Any:
    """Ask on one port. The answer is None if there is nobody, or somebody else."""

    async def ask() -> Any:
        comm = await connect(address, timeout=ANSWER_WITHIN, **security.get_connection_args("worker"))
        try:
            await comm.write(
                {
                    "op": HELLO,
                    "key": job_key(place, ports),
                    "rank": place.rank,
                    "world_size": place.world_size,
                    "reply": True,
                }
            )
            return await within(ANSWER_WITHIN, comm.read())
        finally:
            comm.abort()

    try:
        # Connecting ends by itself. Dask does not close a connection if it is cancelled in between.
        answer = await within(3 * ANSWER_WITHIN, ask())
    except (OSError, MemoryError, ValueError):  # another program answers in another language
        return None
    return answer if isinstance(answer, dict) and answer.get("status") in ("OK", "error") else None
