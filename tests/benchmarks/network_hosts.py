"""Dask workers on hosts of their own, on one machine: each with a nanny, an address and a link that can be cut.

A host is a network namespace. Its interface is one end of a pair, and the other end is a port of a bridge, where this
process has an address, too. Without the capabilities and commands that this needs, the hosts are loopback addresses,
and have no links.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import dask
import psutil

NETWORK, BRIDGE = f"10.78.{os.getpid() % 256}", f"chaos{os.getpid()}"
"""Names of this process, so that two of them can run at once."""
NOBODY = "02:00:00:00:00:ff"
"""Hardware address of no host. Packets to it are lost."""
PATIENCE = 10.0
"""Seconds in which a nanny must end by itself."""
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""Numbers of what Linux requires for namespaces, links and mounts. Root in a container may lack them."""


def can_make_networks() -> bool:
    """Whether this process may make namespaces, links and mounts, and has the commands for it."""
    effective = re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())
    return (
        effective is not None
        and all(int(effective[1], 16) >> number & 1 for number in CAPABILITIES.values())
        and all(shutil.which(command) is not None for command in ("ip", "mount", "nsenter", "umount"))
    )


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Hosts:
    """Hosts with one Dask worker each, until the block ends.

    Parameters
    ----------
    count
        Number of hosts.
    folder
        Folder for the files of the workers and their logs.

    Attributes
    ----------
    have_links
        Whether the hosts have links.
    address
        Address of this process in their network.
    addresses
        Addresses of the hosts.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self._folder = folder
        self.have_links = can_make_networks()
        self.address = f"{NETWORK}.1" if self.have_links else "127.0.0.1"
        base = NETWORK if self.have_links else "127.0.0"
        self.addresses = [f"{base}.{10 + number}" for number in range(count)]
        self._nannies: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        if self.have_links:
            with contextlib.ExitStack() as on_error:
                on_error.callback(self._remove_network)
                self._make_network()
                on_error.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        processes: list[psutil.Process] = []
        for nanny in self._nannies:
            if nanny.poll() is None:
                process = psutil.Process(nanny.pid)
                processes += [process, *process.children(recursive=True)]
                nanny.terminate()
        for nanny in self._nannies:
            with contextlib.suppress(subprocess.TimeoutExpired):
                nanny.wait(PATIENCE)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for nanny in self._nannies:
            nanny.wait()
        if self.have_links:
            self._remove_network()

    def _name(self, number: int) -> str:
        """Name of a namespace, and of its port of the bridge."""
        return f"{BRIDGE}-{number}"

    def _make_network(self) -> None:
        ip("link", "add", BRIDGE, "type", "bridge", "stp_state", "0", "forward_delay", "0")
        ip("address", "add", f"{self.address}/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for number in range(len(self.addresses)):
            name = self._name(number)
            ip("netns", "add", name)
            ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", name, "master", BRIDGE, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", f"{self.addresses[number]}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def _remove_network(self) -> None:
        for number in range(len(self.addresses)):
            subprocess.run(["ip", "netns", "delete", self._name(number)], stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "link", "delete", self._name(number)], stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "delete", BRIDGE], stderr=subprocess.DEVNULL)

    def entering(self, number: int) -> list[str]:
        """Words before a command that let it run on a host."""
        return ["nsenter", f"--net=/run/netns/{self._name(number)}"]

    def start_workers(self, scheduler: str) -> None:
        """Start a nanny on every host, with Dask's settings of this process."""
        environment = {
            **os.environ,
            "DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(dask.config.global_config),
            "PYTHONPATH": os.pathsep.join(sys.path),  # workers import the functions of these scripts
        }
        for number, address in enumerate(self.addresses):
            scratch = self._folder / f"worker-{number}"
            command = [sys.executable, "-m", "distributed.cli.dask_worker", scheduler, "--host", address, "--nanny"]
            command += ["--nthreads=1", "--no-dashboard", "--memory-limit=0", f"--local-directory={scratch}"]
            if self.have_links:
                command = [*self.entering(number), *command]
            with open(f"{scratch}.log", "wb") as log:
                self._nannies.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def worker_pid(self, worker: str) -> int:
        """Process of the worker on the host of a Dask address.

        Raises
        ------
        ProcessLookupError
            If the nanny has not started it again yet.
        """
        nanny = self._nannies[self._number(worker)]
        for process in psutil.Process(nanny.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if "spawn_main" in " ".join(process.cmdline()):  # its other child is the resource tracker
                    return int(process.pid)
        raise ProcessLookupError(f"there is no worker process at {worker}")

    def _number(self, worker: str) -> int:
        return self.addresses.index(str(urlsplit(worker).hostname))

    def set_link(self, worker: str, state: str) -> None:
        """Set the link of a worker's host ``"down"``, so that all packets from and to it are lost, or ``"up"``."""
        ip("link", "set", self._name(self._number(worker)), state)

    def separate(self, worker: str, peer: str) -> None:
        """Lose all packets between the hosts of two workers."""
        for here, there in self._directions(worker, peer):
            ip("-n", here, "neighbour", "replace", there, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent")

    def reconnect(self, worker: str, peer: str) -> None:
        """Let packets pass between the hosts of two workers again."""
        for here, there in self._directions(worker, peer):
            ip("-n", here, "neighbour", "flush", "to", there, "dev", "eth0", "nud", "permanent")

    def _directions(self, worker: str, peer: str) -> list[tuple[str, str]]:
        """Both directions between two hosts: the name of one, and the address of the other."""
        pair = self._number(worker), self._number(peer)
        return [(self._name(here), self.addresses[there]) for here, there in (pair, pair[::-1])]
