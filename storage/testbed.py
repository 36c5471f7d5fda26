"""An emulated cluster on one machine, with links of known rate and shared storage on a separate host.

    python storage/testbed.py up --workers 8 --rate 100mbit --storage-rate 800mbit --server
    python storage/testbed.py storage nfs /data/nfs
    python storage/testbed.py exec scheduler dshuffle compare ... --scheduler tcp://10.78.0.2:8786
    python storage/testbed.py down

The hosts are scheduler, storage, server (with --server) and w1, w2, ... All commands need root.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import click

import cluster
import hosts
import network
import nfs
import places
import s3
import sharedfs
import slurm
from service import Service

SERVICES: dict[str, Service] = {service.name: service for service in (nfs.SERVICE, s3.SERVICE, sharedfs.SERVICE)}


@click.group(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Check the requirements of all commands before running one."""
    hosts.check_machine()


@main.command()
@click.option("--workers", type=click.IntRange(1, network.MAX_WORKERS), default=8, show_default=True)
@click.option(
    "--rate", type=network.rate, default="100mbit", show_default=True, help="Rate of every link in each direction."
)
@click.option("--storage-rate", type=network.rate, help="Rate of the storage host's link.  [default: --rate]")
@click.option("--server", is_flag=True, help="Add a host whose worker has the resource dshuffle-server.")
@click.option("--timeout", default=120.0, show_default=True, help="Maximum time in seconds until all workers register.")
def up(workers: int, rate: str, storage_rate: str | None, server: bool, timeout: float) -> None:
    """Create the hosts, start Dask on them, and wait until all workers have registered."""
    if hosts.is_up():
        raise click.ClickException("a testbed exists; run `testbed.py down` first")
    begun = time.monotonic()
    planned = network.plan_hosts(workers, server)
    try:
        hosts.create(planned, rate, storage_rate or rate)
        made = time.monotonic() - begun
        address = cluster.start(planned)
        cluster.await_workers(planned, timeout)
    except BaseException:
        hosts.destroy()
        raise
    click.echo(f"{len(planned)} hosts in {made:.1f} s, with Dask in {time.monotonic() - begun:.1f} s")
    click.echo(f"scheduler: {address}")
    click.echo(f"run commands with: python storage/testbed.py exec scheduler COMMAND --scheduler {address}")


@main.command()
@click.argument("rate", type=network.rate)
@click.argument("names", nargs=-1, metavar="[HOST]...")
def shape(rate: str, names: tuple[str, ...]) -> None:
    """Change the RATE of the links of the given hosts, or of all hosts: 100mbit, 2.5gbit, or none."""
    for host in [hosts.find(name) for name in names] or hosts.known_hosts():
        hosts.shape(host, rate)


@main.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("host")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def execute(host: str, command: tuple[str, ...]) -> None:
    """Run COMMAND on HOST, in the current folder."""
    place = hosts.place(hosts.find(host))
    line = [*place.enter, *command]
    # Reports of measurements on the host include this description.
    emulated = {"DSHUFFLE_EMULATED": hosts.description()}
    os.execvpe(line[0], line, {**os.environ, **emulated, **place.environment})


@main.command("bytes")
def count_bytes() -> None:
    """Print the bytes that each host has sent and received, and the packets dropped on the way to it, as JSON."""
    click.echo(json.dumps(hosts.link_bytes()))


@main.command()
@click.argument("kind", type=click.Choice(list(SERVICES)))
@click.argument("directory", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--stop", is_flag=True, help="Stop the service instead. Its data stay in DIRECTORY.")
def storage(kind: str, directory: Path | None, stop: bool) -> None:
    """Start a storage service on the storage host with its data in DIRECTORY, and print how to use it."""
    service, home = SERVICES[kind], hosts.place(hosts.find("storage"))
    clients = [hosts.place(host) for host in hosts.known_hosts() if host.name != "storage"]
    if stop:
        click.echo(f"stopped: {', '.join(service.stop(home, clients)) or 'nothing was running'}")
    elif directory is None:
        raise click.UsageError(f"storage {kind} needs DIRECTORY, the folder for its data")
    else:
        click.echo(service.start(home, directory, clients))


@main.command("slurm")
def start_slurm() -> None:
    """Start Slurm on the hosts: w1, w2, ... are its nodes. Commands on hosts find it by SLURM_CONF."""
    by_name = {host.name: (host, hosts.place(host)) for host in hosts.known_hosts()}
    nodes = [by_name[host.name] for host in cluster.workers(hosts.known_hosts()) if host.name != "server"]
    click.echo(slurm.start(hosts.SLURM, by_name["scheduler"], nodes), nl=False)


@main.command()
def status() -> None:
    """List the hosts with their link rates, the processes and the storage services."""
    rates = hosts.STATE.read().get("rates", {})
    for host in hosts.known_hosts():
        click.echo(f"{host.name:10s} {host.address:12s} {rates.get(host.name, '?')}")
    for name, record in hosts.STATE.processes().items():
        click.echo(f"{name:24s} on {record['host']:10s} {record['pid'] if places.alive(record) else 'ENDED'}")
    for name, service in hosts.STATE.read().get("services", {}).items():
        click.echo(f"{name:10s} {service['url']} with data in {service['directory']}")


@main.command()
@click.argument("name")
def log(name: str) -> None:
    """Print the log of a process of the testbed; `status` lists the process names."""
    known = hosts.STATE.processes()
    if name not in known:
        raise click.BadParameter(
            f"NAME={name!r} is not allowed; it must be one of {', '.join(known) or '(no testbed)'}"
        )
    click.echo(hosts.STATE.log(name).read_text(errors="replace"), nl=False)


@main.command()
def down() -> None:
    """Remove the testbed, including the remains of a crash."""
    if not hosts.is_up():
        click.echo("no testbed is running")
        return
    places.stop(hosts.STATE, host="storage")  # terminate first, so that services write their data
    if left := hosts.destroy():
        raise click.ClickException(f"these could not be removed: {', '.join(left)}")


if __name__ == "__main__":
    main()
