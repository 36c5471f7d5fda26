"""The testbed's hosts on this machine: create, shape, enter, measure and remove them.

Each host has a network namespace and a mount namespace with its own ``/run``, so that servers with fixed socket names
do not conflict. Mount namespaces have no names, so a bind mount in the testbed's folder keeps each one alive.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import click

import network
import places
import s3
import sharedfs
from network import Host
from places import Place, State, run

FOLDER = Path("/run/dshuffle-testbed")
STATE = State(FOLDER)
SHARED = FOLDER / "shared"
SLURM = FOLDER / "slurm"
HOST_VARIABLE = "DSHUFFLE_TESTBED_HOST"  # tells a process which host it runs on
PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "bash": "bash",
}

# Move the testbed's folder aside, mount a new /run over the old one, and move the folder back.
OWN_RUN = f"mount --rbind {FOLDER} /mnt && mount -t tmpfs run /run && mkdir {FOLDER} && mount --move /mnt {FOLDER}"


def check_machine() -> None:
    """Check the requirements before anything is changed."""
    places.need_root("The testbed", "network namespaces, traffic control and mounts")
    places.need_programs(PROGRAMS, "The testbed")
    if host := os.environ.get(HOST_VARIABLE):
        raise click.ClickException(f"this command runs on host {host} of the testbed; run it outside the testbed")


def is_up() -> bool:
    """Whether a testbed exists, complete or not."""
    return FOLDER.exists() or bool(_namespaces())


def known_hosts() -> list[Host]:
    """Return the hosts of the running testbed.

    Raises
    ------
    click.ClickException
        If no testbed is running.
    """
    hosts = STATE.read().get("hosts")
    if not hosts:
        raise click.ClickException("no testbed is running; start one with `testbed.py up`")
    return [Host(**host) for host in hosts]


def description() -> str:
    """Describe how this cluster is emulated."""
    state = STATE.read()
    rates = state.get("rates", {})
    by_rate: dict[str, list[str]] = {}
    for host in known_hosts():
        by_rate.setdefault(rates.get(host.name, "unknown"), []).append(host.name)
    links = "; ".join(f"{rate}: {', '.join(names)}" for rate, names in by_rate.items())
    services = ", ".join(state.get("services", {})) or "none"
    return (
        f"all hosts are network namespaces of one machine with {os.cpu_count()} processors, on links limited by tc "
        f"({links}); storage services: {services}"
    )


def find(name: str) -> Host:
    """Return a host by name."""
    hosts = {host.name: host for host in known_hosts()}
    if name not in hosts:
        raise click.BadParameter(f"HOST={name!r} is not allowed; it must be one of {', '.join(hosts)}")
    return hosts[name]


def place(host: Host) -> Place:
    """Return the place that runs commands in a host's namespaces and the current folder, with S3 credentials."""
    inside = ("nsenter", f"--net=/run/netns/{host.namespace}", f"--mount={FOLDER}/mounts/{host.name}")
    storage = f"{network.SUBNET}.4"
    variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    variables |= {HOST_VARIABLE: host.name, **s3.environment(storage)}
    if SLURM.exists():
        variables["SLURM_CONF"] = str(SLURM / "slurm.conf")
    return Place(host.name, host.address, STATE, (*inside, "env", "-C", os.getcwd()), variables)


def create(hosts: Sequence[Host], rate: str, storage_rate: str) -> None:
    """Create all hosts and limit the rates of their links."""
    FOLDER.mkdir()
    # The mounts that keep namespaces alive must not propagate into the namespaces.
    run(["mount", "-t", "tmpfs", "-o", "size=1g", "dshuffle-testbed", str(FOLDER)])
    run(["mount", "--make-private", str(FOLDER)])
    (FOLDER / "mounts").mkdir()
    SHARED.mkdir()
    with STATE.change() as content:
        content["hosts"] = [{"name": host.name, "address": host.address} for host in hosts]
    run([*sharedfs.guard_command(SHARED)])
    for command in network.switch_commands():
        run([*command])
    for host in hosts:
        for command in network.link_commands(host):
            run([*command])
        mounts = FOLDER / "mounts" / host.name
        mounts.touch()
        run(["unshare", f"--mount={mounts}", "--propagation", "private", "bash", "-c", OWN_RUN])
        shape(host, storage_rate if host.name == "storage" else rate)


def shape(host: Host, rate: str) -> None:
    """Set the rate of a host's link."""
    for command in network.shape_commands(host, rate):
        run([*command])
    with STATE.change() as content:
        content.setdefault("rates", {})[host.name] = rate


def link_bytes() -> dict[str, dict[str, int]]:
    """Return the bytes that each host has sent and received, and the packets dropped on the way to it."""
    statistics = run(["ip", "-n", network.SWITCH, "-s", "-j", "link", "show", "type", "veth"])
    return network.link_bytes(statistics, known_hosts())


def destroy() -> list[str]:
    """Remove the testbed, complete or not, and return what could not be removed.

    The state file is not needed. Namespaces are found by name and processes by namespace, so this works after a crash
    at any point.
    """
    for namespace in _namespaces():
        _kill_inside(namespace)
    for line in reversed(_mounts()):
        subprocess.run(["umount", "--lazy", line], check=False, capture_output=True)
    for namespace in _namespaces():
        subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)
    if FOLDER.exists() and not _mounts():
        FOLDER.rmdir()  # its content was in the mount
    return [*_namespaces(), *_mounts(), *([str(FOLDER)] if FOLDER.exists() else [])]


def _namespaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir() if network.is_own(path.name)) if folder.exists() else []


def _mounts() -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = (line.split()[4] for line in lines)
    return [point for point in points if point == str(FOLDER) or point.startswith(f"{FOLDER}/")]


def _kill_inside(namespace: str) -> None:
    """Kill all processes in a network namespace, including those that they start meanwhile."""
    give_up = time.monotonic() + 10
    while (pids := _processes_inside(namespace)) and time.monotonic() < give_up:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _processes_inside(namespace: str) -> list[int]:
    try:
        wanted = os.stat(f"/run/netns/{namespace}")
    except OSError:
        return []
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            own = os.stat(folder / "ns" / "net")
        except OSError:
            continue
        if (own.st_dev, own.st_ino) == (wanted.st_dev, wanted.st_ino):
            found.append(int(folder.name))
    return found
