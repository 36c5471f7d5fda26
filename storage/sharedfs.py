"""A shared file system that every host mounts: MooseFS, with its data in a directory of the storage host.

    python storage/sharedfs.py start DIR | status | stop | check PATH

An empty, read-only guard file system covers the mount point while MooseFS is not mounted. A failed mount then causes an
error instead of reads from the local disk.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

import places
import service
from places import Place, run, this_machine

GUARD = "dshuffle-guard"
CLIENTS_PORT = 9421
CHUNKS_PORT = 9422

PROGRAMS = {
    "mfsmaster": "moosefs-master",
    "mfschunkserver": "moosefs-chunkserver",
    "mfsmount": "moosefs-client",
    "mount": "mount",
    "ip": "iproute2",
    "bash": "bash",
}

MASTER = """
WORKING_USER = root
WORKING_GROUP = root
DATA_PATH = {directory}/master
EXPORTS_FILENAME = {directory}/exports.cfg
TOPOLOGY_FILENAME = {directory}/topology.cfg
MATOML_LISTEN_HOST = {address}
MATOCS_LISTEN_HOST = {address}
MATOCL_LISTEN_HOST = {address}
"""
CHUNKS = """
WORKING_USER = root
WORKING_GROUP = root
DATA_PATH = {directory}/chunkserver
HDD_CONF_FILENAME = {directory}/disks.cfg
HDD_LEAVE_SPACE_DEFAULT = 100MiB
MASTER_HOST = {address}
BIND_HOST = {address}
CSSERV_LISTEN_HOST = {address}
"""


def mount_point(place: Place) -> Path:
    """Return the mount point, which is the same on all clients."""
    return place.state.folder / "shared"


def guard_command(path: Path) -> tuple[str, ...]:
    """Return the command that mounts the empty read-only guard on a path."""
    return ("mount", "-t", "tmpfs", "-o", "ro,size=4k", GUARD, str(path))


def launch(place: Place, directory: Path, clients: Sequence[Place]) -> str:
    """Start the master and the chunk server, mount on the clients (or here if there are none), and return the path."""
    known = directory / "master"
    if not known.exists() and any(directory.iterdir()):
        raise click.ClickException(f"{directory} is neither empty nor a MooseFS directory; nothing was changed")
    if not known.exists():
        for name in ("master", "chunkserver", "chunks"):
            (directory / name).mkdir()
        (known / "metadata.mfs").write_bytes(b"MFSM NEW")
    fields = {"directory": directory, "address": place.address}
    for name, text in {
        "master.cfg": MASTER.format(**fields),
        "chunkserver.cfg": CHUNKS.format(**fields),
        "exports.cfg": "".join(f"{host.address} / rw,alldirs,maproot=0\n" for host in clients or [place]),
        "topology.cfg": "",
        "disks.cfg": f"{directory}/chunks\n",
    }.items():
        (directory / name).write_text(text)
    # "-a" recovers the metadata after the master was killed.
    place.start("sharedfs.master", "mfsmaster", "-f", "-a", "-c", str(directory / "master.cfg"), "start")
    place.await_port("sharedfs.master", CLIENTS_PORT)
    place.start("sharedfs.chunks", "mfschunkserver", "-f", "-c", str(directory / "chunkserver.cfg"), "start")
    place.await_port("sharedfs.chunks", CHUNKS_PORT)
    path = mount_point(place)
    for client in clients or [place]:
        client.run("mkdir", "-p", str(path))
        if mounted(client, path) is None:
            client.run(*guard_command(path))
        # No page cache, as for a dataset that is larger than a host's memory.
        options = ("-o", "allow_other,mfscachemode=DIRECT")
        client.start(f"sharedfs.mount-{client.name}", "mfsmount", "-f", str(path), "-H", place.address, *options)
    for client in clients or [place]:
        there = partial(_has_room, client, path)
        client.await_true(f"sharedfs.mount-{client.name}", there, f"to mount {path} on {client.name}")
    return str(path)


def _has_room(place: Place, path: Path) -> bool:
    # The master lets clients mount before the first chunk server has registered.
    if not is_shared(mounted(place, path)):
        return False
    return place.run("stat", "--file-system", "--format=%b", str(path)).strip() != "0"


def own_address() -> str:
    """Return a network address of this machine; MooseFS refuses the loopback address."""
    places.need_programs(PROGRAMS, "sharedfs")
    links = json.loads(run(["ip", "-json", "-4", "address", "show", "scope", "global", "up"]))
    for link in links:
        for entry in link["addr_info"]:
            return str(entry["local"])
    raise click.ClickException(
        "MooseFS refuses the loopback address, and this machine does not have another. Use the testbed."
    )


def unmount(place: Place, clients: Sequence[Place]) -> None:
    """Unmount the file system on every client. The guard is removed only on a machine without a testbed."""
    path = mount_point(place)
    for client in clients or [place]:
        if is_shared(mounted(client, path)):
            client.run("umount", "-l", str(path))
    if not clients and mounted(place, path) == GUARD:
        place.run("umount", str(path))
        place.run("rmdir", str(path))


def is_shared(source: str | None) -> bool:
    """Whether the source of a mount is MooseFS."""
    return source is not None and source.startswith("mfs#")


def mounted(place: Place, path: Path) -> str | None:
    """Return the source of the file system mounted on a path, or ``None``."""
    return top_mount(place.run("cat", "/proc/self/mountinfo"), path)


def top_mount(mountinfo: str, path: Path) -> str | None:
    r"""Return the source of the last file system that ``mountinfo`` lists for a path, or ``None``.

    Examples
    --------
    >>> top_mount("24 1 0:5 / /mnt ro - tmpfs guard ro\n25 24 0:6 / /mnt rw - fuse mfs\\043host:9421 rw", Path("/mnt"))
    'mfs#host:9421'
    """
    found = None
    for line in mountinfo.splitlines():
        where, _, what = line.partition(" - ")
        if where.split()[4] == str(path):
            found = what.split()[1].replace("\\043", "#")
    return found


def check(url: str) -> str:
    """Check that a path is a MooseFS mount that can be written and read."""
    path = Path(url)
    source = top_mount(Path("/proc/self/mountinfo").read_text(), path)
    if not is_shared(source):
        raise click.ClickException(f"{path} is not a MooseFS mount (mounted there: {source or 'nothing'})")
    probe, data = path / f".check-{os.getpid()}", secrets.token_bytes(100_000)
    try:
        probe.write_bytes(data)
        if probe.read_bytes() != data:
            raise click.ClickException(f"{path} returned different bytes than were written")
        probe.unlink()
    except OSError as error:
        raise click.ClickException(f"{path} is mounted, but cannot be used: {error}") from error
    size = os.statvfs(path)
    return f"{path} ({source}, {size.f_bavail * size.f_frsize / 1e9:.0f} GB free)"


SERVICE = service.Service(
    name="sharedfs",
    programs=PROGRAMS,
    launch=launch,
    check=check,
    script=__file__,
    ports=(CLIENTS_PORT, CHUNKS_PORT),
    root="it mounts a file system",
    before_stop=unmount,
)
SERVICE_COMMANDS = service.commands(SERVICE, lambda: this_machine(service.local_folder(), own_address()), str(__doc__))

if __name__ == "__main__":
    SERVICE_COMMANDS()
