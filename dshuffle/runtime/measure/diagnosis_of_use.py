"""Whether a cluster suits a dataset: extras, the place of local files, memory for partitions, and links."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import psutil
from distributed import Client

from dshuffle.errors import DShuffleError
from dshuffle.planning import Choices, ShuffleSpec
from dshuffle.runtime.measure.finding import Finding, Level, some
from dshuffle.runtime.measure.probe import measure_cluster
from dshuffle.runtime.memory import member_nbytes, workers_that_fit
from dshuffle.runtime.settings import Settings
from dshuffle.store import Dataset
from dshuffle.units import human_bytes, human_rate

EXTRAS = ("obstore", "pyarrow", "torch", "prometheus-client")
"""Packages that workers need for some datasets and trainers, and for metrics."""

IN_MEMORY = ("tmpfs", "ramfs")
SHARED = ("nfs", "nfs4", "lustre", "beegfs", "gpfs", "ceph", "cifs", "glusterfs", "afs", "fuse.mfs")
"""File systems, as the system names them."""

SLOW_LINK = 12.5e6
"""A link with fewer bytes per second (100 Mbit/s) is probably in the wrong network."""

MEASURING_SECONDS = 3.0
"""Duration of the measurement of links."""


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """The installed version of each package, or None."""
    installed: dict[str, str | None] = {}
    for name in packages:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed


def file_system(path: str) -> str:
    """Type of the file system of a path, as the system names it; empty if that is not known.

    Examples
    --------
    >>> file_system("/proc/self")
    'proc'
    """
    path, best = os.path.realpath(path), ("", "")
    for mount in psutil.disk_partitions(all=True):
        inside = path == mount.mountpoint or path.startswith(mount.mountpoint.rstrip("/") + "/")
        if inside and len(mount.mountpoint) >= len(best[0]):
            best = mount.mountpoint, mount.fstype
    return best[1]


def of_extras(client_extras: Mapping[str, str | None], workers: Mapping[str, Mapping[str, Any]]) -> Finding:
    """Whether all workers have the extras of the client."""
    differing = [
        f"{name} is {version} here, but {some(differences)}"
        for name, version in client_extras.items()
        if version is not None
        and (
            differences := [
                f"{where} has {worker['extras'].get(name) or 'none'}"
                for where, worker in workers.items()
                if worker["extras"].get(name) != version
            ]
        )
    ]
    if differing:
        remedy = "Install the same extras of dshuffle everywhere, if they are needed there."
        return Finding(Level.WARNING, "extras", "; ".join(differing), remedy)
    names = ", ".join(name for name, version in client_extras.items() if version is not None)
    return Finding(Level.OK, "extras", f"the same everywhere: {names}" if names else "none are installed here")


def of_local_files(workers: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Whether local directories are on disks of the nodes."""
    for kinds, where, remedy in (
        (IN_MEMORY, "in memory", "Files there take memory of the node. Choose a local_directory on a disk."),
        (SHARED, "on a shared file system", "It is slow, and others see it. Choose a local_directory on the node."),
    ):
        places = [
            f"{worker} has {facts['local_directory']} ({facts['file_system']})"
            for worker, facts in workers.items()
            if facts["file_system"] in kinds
        ]
        if places:
            yield Finding(Level.WARNING, "local disks", f"local directories are {where}: {some(places)}", remedy)


def of_partitions(dataset: Dataset, workers: Mapping[str, Mapping[str, Any]]) -> Finding | None:
    """Whether the partitions of a dataset fit into the memory of the workers that train."""
    limits = [worker["memory_limit"] for worker in workers.values() if worker["memory_limit"] and worker["trains"]]
    if not limits or dataset.n_samples < len(limits):
        return None
    shuffle = ShuffleSpec(dataset.n_samples, len(limits), Choices())
    needed, room = member_nbytes(shuffle, dataset.layout), int(Settings.from_config().memory_fraction * min(limits))
    text = f"a partition takes {human_bytes(needed)} of the {human_bytes(room)} that a worker may use for it"
    if needed <= room:
        return Finding(Level.OK, "partitions", text)
    enough = workers_that_fit(shuffle, dataset.layout, room)
    more = "" if enough is None else f" at least {enough} workers,"
    return Finding(Level.WARNING, "partitions", text, f"Use{more} a larger memory limit, or a cache_directory.")


def of_links(client: Client, dataset: Dataset, seconds: float = MEASURING_SECONDS) -> Finding:
    """Rates at which workers receive from each other and read the dataset, measured."""
    try:
        measurement = measure_cluster(client, dataset, seconds=seconds)
    except DShuffleError as error:
        return Finding(Level.ERROR, "links", str(error), "See the logs of the workers.")
    store = f"all workers together read {human_rate(measurement.storage_together)} of rows from the dataset"
    if not measurement.link_alone:
        return Finding(Level.OK, "links", f"there is one worker; {store}")
    text = (
        f"a worker receives {human_rate(measurement.link_alone)} from another one, and "
        f"{human_rate(measurement.link_together)} while all exchange; {store}"
    )
    if measurement.link_alone < SLOW_LINK:
        return Finding(Level.WARNING, "links", text, "Workers may use the wrong network. Name it with interface=.")
    return Finding(Level.OK, "links", text)
