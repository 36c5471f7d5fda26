"""The faults of ``chaos.py``: what strikes a worker of a session, its files, its links, or the client."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from distributed import Client, Future
from network_hosts import Hosts, can_make_networks

from dshuffle import Dataset, Shuffler

Strike = Callable[[Shuffler, int, "list[Future[Any]]"], None]
"""It gets the session, a random rank, and the tasks that run."""


class Faults:
    """All faults by name.

    Parameters
    ----------
    hosts
        Hosts of the workers.
    client
        The client.
    dataset
        The dataset.
    disk
        Folder of the partitions and checkpoints. It must be a small file system of its own if the hosts have links.
    heartbeat
        The heartbeat of the sessions in seconds.
    """

    def __init__(self, hosts: Hosts, client: Client, dataset: Dataset, disk: Path, heartbeat: float) -> None:
        self.hosts, self.client, self.dataset, self.disk = hosts, client, dataset, disk
        self._timers: list[threading.Timer] = []
        long = 2 * heartbeat
        self.by_name: dict[str, Strike] = {
            "SIGKILL": lambda shuffler, rank, _: self.send(shuffler, rank, signal.SIGKILL),
            "SIGKILL of rank 0": lambda shuffler, rank, _: self.send(shuffler, 0, signal.SIGKILL),
            "SIGKILL of two workers": lambda shuffler, rank, _: self.kill_two(shuffler, rank),
            "SIGSTOP, 3 s": lambda shuffler, rank, _: self.stop(shuffler, rank, 3.0),
            f"SIGSTOP, {long:.0f} s": lambda shuffler, rank, _: self.stop(shuffler, rank, long),
            "SIGTERM": lambda shuffler, rank, _: self.send(shuffler, rank, signal.SIGTERM),
            "connections to peers reset": lambda shuffler, rank, _: self.run(shuffler, rank, reset_connections),
            "connection of the client reset": lambda shuffler, rank, _: self.cut_client(),
            "tasks cancelled": lambda shuffler, rank, futures: self.client.cancel(futures[rank:]),
            "corrupted on the wire": lambda shuffler, rank, _: self.run(shuffler, rank, spoil_next_message),
            "dataset away, 1 s": lambda shuffler, rank, _: self.hide(),
        }
        if hosts.have_links:
            self.by_name |= {
                "disk full, 2 s": lambda shuffler, rank, _: self.fill(2.0),
                "SIGKILL, then disk full for 5 s": lambda shuffler, rank, _: self.kill_and_fill(shuffler, rank, 5.0),
                "link of a worker cut, 3 s": lambda shuffler, rank, _: self.cut_link(shuffler, rank, 3.0),
                f"link of a worker cut, {long:.0f} s": lambda shuffler, rank, _: self.cut_link(shuffler, rank, long),
                f"packets between two workers lost, {long:.0f} s": lambda shuffler, rank, _: self.separate(
                    shuffler, rank, long
                ),
            }

    def settle(self) -> None:
        """Wait until the effects of all faults have ended."""
        for timer in self._timers:
            timer.join()
        self._timers.clear()

    def later(self, seconds: float, call: Callable[..., Any], *args: Any) -> None:
        timer = threading.Timer(seconds, call, args)
        timer.start()
        self._timers.append(timer)

    def send(self, shuffler: Shuffler, rank: int, number: signal.Signals) -> int:
        """Send a signal to the worker of a rank; its process. Waits for the nanny that is starting it."""
        while True:
            with contextlib.suppress(ProcessLookupError):
                pid = self.hosts.worker_pid(shuffler.addresses[rank])
                os.kill(pid, number)
                return pid
            time.sleep(0.05)

    def kill_two(self, shuffler: Shuffler, rank: int) -> None:
        for victim in (rank, (rank + 1) % shuffler.n_workers):
            self.send(shuffler, victim, signal.SIGKILL)

    def stop(self, shuffler: Shuffler, rank: int, seconds: float) -> None:
        self.later(seconds, resume, self.send(shuffler, rank, signal.SIGSTOP))

    def run(self, shuffler: Shuffler, rank: int, function: Callable[[Any], None]) -> None:
        """Run a function on the worker of a rank. Waits while an earlier fault keeps the worker away."""
        host = urlsplit(shuffler.addresses[rank]).hostname
        while True:
            workers = [worker for worker in self.client.nthreads() if urlsplit(worker).hostname == host]
            with contextlib.suppress(OSError):
                if workers:
                    self.client.run(function, workers=workers)
                    return
            time.sleep(0.05)

    def cut_client(self) -> None:
        async def abort() -> None:
            comm: Any = self.client.scheduler_comm
            comm.comm.abort()

        self.client.sync(abort)
        while self.client.status != "running":
            time.sleep(0.05)

    def hide(self) -> None:
        hidden = self.dataset.url + ".away"
        if not os.path.exists(hidden):
            os.rename(self.dataset.url, hidden)
            self.later(1.0, os.rename, hidden, self.dataset.url)

    def fill(self, seconds: float) -> None:
        """Leave no byte free on the disk of the partitions and the checkpoints."""
        ballast = self.disk / "ballast"
        if not ballast.exists():
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(2**20))
            self.later(seconds, ballast.unlink)

    def kill_and_fill(self, shuffler: Shuffler, rank: int, seconds: float) -> None:
        """Kill a worker, and fill the room that its partition had, so that there is none for its successor's."""
        pid = self.send(shuffler, rank, signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait()
        self.fill(seconds)

    def cut_link(self, shuffler: Shuffler, rank: int, seconds: float) -> None:
        worker = shuffler.addresses[rank]
        self.hosts.set_link(worker, "down")
        self.later(seconds, self.hosts.set_link, worker, "up")

    def separate(self, shuffler: Shuffler, rank: int, seconds: float) -> None:
        pair = shuffler.addresses[rank], shuffler.addresses[(rank + 1) % shuffler.n_workers]
        self.hosts.separate(*pair)
        self.later(seconds, self.hosts.reconnect, *pair)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A folder, which is a small file system of its own if this process may mount one."""
    folder.mkdir()
    if not can_make_networks():
        yield folder
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "chaos", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def resume(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # another fault has killed it
        os.kill(pid, signal.SIGCONT)


def reset_connections(dask_worker: Any) -> None:
    """Abort all connections of a worker to other workers."""
    for comms in [*dask_worker.rpc.available.values(), *dask_worker.rpc.occupied.values()]:
        for comm in list(comms):
            comm.abort()


def spoil_next_message(dask_worker: Any) -> None:
    """Flip a bit in the next message that this worker packs."""
    from dshuffle.exchange.endpoints import Sender

    pack = Sender._pack

    async def spoilt(self: Any, *args: Any, **kwargs: Any) -> Any:
        Sender._pack = pack  # type: ignore[method-assign]
        buffer = await pack(self, *args, **kwargs)
        if buffer.rows.size:
            buffer.rows[0, 0] ^= 1
        return buffer

    Sender._pack = spoilt  # type: ignore[method-assign]
