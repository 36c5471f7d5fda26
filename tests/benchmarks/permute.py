"""How fast a Dask array's rows are permuted and taken by index, against what Dask offers for that.

    python tests/benchmarks/permute.py [--samples 200000] [--row-bytes 1024] [--workers 4] [--chunks 64] [--skip array]

One run measures all of them on the same cluster and the same persisted chunks, so read the ratios. `take` is
`dshuffle.take(client, x, order)`, `indexing` is `x[order]`, and `dask.array.shuffle` the same rows by the same order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import dask.array
import numpy as np
from distributed import Client, LocalCluster, wait

import dshuffle


def seconds(shuffle: Callable[[], dask.array.Array], repeats: int) -> dict[str, Any]:
    """From the call to the last chunk."""
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = shuffle()
        wait(result)
        taken.append(time.perf_counter() - started)
        del result
    return {"seconds": statistics.median(taken), "all": taken}


def highest_memory(client: Client) -> int:
    """The most that all workers together have taken since they began, in bytes."""

    def peak() -> int:
        with open("/proc/self/status") as status:
            [line] = [line for line in status if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024

    return sum(client.run(peak).values())


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--row-bytes", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip", action="append", default=[], choices=["array", "indexing"])
    options = parser.parse_args(argv)
    n_rows = options.samples
    with (
        LocalCluster(
            n_workers=options.workers, threads_per_worker=1, processes=True, dashboard_address=":0", memory_limit=0
        ) as cluster,
        Client(cluster) as client,
    ):
        chunks = (-(-n_rows // options.chunks), options.row_bytes)
        x = dask.array.random.default_rng(0).integers(0, 256, (n_rows, options.row_bytes), np.uint8, chunks=chunks)
        x = x.persist()
        wait(x)
        wait(dshuffle.permute(client, x[:1000], 0))  # kernels come from the disk, connections are opened
        before = highest_memory(client)
        ours = seconds(lambda: dshuffle.permute(client, x, 1), options.repeats)
        results = {"ours": ours | {"memory / array": (highest_memory(client) - before) / x.nbytes}}
        order = dshuffle.row_permutation(n_rows, 1)
        some = np.sort(order[:100])
        assert np.array_equal(
            dshuffle.permute(client, x, 1)[:100].compute(),
            x[some].compute()[np.searchsorted(some, order[:100])],
        )
        wait(dshuffle.take(client, x[:1000], order[:10] % 1000))
        results["take"] = seconds(lambda: dshuffle.take(client, x, order), options.repeats)
        if "array" not in options.skip:
            indexer = [part.tolist() for part in np.array_split(order, options.chunks)]
            results["dask.array.shuffle"] = seconds(lambda: dask.array.shuffle(x, indexer, axis=0).persist(), 1)
        if "indexing" not in options.skip:
            results["indexing"] = seconds(lambda: x[order].persist(), 1)
    for name, result in results.items():
        result["ratio"] = result["seconds"] / ours["seconds"]
        print(f"{name:20s} {result['seconds']:8.3f} s  {result['ratio']:7.2f} x ours")
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
