"""The Dask cluster of the testbed: a scheduler, and one worker with one thread per host."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence

import click

import places
from hosts import FOLDER, STATE, place
from network import Host
from places import Place

PORT = 8786
HTTP_PORT = 8787
SERVER_RESOURCE = "dshuffle-server=1"


def start(hosts: Sequence[Host]) -> str:
    """Start the scheduler and the workers, and return the scheduler's address."""
    head = _scheduler(hosts)
    dask = (sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", head.address, "--port", str(PORT))
    head.start("scheduler", *dask, "--no-dashboard", "--dashboard-address", f"{head.address}:{HTTP_PORT}")
    address = f"tcp://{head.address}:{PORT}"
    for host in workers(hosts):  # workers retry until the scheduler listens
        scratch = FOLDER / "scratch" / host.name
        scratch.mkdir(parents=True)
        worker = (sys.executable, "-m", "distributed.cli.dask_worker", address, "--host", host.address)
        own = ("--name", host.name, "--nthreads", "1", "--no-nanny", "--no-dashboard", "--memory-limit", "0")
        resources = ("--resources", SERVER_RESOURCE) if host.name == "server" else ()
        place(host).start(host.name, *worker, *own, "--local-directory", str(scratch), *resources)
    return address


def workers(hosts: Sequence[Host]) -> list[Host]:
    """Return the hosts that run a worker."""
    return [host for host in hosts if host.name not in ("scheduler", "storage")]


def await_workers(hosts: Sequence[Host], seconds: float) -> None:
    """Wait until all workers have registered, and show the progress.

    Raises
    ------
    click.ClickException
        If a process exits, or a worker does not register in time. The message contains the end of its log.
    """
    head, expected = _scheduler(hosts), {host.name for host in workers(hosts)}
    give_up = time.monotonic() + seconds
    present: set[str] = set()
    with click.progressbar(length=len(expected), label="workers", show_eta=False, file=sys.stderr) as bar:
        while present != expected:
            time.sleep(0.2)
            arrived = registered(head) & expected
            bar.update(len(arrived - present))
            present = arrived
            records = STATE.processes()
            ended = [name for name in ("scheduler", *expected) if not places.alive(records[name])]
            if ended or time.monotonic() > give_up:
                name = (ended or sorted(expected - present))[0]
                problem = "exited" if ended else f"did not register within {seconds:.0f} s"
                raise click.ClickException(f"{name} {problem}:\n{places.tail(STATE.log(name))}")


def registered(head: Place) -> set[str]:
    """Return the names of the workers that the scheduler's JSON page lists."""
    # Use bash only: polling with Python would take processor time from the workers that are starting.
    question = r"GET /json/identity.json HTTP/1.0\r\n\r\n"
    ask = f"exec 3<>/dev/tcp/{head.address}/{HTTP_PORT} && printf '{question}' >&3 && cat <&3"
    answer = subprocess.run([*head.enter, "bash", "-c", ask], capture_output=True, text=True, check=False).stdout
    _, _, body = answer.partition("\n\n")
    return {str(worker["name"]) for worker in json.loads(body)["workers"].values()} if body else set()


def _scheduler(hosts: Sequence[Host]) -> Place:
    return place(next(host for host in hosts if host.name == "scheduler"))
