"""What a message costs: an all-to-all of many workers in few processes, with short messages.

    python tests/benchmarks/messages.py [--workers 64] [--processes 2] [--kib 16 160]

Every worker gets one message from every other one in an epoch. All workers talk over TCP, also within a process. The
figures are processor seconds of all worker processes, and the seconds of the exchange. `bare` requests the same bytes
between the same workers through Dask comms, and does nothing with them. `empty` is an epoch without messages (`local`),
which is subtracted from the processor seconds of `peer`; the seconds to open its session are given too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import statistics
import tempfile
import time
from typing import Any

import dask
import numpy as np
import psutil
from distributed import Client, LocalCluster, Scheduler, Worker
from distributed.protocol import to_serialize

import dshuffle

ROW = 1024
AT_ONCE = 8
"""Requests of a worker that `bare` keeps open."""


def run_workers(scheduler: str, names: list[int], ready: Any) -> None:
    """Run some workers in this process."""
    logging.getLogger("distributed").setLevel(logging.ERROR)
    # Each worker would list the process's thousands of sockets twice a second.
    dask.config.set({"distributed.admin.system-monitor.interval": "60s"})

    async def run() -> None:
        workers = [Worker(scheduler, nthreads=1, name=str(name), memory_limit=0, dashboard=False) for name in names]
        await asyncio.gather(*workers)
        ready.set()
        await asyncio.gather(*(worker.finished() for worker in workers))

    asyncio.run(run())


def processor_seconds(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def nothing(partition: dshuffle.Partition) -> None:
    """A task that does nothing, in place of training."""


def epochs_of(
    client: Client, pids: list[int], n_workers: int, nbytes: int, epochs: int, **way: str
) -> dict[str, float]:
    """Seconds and processor seconds of an epoch, with tasks that do nothing."""
    rows = np.zeros((n_workers**2 * nbytes // ROW, ROW), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        dataset = dshuffle.create_dataset(f"{folder}/x.zarr", {"x": rows})
        started = time.perf_counter()
        with dshuffle.Shuffler(client, dataset, **way) as shuffler:
            opened = time.perf_counter() - started
            for epoch in shuffler.epochs(3):
                client.gather(epoch.map(nothing))
            before, started = processor_seconds(pids), time.perf_counter()
            for epoch in shuffler.epochs(epochs):
                client.gather(epoch.map(nothing))
            spent, lasted = processor_seconds(pids) - before, time.perf_counter() - started
            records = shuffler.records[-epochs:]
    return {
        "open_seconds": opened,
        "epoch_seconds": lasted / epochs,
        "seconds": statistics.median(record.exchange_seconds for record in records),
        "processor_seconds": spent / epochs,
    }


def empty(client: Client, pids: list[int], n_workers: int, nbytes: int, epochs: int) -> dict[str, float]:
    """An epoch without messages."""
    return epochs_of(client, pids, n_workers, nbytes, 4 * epochs, assignment="local")


def peer(client: Client, pids: list[int], n_workers: int, nbytes: int, epochs: int) -> dict[str, float]:
    """An epoch with a message for each pair of workers."""
    return epochs_of(client, pids, n_workers, nbytes, epochs, delivery="peer")


async def _listen(dask_worker: Worker, nbytes: int) -> None:
    rows = np.zeros(nbytes, np.uint8)

    async def bench_fetch() -> dict[str, Any]:
        return {"rows": to_serialize(rows)}

    async def bench_all(addresses: list[str]) -> dict[str, str]:
        shift = addresses.index(dask_worker.address)
        others = iter(addresses[shift + 1 :] + addresses[:shift])

        async def fetch() -> None:
            for address in others:
                await dask_worker.rpc(address).bench_fetch()

        await asyncio.gather(*(fetch() for _ in range(AT_ONCE)))
        return {"status": "OK"}

    dask_worker.handlers |= {"bench_fetch": bench_fetch, "bench_all": bench_all}


async def _all_fetch(addresses: list[str], dask_scheduler: Scheduler) -> float:
    started = time.perf_counter()
    await dask_scheduler.broadcast(msg={"op": "bench_all", "addresses": addresses})
    return time.perf_counter() - started


def bare(client: Client, pids: list[int], n_workers: int, nbytes: int, epochs: int) -> dict[str, float]:
    """The same messages, without rows."""
    addresses = sorted(client.scheduler_info(n_workers=-1)["workers"])
    client.run(_listen, nbytes=nbytes)
    client.run_on_scheduler(_all_fetch, addresses)
    before = processor_seconds(pids)
    seconds = [client.run_on_scheduler(_all_fetch, addresses) for _ in range(epochs)]
    spent = processor_seconds(pids) - before
    return {"seconds": statistics.median(seconds), "processor_seconds": spent / epochs}


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kib", type=int, nargs="+", default=[16, 160], help="KiB of a message")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(argv)
    logging.getLogger("distributed").setLevel(logging.ERROR)
    context = multiprocessing.get_context("spawn")
    results: dict[str, dict[str, float]] = {}
    with LocalCluster(n_workers=0, dashboard_address=":0", protocol="tcp://") as cluster, Client(cluster) as client:
        names = np.array_split(np.arange(options.workers), options.processes)
        events = [context.Event() for _ in names]
        processes = [
            context.Process(target=run_workers, args=(cluster.scheduler_address, own.tolist(), ready), daemon=True)
            for own, ready in zip(names, events, strict=True)
        ]
        for process in processes:
            process.start()
        for ready in events:
            assert ready.wait(120), "the workers did not start"
        client.wait_for_workers(options.workers, timeout=120)
        pids = [process.pid for process in processes if process.pid is not None]
        messages = options.workers * (options.workers - 1)
        for kib in options.kib:
            for name, run in (("empty", empty), ("peer", peer), ("bare", bare)):
                results[f"{name} {kib} KiB"] = found = run(client, pids, options.workers, kib * 1024, options.epochs)
                spent = found["processor_seconds"]
                if name == "empty":
                    without = spent
                    print(
                        f"empty {kib:4d} KiB {found['epoch_seconds']:7.3f} s, opened in {found['open_seconds']:.2f} s"
                    )
                    continue
                each = 1000 * (spent - (without if name != "bare" else 0)) / messages
                print(f"{name:5s} {kib:4d} KiB {found['seconds']:7.3f} s, {each:6.3f} ms of a processor a pair")
        client.shutdown()
        for process in processes:
            process.join(10)
            process.kill()
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
