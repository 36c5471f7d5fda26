"""The first and the second shuffle of an array in a new cluster of the packages dask-array and frisky.

    PYTHON tests/benchmarks/cold_rival.py ROWS ROW_NBYTES CHUNKS WORKERS

``cold.py --rival PYTHON`` runs it in an environment that has them. The last line is JSON: seconds from the call to the
last chunk, which stays on its worker.
"""

from __future__ import annotations

import json
import sys
import time

import dask_array
import numpy as np
from frisky import LocalCluster, wait


def wait_for(array: dask_array.Array) -> None:
    """Wait until all chunks of a persisted array are on the workers."""
    wait(list(dict(array.__dask_graph__()).values()))


def main(n_rows: int, row_nbytes: int, n_chunks: int, n_workers: int) -> dict[str, float]:
    cluster = LocalCluster(n_workers=n_workers, threads_per_worker=1, processes=True)
    client = cluster.get_client()
    try:
        chunks = (-(-n_rows // n_chunks), row_nbytes)
        x = dask_array.random.default_rng(0).integers(0, 256, (n_rows, row_nbytes), dtype=np.uint8, chunks=chunks)
        x = x.persist()
        wait_for(x)
        result = {}
        for number, name in enumerate(("first", "second")):
            started = time.perf_counter()
            order = np.random.default_rng(number).permutation(n_rows)
            shuffled = x.shuffle([part.tolist() for part in np.array_split(order, n_chunks)], 0).persist()
            wait_for(shuffled)
            result[name] = time.perf_counter() - started
    finally:
        client.close()
        cluster.close()
    return result


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
