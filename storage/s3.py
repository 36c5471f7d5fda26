"""An S3 server on one machine: Ceph's gateway over one object storage daemon with its data in a directory.

    python storage/s3.py start DIR | status | stop | check http://ADDRESS:9000

It runs one monitor, one storage daemon and one gateway, without a manager or authentication between the daemons.
"""

from __future__ import annotations

import hashlib
import hmac
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import click

import service
from places import Place, this_machine

BUCKET = "dshuffle"
PORT = 9000
MONITOR_PORT = 3300
# Credentials of a temporary server that only this machine can reach; they are not secret.
KEY, SECRET, REGION = "dshuffle", "dshuffle-secret", "us-east-1"

CONFIGURATION = """
[global]
fsid = {cluster}
mon host = [v2:{address}:{monitor_port}]
mon initial members = a
public addr = {address}
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
ms cluster mode = crc
ms service mode = crc
ms client mode = crc
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
osd objectstore = bluestore
bluestore block size = {block_bytes}
bluestore fsck on mkfs = false
bluestore cache autotune = false
bluestore cache size = 1073741824
rgw frontends = beast endpoint={address}:{port}
rgw dynamic resharding = false
paxos propose interval = 0.05
paxos min wait = 0.01
run dir = {run}
admin socket = {run}/$name.asok
log to file = false
log to stderr = true
err to stderr = true
mon data = {directory}/mon
osd data = {directory}/osd
rgw data = {directory}/rgw
"""


def environment(address: str) -> dict[str, str]:
    """Return the environment variables for clients of a server; obstore, s3fs and boto3 read them."""
    return {
        "AWS_ENDPOINT_URL": f"http://{address}:{PORT}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": REGION,
        "AWS_ALLOW_HTTP": "true",
    }


def launch(place: Place, directory: Path, clients: Sequence[Place]) -> str:
    """Start the monitor, storage daemon and gateway, and return the URL; an empty directory is initialized first."""
    known = directory / "cluster"
    if not known.exists() and any(directory.iterdir()):
        raise click.ClickException(f"{directory} is neither empty nor an S3 server's directory; nothing was changed")
    fresh = not known.exists()
    if fresh:
        cluster, home = str(uuid.uuid4()), place.address
    else:
        cluster, home = known.read_text().split()
        if home != place.address:
            # The monitor's database contains its address.
            raise click.ClickException(f"{directory} belongs to a server at {home}, not {place.address}. Use another.")
    configuration = place.state.folder / "ceph.conf"
    run_folder = place.state.folder / "ceph"
    for folder in (run_folder, *(directory / name for name in ("mon", "osd", "rgw"))):
        folder.mkdir(parents=True, exist_ok=True)
    configuration.write_text(
        CONFIGURATION.format(
            cluster=cluster,
            address=place.address,
            monitor_port=MONITOR_PORT,
            port=PORT,
            directory=directory,
            run=run_folder,
            block_bytes=64 << 30,  # a sparse file: it occupies only what is written
        )
    )
    ceph = ("-c", str(configuration))
    if fresh:
        monitors = str(directory / "monmap")
        place.run(
            "monmaptool", "--create", "--fsid", cluster, "--addv", "a", f"[v2:{place.address}:{MONITOR_PORT}]", monitors
        )
        place.run("ceph-mon", *ceph, "--mkfs", "-i", "a", "--monmap", monitors)
    place.start("s3.monitor", "ceph-mon", *ceph, "-f", "-i", "a")
    place.await_port("s3.monitor", MONITOR_PORT)
    if fresh:
        place.run("ceph", *ceph, "--connect-timeout", "20", "osd", "new", cluster)
        place.run("ceph-osd", *ceph, "-i", "0", "--mkfs", "--osd-uuid", cluster)
    place.start("s3.storage", "ceph-osd", *ceph, "-f", "-i", "0")
    place.start("s3.gateway", "radosgw", *ceph, "-f", "-n", "client.rgw")
    if fresh:
        user = (
            "user",
            "create",
            "--uid=dshuffle",
            "--display-name=dshuffle",
            f"--access-key={KEY}",
            f"--secret={SECRET}",
        )
        place.run("radosgw-admin", *ceph, *user)
    place.await_port("s3.gateway", PORT)
    known.write_text(f"{cluster} {place.address}\n")
    return f"http://{place.address}:{PORT}"


def check(url: str) -> str:
    """Check that range requests work: a server that answers them with status 200 would break sharded Zarr."""
    data = bytes(range(256)) * 16
    request("PUT", f"{url}/{BUCKET}")
    request("PUT", f"{url}/{BUCKET}/.check", data)
    status, body = request("GET", f"{url}/{BUCKET}/.check", headers={"range": "bytes=1000-1999"})
    if (status, body) != (206, data[1000:2000]):
        raise click.ClickException(
            f"{url} answered a request for 1000 bytes with status {status} and {len(body)} bytes; it must be 206 and "
            "those 1000 bytes"
        )
    request("DELETE", f"{url}/{BUCKET}/.check")
    address = str(urlsplit(url).hostname)
    variables = "\n".join(f"export {name}={value}" for name, value in environment(address).items())
    return f"s3://{BUCKET}/ (range requests return status 206 and the right bytes)\n{variables}"


def request(method: str, url: str, data: bytes = b"", headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    """Send a request with AWS Signature Version 4, and return the status and body.

    References
    ----------
    AWS, "Signature Version 4 signing process".
    """
    parts = urlsplit(url)
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(data).hexdigest()
    signed = {"host": parts.netloc, "x-amz-content-sha256": digest, "x-amz-date": moment, **(headers or {})}
    names = ";".join(sorted(signed))
    lines = [method, parts.path, parts.query, *(f"{name}:{signed[name]}" for name in sorted(signed)), "", names, digest]
    scope = f"{moment[:8]}/{REGION}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()}"
    key = f"AWS4{SECRET}".encode()
    for part in (*scope.split("/"), text):
        key = hmac.digest(key, part.encode(), "sha256")
    credential = f"Credential={KEY}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
    signed["authorization"] = f"AWS4-HMAC-SHA256 {credential}"
    call = urllib.request.Request(url, data or None, signed, method=method)
    try:
        with urllib.request.urlopen(call, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            raise click.ClickException(
                f"{method} {url} was answered with {error.code}: {error.read()[:300]!r}"
            ) from error
    except OSError as error:
        raise click.ClickException(f"no S3 server answers at {url}: {error}") from error


SERVICE = service.Service(
    name="s3",
    programs={
        "ceph-mon": "ceph-mon",
        "monmaptool": "ceph-mon",
        "ceph-osd": "ceph-osd",
        "ceph": "ceph-common",
        "radosgw": "radosgw",
        "bash": "bash",
    },
    launch=launch,
    check=check,
    script=__file__,
    ports=(PORT, MONITOR_PORT),
)
SERVICE_COMMANDS = service.commands(SERVICE, lambda: this_machine(service.local_folder()), str(__doc__))

if __name__ == "__main__":
    SERVICE_COMMANDS()
