"""Workers on slow links: their answers are late, and they are not lost while they give signs of life."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client

from dshuffle import Shuffler, create_dataset
from dshuffle.errors import WorkerLost
from dshuffle.runtime.worker import session
from dshuffle.runtime.worker.sessions import WorkerSessions

pytestmark = pytest.mark.slow  # seconds of waiting

HEARTBEAT = 1.5


@pytest.fixture
def dataset(tmp_path) -> Any:
    rows = np.random.default_rng(0).random((400, 512))
    return create_dataset(str(tmp_path / "d.zarr"), {"x": rows}, chunk_rows=50)


def train(client: Client, dataset: Any) -> Any:
    with Shuffler(client, dataset, on_loss="raise") as shuffler:
        for epoch in shuffler.epochs(2):
            assert sum(client.gather(epoch.map(len))) == 400
    return shuffler.records[1]


@pytest.fixture
def deaf(cluster_of, dataset) -> Iterator[Client]:
    """Workers whose links have 1 Mbit/s, and which never get the scheduler's questions."""

    def ask_in_vain(dask_worker: Any) -> None:
        async def never(**_: Any) -> None:
            await asyncio.sleep(3600)

        dask_worker.handlers["dshuffle_status"] = never

    settings = {"dshuffle.emulated-links": "1mbit", "dshuffle.heartbeat": f"{HEARTBEAT} s"}
    with dask.config.set(settings), cluster_of({"0": {}, "1": {}}) as cluster, Client(cluster) as client:
        with Shuffler(client, dataset):
            client.run(ask_in_vain)
        yield client


def test_workers_that_give_signs_of_life_are_not_lost(deaf, dataset) -> None:
    assert train(deaf, dataset).exchange_seconds > 2 * HEARTBEAT


def test_without_signs_of_life_they_are_lost(deaf, dataset, monkeypatch) -> None:
    async def give_none(*_: Any) -> None:
        """Say nothing."""

    monkeypatch.setattr(WorkerSessions, "_give_sign", give_none)
    with pytest.raises(WorkerLost, match=r"has not answered for 1\.5 s"):
        train(deaf, dataset)


class SlowLink:
    """Passes the bytes of all connections to a worker, those from the worker one after the other at a rate."""

    def __init__(self, port: int, rate: float) -> None:
        self._port, self._rate = port, rate
        self._queue: asyncio.Queue[tuple[bytes, asyncio.StreamWriter]] = asyncio.Queue(maxsize=100)
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, on: socket.socket) -> None:
        self._start(self._pass())
        async with await asyncio.start_server(self._connected, sock=on) as server:
            await server.serve_forever()

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_worker, to_worker = await asyncio.open_connection("127.0.0.1", self._port)
        self._start(self._in(reader, to_worker))
        self._start(self._out(from_worker, writer))

    async def _in(self, reader: asyncio.StreamReader, to_worker: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**12):
                to_worker.write(data)
        to_worker.close()

    async def _out(self, from_worker: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await from_worker.read(2**12):
                await self._queue.put((data, writer))
        await self._queue.put((b"", writer))

    async def _pass(self) -> None:
        while True:
            data, writer = await self._queue.get()
            await asyncio.sleep(len(data) / self._rate)
            if data:
                writer.write(data)
            else:
                writer.close()


@pytest.fixture
def behind_slow_links(cluster_of) -> Iterator[Client]:
    """Two workers. What each sends waits in a queue with its answers to the scheduler, at 1 Mbit/s."""
    loop, links, workers = asyncio.new_event_loop(), [], {}
    for name in ("0", "1"):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        link = socket.create_server(("127.0.0.1", 0))
        workers[name] = {"port": port, "contact_address": f"tcp://127.0.0.1:{link.getsockname()[1]}"}
        links.append(loop.create_task(SlowLink(port, rate=1e6 / 8).serve(link)))

    async def serve() -> None:
        await asyncio.gather(*links, return_exceptions=True)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.1)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    settings = {"dshuffle.shared-memory": False, "dshuffle.heartbeat": f"{HEARTBEAT} s"}
    try:
        with dask.config.set(settings), cluster_of(workers) as cluster, Client(cluster) as client:
            yield client
    finally:
        for link in links:
            loop.call_soon_threadsafe(link.cancel)
        thread.join()
        loop.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="this system does not say when bytes came")
@pytest.mark.parametrize("counts", [True, False])
def test_bytes_that_arrive_from_a_worker_are_signs_of_its_life(behind_slow_links, dataset, monkeypatch, counts) -> None:
    """Worker 1 gives no signs itself, and its answers wait behind one long message."""
    give, heard = WorkerSessions._give_sign, session.WorkerSession.heard
    seen = []

    async def only_of_others(self: WorkerSessions, *sign: Any) -> None:
        if self.worker.name != "1":
            await give(self, *sign)

    def noted(self: session.WorkerSession) -> dict[int, float] | None:
        ages = heard(self)
        seen.append(ages)
        return ages if counts else None if ages is None else {}

    monkeypatch.setattr(WorkerSessions, "_give_sign", only_of_others)
    monkeypatch.setattr(session.WorkerSession, "heard", noted)
    if counts:
        assert train(behind_slow_links, dataset).exchange_seconds > 2 * HEARTBEAT
    else:
        with pytest.raises(WorkerLost, match=r"rank 1 .* has not answered for 1\.5 s"):
            train(behind_slow_links, dataset)
    assert any(ages and min(ages.values()) < 0.5 for ages in seen)
