"""An NFS version 3 server in user space: nfs-ganesha exports a directory of this machine.

    python storage/nfs.py start DIR | status | stop | check nfs://ADDRESS/shared

Clients mount it, where their kernel has NFS: mount -t nfs -o vers=3,nolock ADDRESS:/shared /MOUNT. `read_rate.py` reads
it in user space with libnfs, and needs no mount.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import click

import service
from places import Place, this_machine

EXPORT = "/shared"
NFS_PORT = 2049
MOUNT_PORT = 20048
RPCBIND_PORT = 111

# Program and procedure numbers from RFC 1813 (NFS version 3 and its mount protocol).
NFS_PROGRAM = 100003
MOUNT_PROGRAM = 100005
NULL = 0
MOUNT_EXPORTS = 5

CONFIGURATION = """
NFS_CORE_PARAM {{
    Protocols = 3; Bind_addr = {address}; NFS_Port = {nfs_port}; MNT_Port = {mount_port};
    mount_path_pseudo = true; Enable_NLM = false; Enable_RQUOTA = false;
}}
EXPORT {{
    Export_Id = 1; Path = "{directory}"; Pseudo = "{export}"; Access_Type = RW; Squash = No_Root_Squash;
    Protocols = 3; Transports = TCP; SecType = sys; FSAL {{ Name = VFS; }}
}}
"""


def launch(place: Place, directory: Path, clients: Sequence[Place]) -> str:
    """Start ganesha, and rpcbind if it is not running; return the URL."""
    if any(letter in str(directory) for letter in '"\n;{}'):
        raise click.ClickException(
            f"directory {directory} is not allowed; it must not contain quotes, newlines or any of ; {{ }}"
        )
    configuration = place.state.folder / "ganesha.conf"
    configuration.parent.mkdir(parents=True, exist_ok=True)
    configuration.write_text(
        CONFIGURATION.format(
            address=place.address, nfs_port=NFS_PORT, mount_port=MOUNT_PORT, directory=directory, export=EXPORT
        )
    )
    if not place.listens(RPCBIND_PORT, "127.0.0.1"):
        place.start("nfs.rpcbind", "rpcbind", "-f")
        place.await_port("nfs.rpcbind", RPCBIND_PORT, "127.0.0.1")
    number = place.state.folder / "ganesha.pid"
    # Ganesha needs this folder for its state, but does not create it.
    place.run("mkdir", "-p", "/var/run/ganesha")
    log = ("-L", "/dev/stdout", "-N", "NIV_WARN")
    place.start("nfs.ganesha", "ganesha.nfsd", "-F", "-f", str(configuration), *log, "-p", str(number))
    place.await_port("nfs.ganesha", MOUNT_PORT)
    place.await_port("nfs.ganesha", NFS_PORT)
    return f"nfs://{place.address}{EXPORT}"


def check(url: str) -> str:
    """Check over the network that the server speaks NFS version 3 and exports the path."""
    parts = urlsplit(url)
    if parts.scheme != "nfs" or not parts.hostname or not parts.path:
        raise click.ClickException(f"{url!r} is not allowed; it must be like nfs://10.78.0.4{EXPORT}")
    try:
        call(parts.hostname, NFS_PORT, NFS_PROGRAM, NULL)
        exports = export_names(call(parts.hostname, MOUNT_PORT, MOUNT_PROGRAM, MOUNT_EXPORTS))
    except OSError as error:
        raise click.ClickException(f"no NFS server answers at {url}: {error}") from error
    if not exports:
        hint = "Its directory must be on a file system with file handles: ext4, XFS or tmpfs, but not overlay."
        raise click.ClickException(f"the server at {url} exports nothing. {hint}")
    if parts.path not in exports:
        raise click.ClickException(f"the server at {url} does not export {parts.path}; it exports {exports}")
    return f"{url} (NFS version 3, exports {', '.join(exports)})"


def call(host: str, port: int, program: int, procedure: int) -> bytes:
    """Make a remote procedure call without arguments (RFC 5531) over TCP, and return the encoded result."""
    number = secrets.randbits(31)
    nobody = struct.pack(">4I", 0, 0, 0, 0)
    message = struct.pack(">6I", number, 0, 2, program, 3, procedure) + nobody
    with socket.create_connection((host, port), timeout=10) as connection:
        connection.sendall(struct.pack(">I", 1 << 31 | len(message)) + message)
        with connection.makefile("rb") as stream:
            reply = b""
            last = 0
            while not last:
                (header,) = struct.unpack(">I", _exactly(stream.read(4), 4))
                last, length = header >> 31, header & 0x7FFFFFFF
                reply += _exactly(stream.read(length), length)
    answered, kind, denied, _, verifier = struct.unpack_from(">5I", reply)
    padded = 20 + (verifier + 3) // 4 * 4
    (status,) = struct.unpack_from(">I", reply, padded)
    if (answered, kind, denied, status) != (number, 1, 0, 0):
        raise ConnectionError(f"program {program} at port {port} refused the call (status {status})")
    return reply[padded + 4 :]


def _exactly(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise ConnectionError("the server closed the connection before its reply was complete")
    return data


def export_names(encoded: bytes) -> list[str]:
    """Decode the paths in the mount protocol's list of exports (RFC 1813, section 5.2.5).

    Examples
    --------
    >>> export_names(bytes.fromhex("00000001" "00000004" "2f616263" "00000000" "00000000"))
    ['/abc']
    """
    names, position = [], 0

    def number() -> int:
        nonlocal position
        position += 4
        return int.from_bytes(encoded[position - 4 : position])

    def text() -> str:
        nonlocal position
        length = number()
        begin, position = position, position + (length + 3) // 4 * 4
        return encoded[begin : begin + length].decode()

    while number():
        names.append(text())
        while number():
            text()
    return names


SERVICE = service.Service(
    name="nfs",
    programs={"ganesha.nfsd": "nfs-ganesha nfs-ganesha-vfs", "rpcbind": "rpcbind", "bash": "bash"},
    launch=launch,
    check=check,
    script=__file__,
    ports=(NFS_PORT, MOUNT_PORT),
    root="ganesha opens files by handle",
)
SERVICE_COMMANDS = service.commands(SERVICE, lambda: this_machine(service.local_folder()), str(__doc__))

if __name__ == "__main__":
    SERVICE_COMMANDS()
