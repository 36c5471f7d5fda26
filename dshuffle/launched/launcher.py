"""Which rank this process is, as its launcher says: torchrun, mpirun or srun."""

from __future__ import annotations

import ipaddress
import multiprocessing
import re
import sys
from collections.abc import Mapping
from typing import NamedTuple

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter

LOOPBACK = "127.0.0.1"

RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""How often this agent of torchrun has restarted its processes. The agents of other hosts may have other numbers."""


class Launcher(NamedTuple):
    """The variables of a launcher.

    ``rank`` and ``world_size`` together say that it has started a process. Of ``local_size``, the number of processes
    on this host, and of ``address``, rank 0's host or a list of hosts that begins with it, the first one that is set
    counts. Those of ``job`` together tell the jobs of a host apart, and the restarts of a job where all ranks know
    them.
    """

    name: str
    rank: str
    world_size: str
    local_size: tuple[str, ...]
    address: tuple[str, ...]
    job: tuple[str, ...]


TORCHRUN = Launcher(
    "torchrun",
    "RANK",
    "WORLD_SIZE",
    ("LOCAL_WORLD_SIZE",),
    ("MASTER_ADDR",),
    ("TORCHELASTIC_RUN_ID", RESTART_COUNT, "MASTER_ADDR", "MASTER_PORT"),
)
OPEN_MPI = Launcher(
    "mpirun of Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ("MASTER_ADDR",),
    ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
)
MPICH = Launcher(
    "mpiexec of MPICH",
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ("MASTER_ADDR",),
    ("PMI_JOBID",),
)
SRUN = Launcher(
    "srun",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    (),
    ("MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURM_LAUNCH_NODE_IPADDR"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)
LAUNCHERS = TORCHRUN, OPEN_MPI, MPICH, SRUN
"""In this order: mpirun may start its processes through srun, and torchrun may be started by either.

For srun, the variables are those of a job step, not of the job: a batch script without srun has a ``SLURM_PROCID``, and
is one process.
"""


class Place(NamedTuple):
    """The place of this process in its job: rank, number of ranks, of those on this host as far as it is known, the
    address of rank 0's host, and what all processes of the job have in common, and no other job of the host; empty if
    that is not known.
    """

    rank: int
    world_size: int
    local_size: int
    address: str
    job: str

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are on this host, as far as that is known."""
        return self.address == LOOPBACK


def place_of(
    variables: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
) -> Place:
    """The place of a process, from values of the user and the variables of its launcher."""
    launcher = _launcher(variables)
    if (rank is None) != (world_size is None):
        name, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise InvalidParameter.because(name, f"{missing} is not given", f"Give both {name} and {missing}, or neither.")
    if rank is None or world_size is None:
        if launcher is None:
            return Place(0, 1, 1, LOOPBACK, "")
        rank = _number(launcher, launcher.rank, variables, 0)
        world_size = _number(launcher, launcher.world_size, variables, 1)
    world_size = as_integer("world_size", world_size, 1)
    if as_integer("rank", rank, 0) >= world_size:
        raise InvalidParameter.of("rank", rank, f"below world_size={world_size}")
    local_size = 0 if launcher is None else _local_size(launcher, variables)
    # With another number of ranks, the launcher has started a part of the job, and its variables describe this part.
    is_whole = launcher is not None and variables.get(launcher.world_size) == str(world_size)
    alone = is_whole and local_size == world_size
    host = _host_of_rank_0(launcher, variables, address, alone=alone or world_size == 1)
    job = ""
    if launcher is not None and is_whole:  # on several hosts without the restarts, which each agent of torchrun counts
        names = [name for name in launcher.job if name in variables and (alone or name != RESTART_COUNT)]
        parts = [launcher.name, *(f"{name}={variables[name]}" for name in names), f"{world_size} ranks"]
        job = "; ".join(parts) if names else ""
    return Place(rank, world_size, local_size or (world_size if host == LOOPBACK else 1), host, job)


def is_launched(variables: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process."""
    return _launcher(variables) is not None


def check_process_group(world_size: int) -> None:
    """Refuse a job that has not the size of the process group of PyTorch, if there is one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size != world_size:
            hint = "Give rank=dist.get_rank(), world_size=dist.get_world_size() and a free port=, alike on all ranks."
            raise InvalidParameter.of("world_size", world_size, f"{size}, as the process group of PyTorch has it", hint)


def check_alone() -> None:
    """Refuse to take this process for a whole job if another process has started it."""
    if multiprocessing.parent_process() is not None:
        hint = "Give rank=, world_size= and a free port= to all of them; rank=0, world_size=1 if it is the only one."
        raise InvalidParameter.because("rank", "multiprocessing has started this process without one", hint)


def _launcher(variables: Mapping[str, str]) -> Launcher | None:
    """The launcher of this process: the first one with both variables, as a job script may export ``WORLD_SIZE``."""
    found = [each for each in LAUNCHERS if {each.rank, each.world_size} <= variables.keys()]
    if SRUN in found and MPICH in found:  # srun sets these variables as well, for programs of MPICH
        pairs = (SRUN.rank, MPICH.rank), (SRUN.world_size, MPICH.world_size)
        if all(variables[name] == variables[other] for name, other in pairs):
            found.remove(MPICH)
    if not found and {TORCHRUN.rank, TORCHRUN.world_size} & variables.keys():
        return TORCHRUN  # the other variable is missing
    return next(iter(found), None)


def _number(launcher: Launcher, name: str, variables: Mapping[str, str], least: int) -> int:
    text = variables.get(name)
    if text is None:
        other = launcher.world_size if name == launcher.rank else launcher.rank
        hint = f"{launcher.name} sets both. Start the script with it, or give rank and world_size."
        raise InvalidParameter.because(name, f"it is not set, and {other} is", hint)
    if not text.isdecimal() or int(text) < least:
        raise InvalidParameter.of(name, text, f"an integer >= {least}, as {launcher.name} sets it")
    return int(text)


def _local_size(launcher: Launcher, variables: Mapping[str, str]) -> int:
    """The number of ranks on this host; 0 if it is not known. For srun, the mean of all nodes."""
    nodes = variables.get("SLURM_STEP_NUM_NODES", "")
    if launcher is SRUN and nodes.isdecimal() and int(nodes):
        return -(-int(variables[SRUN.world_size]) // int(nodes))
    return next((int(variables[name]) for name in launcher.local_size if variables.get(name, "").isdecimal()), 0)


def _host_of_rank_0(
    launcher: Launcher | None, variables: Mapping[str, str], address: str | None, *, alone: bool
) -> str:
    if address is not None:
        if not isinstance(address, str) or not address or "://" in address:
            raise InvalidParameter.of("address", address, "the name or IP address of the host of rank 0")
        return LOOPBACK if is_loopback(address) else address
    if alone or launcher is None:
        return LOOPBACK
    listed = next(filter(None, map(variables.get, launcher.address)), None)
    if listed is None:
        hint = "Give address=, or set MASTER_ADDR: the name or IP address of the host of rank 0."
        raise InvalidParameter.because("address", f"{launcher.name} does not say on which host rank 0 is", hint)
    # A list of hosts, as Slurm writes it: the first one is node07-ib in node[07,09-12]-ib,cpu1.
    host = re.sub(r"^([^,\[]*)\[(\w+)[^\]]*\]", r"\1\2", listed).partition(",")[0]
    return LOOPBACK if is_loopback(host) else host


def is_loopback(host: str) -> bool:
    """Whether a host is this one under an address that other hosts cannot use. Names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
