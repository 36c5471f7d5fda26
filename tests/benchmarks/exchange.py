"""How fast a global exchange is, against what users have today and against the bare network.

    python tests/benchmarks/exchange.py [--samples 200000] [--row-bytes 1024] [--workers 4] [--skip array] [--with ray]
    python tests/benchmarks/exchange.py --scheduler tcp://... --data /shared/folder [--with ray --ray ADDRESS]

One run measures all of them on the same cluster, so read the ratios. `bare` sends the same bytes between the same
processes through Dask comms in 8 MiB messages, four at once from each, and does nothing with them. Both are timed on
the scheduler, from the order to begin until the last worker has reported. `Ray Data` is `random_shuffle` of the same
rows in 64 blocks of its object store, after one shuffle that is not counted (`pip install ray pyarrow`). Without --ray
it has as many processes, which start when Dask's have ended.

With --scheduler and --ray, clusters that run already are used, for example on shaped links. All hosts must see the
folder of --data.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import dask
import dask.array
import dask.dataframe
import numpy as np
import pandas as pd
from distributed import Client, LocalCluster, Scheduler, Worker, wait
from distributed.protocol import to_serialize

import dshuffle

MESSAGE = 8 * 2**20


def sleep(partition: dshuffle.Partition, seconds: float) -> None:
    """Stands for training that leaves the cores alone, so that the exchange is measured by itself."""
    time.sleep(seconds)


def ours(client: Client, x: np.ndarray, repeats: int, data: str | None, training: float = 0.5) -> dict[str, Any]:
    """Seconds from the start of an exchange to its end, and of the commit. The plan was made an epoch ahead."""
    with tempfile.TemporaryDirectory(dir=data) as folder:
        dataset = dshuffle.create_dataset(f"{folder}/x.zarr", {"x": x})
        with dshuffle.Shuffler(client, dataset, assignment="global", delivery="peer") as shuffler:
            for epoch in shuffler.epochs(repeats + 2):
                client.gather(epoch.map(sleep, training))
            records = shuffler.records[1:]
    seconds = [record.exchange_seconds + record.commit_seconds for record in records[1:]]
    return {
        "seconds": statistics.median(seconds),
        "all": seconds,
        "wire_bytes": records[-1].wire_bytes,
        "plan": statistics.median(record.plan_seconds for record in records),
        "gather": statistics.median(record.gather_seconds for record in records),
        "scatter": statistics.median(record.scatter_seconds for record in records),
    }


async def _listen(dask_worker: Worker) -> None:
    async def bench_receive(data: Any) -> dict[str, str]:
        return {"status": "OK"}

    async def bench_send(addresses: list[str], nbytes: int) -> dict[str, str]:
        await _send_all(addresses, nbytes, dask_worker)
        return {"status": "OK"}

    dask_worker.handlers |= {"bench_receive": bench_receive, "bench_send": bench_send}


async def _all_send(addresses: list[str], nbytes: int, dask_scheduler: Scheduler) -> float:
    started = time.perf_counter()
    await dask_scheduler.broadcast(msg={"op": "bench_send", "addresses": addresses, "nbytes": nbytes})
    return time.perf_counter() - started


async def _send_all(addresses: list[str], nbytes: int, dask_worker: Worker) -> None:
    rows = np.ones(nbytes * (len(addresses) - 1), np.uint8)  # as much memory as is sent, none of it in a cache
    targets = [a for a in addresses if a != dask_worker.address]
    shift = addresses.index(dask_worker.address)
    targets = targets[shift:] + targets[:shift]
    jobs = iter(
        [
            (address, rows[i * nbytes + first : i * nbytes + min(first + MESSAGE, nbytes)])
            for first in range(0, nbytes, MESSAGE)
            for i, address in enumerate(targets)
        ]
    )

    async def sender() -> None:
        for address, message in jobs:
            await dask_worker.rpc(address).bench_receive(data=to_serialize(message))

    await asyncio.gather(*(sender() for _ in range(4)))


def bare(client: Client, wire_bytes: int, repeats: int) -> dict[str, Any]:
    """Seconds of an all-to-all of as many bytes."""
    addresses = sorted(client.scheduler_info(n_workers=-1)["workers"])
    client.run(_listen)
    pair = wire_bytes // (len(addresses) * (len(addresses) - 1))
    seconds = [client.run_on_scheduler(_all_send, addresses, pair) for _ in range(repeats + 1)][1:]
    return {"seconds": statistics.median(seconds), "all": seconds}


def dataframe_p2p(client: Client, x: np.ndarray, repeats: int) -> dict[str, Any]:
    """A DataFrame P2P shuffle of the same rows from persisted partitions, to a random key."""
    rng = np.random.default_rng(0)
    parts = []
    for rows in np.array_split(x, 64):
        frame = pd.DataFrame(rows.view(np.float64), columns=[f"c{i}" for i in range(x.shape[1] // 8)])
        frame["key"] = rng.integers(0, 64, len(frame))
        parts.append(dask.delayed(lambda f: f, pure=False)(frame))
    frame = dask.dataframe.from_delayed(parts, meta=parts[0].compute().iloc[:0]).persist()
    wait(frame)
    seconds = []
    with dask.config.set({"dataframe.shuffle.method": "p2p"}):
        for _ in range(repeats):
            started = time.perf_counter()
            shuffled = frame.shuffle("key", ignore_index=True).persist()
            wait(shuffled)
            seconds.append(time.perf_counter() - started)
            del shuffled
    return {"seconds": statistics.median(seconds), "all": seconds}


def array_shuffle(client: Client, x: np.ndarray) -> dict[str, Any]:
    """`dask.array.shuffle` of the same rows from 64 persisted chunks to a random permutation."""
    array = dask.array.from_array(x, chunks=(-(-len(x) // 64), -1)).persist()
    wait(array)
    order = np.random.default_rng(0).permutation(len(x))
    indexer = [part.tolist() for part in np.array_split(order, 64)]
    started = time.perf_counter()
    shuffled = dask.array.shuffle(array, indexer, axis=0).persist()
    wait(shuffled)
    return {"seconds": time.perf_counter() - started}


def ray_data(x: np.ndarray, n_workers: int, repeats: int, address: str | None) -> dict[str, Any]:
    """`random_shuffle` of the same rows from 64 blocks."""
    import ray

    where: dict[str, Any] = (
        {"num_cpus": n_workers, "include_dashboard": False} if address is None else {"address": address}
    )
    ray.init(log_to_driver=False, logging_level="ERROR", **where)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        given = ray.data.from_numpy(np.array_split(x, 64))
        blocks = given.map_batches(lambda batch: batch, batch_size=None).materialize()  # on the nodes that have CPUs
        seconds = []
        for repeat in range(repeats + 1):
            started = time.perf_counter()
            blocks.random_shuffle(seed=repeat).materialize()
            seconds.append(time.perf_counter() - started)
    finally:
        ray.shutdown()
    return {"seconds": statistics.median(seconds[1:]), "all": seconds[1:]}


@contextlib.contextmanager
def cluster(options: argparse.Namespace) -> Iterator[Client]:
    """A client of the cluster to measure."""
    if options.scheduler:
        with Client(options.scheduler) as client:
            yield client
        return
    with (
        LocalCluster(
            n_workers=options.workers,
            threads_per_worker=1,
            processes=True,
            dashboard_address=":0",
            memory_limit=0,
        ) as local,
        Client(local) as client,
    ):
        yield client


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--row-bytes", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--scheduler", metavar="ADDRESS", help="use this cluster")
    parser.add_argument("--ray", metavar="ADDRESS", help="use this Ray cluster")
    parser.add_argument("--data", metavar="FOLDER", help="where to write the dataset  [default: a temporary folder]")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip", action="append", default=[], choices=["bare", "dataframe", "array"])
    parser.add_argument("--with", dest="also", action="append", default=[], choices=["ray"])
    options = parser.parse_args(argv)
    if options.ray and "ray" not in options.also:
        parser.error("--ray needs --with ray")
    if options.scheduler and not options.data:
        parser.error("--scheduler needs --data, a folder that all hosts see")
    x = np.random.default_rng(0).integers(0, 256, (options.samples, options.row_bytes), dtype=np.uint8)
    results: dict[str, dict[str, Any]] = {}
    with cluster(options) as client:
        results["ours"] = ours(client, x, options.repeats, options.data)
        if "bare" not in options.skip:
            results["bare"] = bare(client, results["ours"]["wire_bytes"], options.repeats)
            again = ours(client, x, options.repeats, options.data)  # before and after, since the machine may drift
            both = results["ours"]["all"] + again["all"]
            results["ours"] = again | {"seconds": statistics.median(both), "all": both}
        if "dataframe" not in options.skip:
            results["dataframe P2P"] = dataframe_p2p(client, x, 1)
        if "array" not in options.skip:
            results["dask.array.shuffle"] = array_shuffle(client, x)
    if "ray" in options.also:
        results["Ray Data"] = ray_data(x, options.workers, options.repeats, options.ray)
    base = results["ours"]["seconds"]
    for name, result in results.items():
        result["ratio"] = result["seconds"] / base
        print(f"{name:20s} {result['seconds']:8.3f} s  {result['ratio']:7.2f} x ours")
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
