"""How a rank finds the others with nothing but the variables of its launcher, and who may connect to the ranks.

torchrun, srun and mpirun say which rank a process is. All ranks derive the same port from what they say about the job.
Rank 0 listens there, and the others connect until they have found the scheduler of their job.

Dask unpickles what whoever connects sends. So before Dask sees a connection, its ends show each other that they belong
to the same job, and that they know the secret of its user: each sends the name of the job and random bytes, and a
digest of the other's random bytes with the secret. What is sent afterwards is not encrypted; TLS does that.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import itertools
import logging
import multiprocessing
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import dask
from distributed import Security
from distributed.comm.addressing import unparse_host_port
from distributed.comm.core import FatalCommClosedError
from distributed.comm.registry import backends
from distributed.comm.tcp import TCPBackend, TCPConnector, TCPListener, TLSConnector, TLSListener
from distributed.utils import ensure_ip, get_ip
from tornado.iostream import IOStream

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.private_files import user_key
from dshuffle.runtime.messages import within

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

LOG_AFTER = 3.0
"""Seconds after which a wait for other ranks says what it waits for; then after twice that time, and so on."""

FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Derived ports are in this range: below those that Linux gives to connections."""

ANSWER_WITHIN, PROVE_WITHIN = 3.0, 10.0
"""Seconds that a port has for an answer, and whoever connects to show that it knows the secret."""

PAUSE = 0.1
"""Seconds between two looks at the port of rank 0."""

FREE_WITHIN = 10.0
"""Seconds in which rank 0's port must be free. Children of a rank that was killed may hold it for some."""

VARIABLE = "DSHUFFLE_SECRET"
"""Environment variable with a secret, for hosts that do not share a home directory."""

LEAST_LENGTH = 16
"""Characters of a secret. Somebody who sees a digest on the network could try all short ones."""

CONNECTS, LISTENS = b"connects", b"listens"
"""The two ends. They are in the digests, so that an end cannot send back the digest that it has received."""

_open: set[tuple[Place, int | None, int]] = set()
"""The loaders of this process that are open: place, port, and number among those that are alike."""


class Launcher(NamedTuple):
    """The variables of a launcher.

    ``rank`` and ``world_size`` together say that it has started a process. ``local_size`` is the number of processes on
    this host, for srun on each node, and ``hosts`` a list that begins with rank 0's host, if ``MASTER_ADDR`` does not
    say it. Those of ``job`` together tell the jobs of a host apart.
    """

    name: str
    rank: str
    world_size: str
    local_size: str
    job: tuple[str, ...]
    hosts: str = ""


