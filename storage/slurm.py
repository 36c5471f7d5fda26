"""Slurm across the hosts of the testbed: the controller on the host "scheduler", and nodes of one core on w1, w2, ...

    python storage/testbed.py slurm
    python storage/testbed.py exec scheduler python tests/benchmarks/slurm.py --shared /some/folder

There is no accounting, and jobs are not confined to their cores or memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import click

import places
from network import Host
from places import Place

PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
MEMORY_MIB = 16_000
"""Memory that every node offers. They all share that of the machine."""

CONFIGURATION = """ClusterName=testbed
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%h
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%h.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
"""


def configuration(folder: Path, controller: Host, nodes: Sequence[Host]) -> str:
    """The file ``slurm.conf``.

    Examples
    --------
    >>> written = configuration(Path("/run/slurm"), Host("scheduler", "10.78.0.2"), [Host("w1", "10.78.0.11")])
    >>> written.splitlines()[-2]
    'NodeName=w1 NodeAddr=10.78.0.11 NodeHostname=w1 CPUs=1 RealMemory=16000 State=UNKNOWN'
    """
    lines = [CONFIGURATION.format(controller=controller.name, address=controller.address, folder=folder)]
    lines += [
        f"NodeName={node.name} NodeAddr={node.address} NodeHostname={node.name} CPUs=1 RealMemory={MEMORY_MIB} "
        "State=UNKNOWN\n"
        for node in nodes
    ]
    return "".join([*lines, "PartitionName=testbed Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"])


def start(folder: Path, controller: tuple[Host, Place], nodes: Sequence[tuple[Host, Place]]) -> str:
    """Start Slurm, wait until all nodes are idle, and return what it says of them.

    Raises
    ------
    click.ClickException
        If a package is missing, Slurm is already running, or a node does not become idle in time.
    """
    places.need_programs(PROGRAMS, "Slurm")
    host, place = controller
    ours = {name: one for name, one in place.state.processes().items() if name.startswith("slurm.")}
    if any(map(places.alive, ours.values())):
        raise click.ClickException("Slurm is already running. `testbed.py down` ends it with the testbed.")
    (folder / "state").mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)  # munged refuses folders that others can write
    key = folder / "munge.key"
    key.unlink(missing_ok=True)
    key.touch(0o400)
    key.write_bytes(secrets.token_bytes(1024))
    written = folder / "slurm.conf"
    written.write_text(configuration(folder, host, [node for node, _ in nodes]))
    files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
    files |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
    options = [f"--{name}={path}" for name, path in files.items()]
    place.start("slurm.munged", "munged", "--foreground", "--force", *options)
    place.await_true("slurm.munged", (folder / "munge.socket").exists, "to make its socket")
    _start(place, host, written, "slurmctld", "-D")
    for node, where in nodes:
        (folder / f"spool-{node.name}").mkdir(exist_ok=True)
        _start(where, node, written, "slurmd", "-D")

    def idle() -> bool:
        question = ("env", f"SLURM_CONF={written}", "sinfo", "--noheader", "--states=idle", "--format=%D")
        return place.succeeds(*question) and place.run(*question).strip() == str(len(nodes))

    place.await_true("slurm.slurmctld", idle, f"to have {len(nodes)} idle nodes")
    return place.run("env", f"SLURM_CONF={written}", "sinfo")


def _start(place: Place, host: Host, written: Path, program: str, *options: str) -> None:
    """Start a daemon under the name of its host, which Slurm needs to know itself."""
    name = "slurm.slurmctld" if program == "slurmctld" else f"slurm.{host.name}"
    line = f"hostname {host.name} && exec {program} {' '.join(options)} -f {written}"
    place.start(name, "unshare", "--uts", "sh", "-c", line, environment={"SLURM_CONF": str(written)})