TORCHRUN = Launcher(
    "torchrun",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
)
OPEN_MPI = Launcher(
    "mpirun of Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
)
MPICH = Launcher("mpiexec of MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ("PMI_JOBID",))
SRUN = Launcher(
    "srun",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "SLURM_STEP_NODELIST",
)
LAUNCHERS = TORCHRUN, OPEN_MPI, MPICH, SRUN
"""In this order: mpirun may start its processes through srun, and torchrun may be started by either.

For srun, the variables are those of a job step, not of the job: a batch script without srun has a ``SLURM_PROCID``, and
is one process.
"""


class Place(NamedTuple):
    """The place of this process in its job: rank, number of ranks, of those on this host as far as it is known, the
    address of rank 0's host, which is a loopback address if all ranks are on it, and what all processes of the job have
    in common, and no other job of the host; empty if that is not known.
    """

    rank: int
    world_size: int
    local_size: int
    address: str
    job: str


def place_of(
    variables: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
) -> Place:
    """The place of a process, from values of the user and the variables of its launcher."""
    launcher = _launcher(variables)
    if rank is None and world_size is None:
        if launcher is not None:
            texts: Any = [variables.get(name, "") for name in (launcher.rank, launcher.world_size)]
            rank, world_size = (int(text) if text.isdecimal() else text for text in texts)
        elif multiprocessing.parent_process() is not None:
            hint = "Give rank=, world_size= and a free port= to all processes; rank=0, world_size=1 if it is alone."
            raise InvalidParameter.because("rank", "multiprocessing has started this process without one", hint)
        else:
            logger.warning("dshuffle: this process is the only rank of its job, because no launcher has started it")
            rank, world_size = 0, 1
    hint = "Give both rank and world_size, or start the script with a launcher, which sets both."
    world_size, rank = as_integer("world_size", world_size, 1, hint), as_integer("rank", rank, 0, hint)
    if rank >= world_size:
        raise InvalidParameter.of("rank", rank, f"below world_size={world_size}")
    local_size = 0 if launcher is None else _local_size(launcher, variables)
    # With another number of ranks, the launcher has started a part of the job, and its variables describe this part.
    is_whole = launcher is not None and variables.get(launcher.world_size) == str(world_size)
    if address is None:
        alone = world_size == 1 or (is_whole and local_size == world_size)
        address = LOOPBACK if launcher is None or alone else _first_host(launcher, variables)
    elif not isinstance(address, str) or not address or "://" in address:
        raise InvalidParameter.of("address", address, "the name or IP address of the host of rank 0")
    host, job = LOOPBACK if is_loopback(address) else address, ""
    if launcher is not None and is_whole:
        job = "; ".join(f"{name}={variables[name]}" for name in launcher.job if name in variables)
    return Place(rank, world_size, local_size or (world_size if host == LOOPBACK else 1), host, job)


def _launcher(variables: Mapping[str, str]) -> Launcher | None:
    """The launcher of this process: the first one with both variables, as a job script may export ``WORLD_SIZE``."""
    found = [each for each in LAUNCHERS if {each.rank, each.world_size} <= variables.keys()]
    values = [[variables.get(name) for name in each[1:3]] for each in (SRUN, MPICH)]
    if SRUN in found and values[0] == values[1]:  # srun sets these variables as well, for programs of MPICH
        found.remove(MPICH)
    if not found and {TORCHRUN.rank, TORCHRUN.world_size} & variables.keys():
        return TORCHRUN  # the other variable is missing
    return next(iter(found), None)


def _local_size(launcher: Launcher, variables: Mapping[str, str]) -> int:
    """The number of ranks on this host; 0 if it is not known. Slurm writes 2(x3),1 for four nodes."""
    listed = re.findall(r"(\d+)(?:\(x(\d+)\))?", variables.get(launcher.local_size, ""))
    counts = [int(count) for count, times in listed for _ in range(int(times or 1))]
    node = int(variables.get("SLURM_NODEID", 0)) if launcher is SRUN else 0
    return counts[node] if node < len(counts) else 0


def _first_host(launcher: Launcher, variables: Mapping[str, str]) -> str:
    listed = variables.get("MASTER_ADDR") or variables.get(launcher.hosts)
    if not listed:
        hint = "Give address=, or set MASTER_ADDR: the name or IP address of the host of rank 0."
        raise InvalidParameter.because("address", f"{launcher.name} does not say on which host rank 0 is", hint)
    # A list of hosts, as Slurm writes it: the first one is node07-ib in node[07,09-12]-ib,cpu1.
    return re.sub(r"^([^,\[]*)\[(\w+)[^\]]*\]", r"\1\2", listed).partition(",")[0]


def is_loopback(host: str) -> bool:
    """Whether a host is this one under an address that other hosts cannot use. Names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def port_of(place: Place, port: int | None) -> Iterator[int]:
    """The port of a loader while it is open.

    Two loaders that are open at once have different ports. So all ranks must open them in the same order.
    """
    number = next(number for number in itertools.count() if (place, port, number) not in _open)
    loader = place, port, number
    if place.world_size == 1:
        derived = 0
    elif port is None:
        if not place.job:
            hint = "Give the same free port to all ranks, and another one to each job."
            raise InvalidParameter.of("port", port, "an integer if no launcher says to which job a rank belongs", hint)
        text = f"{place.job}; {place.world_size} ranks; loader {number}"
        digest = hashlib.sha256(text.encode()).digest()
        derived = FIRST_PORT + int.from_bytes(digest[:8]) % (LAST_PORT - FIRST_PORT)
    elif not 0 < (derived := as_integer("port", port)) < 2**16:
        raise InvalidParameter.of("port", port, "in [1, 65535]")
    elif number:
        hint = "Give each loader of a script a port of its own, or close the other one before."
        raise InvalidParameter.of("port", port, "another one: a loader of this process is open on it", hint)
    _open.add(loader)
    try:
        yield derived
    finally:
        _open.discard(loader)


def hosts_of(place: Place) -> tuple[str, str]:
    """The address on which this rank listens, and the one at which it looks for rank 0."""
    if place.address == LOOPBACK:
        return LOOPBACK, LOOPBACK
    try:
        rank_0 = ensure_ip(place.address)
    except (OSError, UnicodeError) as error:
        raise ClusterError(
            f"rank {place.rank} does not find the host of rank 0: the name {place.address!r} is not known here "
            f"({error}). Set MASTER_ADDR, or address=, to a name or an IP address that all hosts know. With "
            "srun --kill-on-bad-exit=1, the other ranks end as well",
            transient=False,
        ) from error
    # Many systems resolve their own name to 127.0.1.1. Then it is the address that leads to other networks.
    own = str(get_ip() if is_loopback(get_ip(rank_0)) else get_ip(rank_0))
    if is_loopback(own):
        raise ClusterError(
            f"rank {place.rank} finds no address at which other hosts reach it: its own name leads to {own}, and "
            "it has no route to another network. Give all ranks address=, an address of rank 0 that others reach",
            transient=False,
        )
    return own, own if is_loopback(rank_0) else rank_0


SET_SECRET = f"Set {VARIABLE} to the same {LEAST_LENGTH} or more random characters on all ranks"


def _secret(*, temporary: bool) -> bytes:
    text = os.environ.get(VARIABLE)
    if text is None:
        try:
            return user_key(temporary=temporary)
        except (OSError, RuntimeError) as error:  # RuntimeError: this user does not have a home
            text = f"there is no secret for the ranks of the job, because {error}.\n{SET_SECRET}"
            raise ClusterError(text, transient=False) from error
    if len(text) < LEAST_LENGTH:
        raise InvalidParameter.because(VARIABLE, f"it has fewer than {LEAST_LENGTH} characters", f"{SET_SECRET}.")
    return text.encode()


class OtherSecret(FatalCommClosedError):
    """The other end of a connection belongs to the same job, and has another secret."""


def job_scheme(place: Place, port: int) -> str:
    """Let Dask know how the ranks of a job connect; the scheme of their addresses.

    With TLS, who may connect is up to the certificates.
    """
    uses_tls = Security().require_encryption or dask.config.get("distributed.comm.default-scheme") == "tls"
    key = b"" if uses_tls else hmac.digest(_secret(temporary=place.address == LOOPBACK), b"dshuffle.spmd", "sha256")
    job = hashlib.sha256(f"{place.job}; port {port}".encode()).digest()
    scheme = f"dshuffle-{job.hex()[:16]}"

    async def prove(stream: IOStream, own: bytes, other: bytes) -> None:
        """Show the other end that this one has the key of the job, and check that the other one has it."""
        nonce = secrets.token_bytes(32)
        await stream.write(job + nonce)
        if await stream.read_bytes(len(job)) != job:
            raise FatalCommClosedError("the other end does not belong to this job")
        other_nonce = await stream.read_bytes(len(nonce))
        await stream.write(hmac.digest(key, own + nonce + other_nonce, "sha256"))
        expected = hmac.digest(key, other + other_nonce + nonce, "sha256")
        if not hmac.compare_digest(await stream.read_bytes(len(expected)), expected):
            raise OtherSecret(
                "the other end has another secret: the hosts do not share this user's home, or another user's job is "
                f"there. {SET_SECRET}, or give another port="
            )

    class JobConnector(TLSConnector if uses_tls else TCPConnector):  # type: ignore[misc]
        prefix = f"{scheme}://"

        async def connect(self, *arguments: Any, **options: Any) -> Any:
            comm = await super().connect(*arguments, **options)
            try:
                await prove(comm.stream, CONNECTS, LISTENS)
            except BaseException:
                comm.abort()
                raise
            return comm

    class JobListener(TLSListener if uses_tls else TCPListener):  # type: ignore[misc]
        prefix = f"{scheme}://"

        async def _prepare_stream(self, stream: IOStream, address: str) -> IOStream | None:
            if await super()._prepare_stream(stream, address) is None:
                return None
            try:
                await asyncio.wait_for(prove(stream, LISTENS, CONNECTS), PROVE_WITHIN)
            except OSError as error:  # TimeoutError among them
                if isinstance(error, OtherSecret):
                    logger.warning("dshuffle: %s was refused: it does not have the secret of this job", address)
                stream.close()
                return None
            return stream

    backend: Any = TCPBackend()
    backend._connector_class, backend._listener_class = JobConnector, JobListener
    backends[scheme] = backend
    return scheme


async def find_port(place: Place, scheme: str, host: str, port: int, seconds: float) -> None:
    """Wait until rank 0 can listen on a port, or until another rank finds the scheduler of the job there."""
    if place.rank:
        failure = f"rank {place.rank} did not find rank 0 on {place.address}, port {port},"
        hint = (
            "Look whether rank 0 runs and calls dshuffle.spmd, too, and whether this host reaches it there; address= "
            "and port= give another address. With srun --kill-on-bad-exit=1, a rank that fails ends the others as well"
        )
    else:
        failure, hint = f"rank 0 could not listen on {host}, port {port}", "Give a free one with port="
        seconds = FREE_WITHIN
    connector: Any = backends[scheme].get_connector()
    loop, log_after = asyncio.get_running_loop(), LOG_AFTER
    began = loop.time()
    while True:
        try:
            if not place.rank:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                return socket.create_server((host, port), family=family).close()
            # Tornado does not always close the socket of a connection that is refused.
            _, writer = await within(ANSWER_WITHIN, asyncio.open_connection(host, port))
            writer.close()
            call = connector.connect(unparse_host_port(host, port), **Security().get_connection_args("worker"))
            comm = await within(ANSWER_WITHIN, call)
            comm.abort()
            return None
        except OSError as error:
            waited = loop.time() - began
            if waited >= seconds or isinstance(error, OtherSecret):
                raise ClusterError(f"{failure} within {waited:.0f} s ({error}). {hint}") from error
        if waited >= log_after:
            logger.warning("dshuffle: %s within %.0f s", failure, waited)
            log_after = 2 * waited
        await asyncio.sleep(PAUSE)
