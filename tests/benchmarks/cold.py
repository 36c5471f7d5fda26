"""What a first call costs: permuting in a new cluster, opening a session, imports, exits, and the command's first line.

    python tests/benchmarks/cold.py [--repeats 5] [--workers 4] [--only SCENE ...] [--rival PYTHON]

Every repetition is a new process with a new cluster of worker processes, and kernels come from numba's cache on disk.
So a first call includes what the client and the workers load. `preloaded` is the same in a cluster whose workers run
`dask worker --preload dshuffle`. Figures are medians. Read the ratios: both of their times are from the same process.
Processor seconds depend less on what else the machine does.

`--rival` is the Python of an environment with `dask-array` and `frisky` (it need not have dshuffle): a column with the
first and the second shuffle of the same rows there. See `cold_rival.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import dask.array
import numpy as np
from distributed import Client, LocalCluster, wait

import dshuffle

HERE = Path(__file__).parent
ROWS, ROW_NBYTES, CHUNKS = 100_000, 1024, 64
PRELOADED = {"distributed.worker.preload": ["dshuffle"]}

BOUNDS = {
    "permute: first / second": 3.0,
    "open: first / second": 3.0,
    "open, preloaded: first / second": 3.0,
    "imports: in memory": 0.5,
    "imports: dataset": 0.9,
    "exit: beyond plain Dask": 0.1,
    "compare: first line": 1.0,
}
"""What the project promises."""

IMPORT = """
import contextlib, json, sys, time
import distributed, distributed.nanny, distributed.worker
started = time.process_time()
for name in json.loads(sys.argv[1]):
    with contextlib.suppress(ImportError):  # a module that another one has made
        __import__(name)
print(time.process_time() - started)
"""
"""Imports modules in a process that has what every worker of Dask has, and prints the processor seconds."""


@contextmanager
def clusters(n_workers: int, preloaded: bool = False) -> Iterator[Client]:
    """A new cluster of processes."""
    with (
        dask.config.set(PRELOADED if preloaded else {}),
        LocalCluster(
            n_workers=n_workers, threads_per_worker=1, processes=True, dashboard_address=":0", memory_limit=0
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def processor_seconds(client: Client) -> float:
    """Mean processor seconds of a worker since it began."""
    return statistics.mean(client.run(time.process_time).values())


def modules(client: Client) -> list[str]:
    """Modules that a worker has loaded, in this order."""
    names: list[str] = next(iter(client.run(lambda: list(sys.modules)).values()))
    return names


def permute(n_workers: int, preloaded: bool = False) -> dict[str, float]:
    """Seconds of the first three calls of ``dshuffle.permute`` in a cluster."""
    result = {}
    with clusters(n_workers, preloaded) as client:
        chunks = (-(-ROWS // CHUNKS), ROW_NBYTES)
        x = dask.array.random.default_rng(0).integers(0, 256, (ROWS, ROW_NBYTES), np.uint8, chunks=chunks).persist()
        wait(x)
        for number, name in enumerate(("first", "second", "third")):
            before, started = processor_seconds(client), time.perf_counter()
            rows = dshuffle.permute(client, x, number)
            wait(rows)
            result[name] = time.perf_counter() - started
            result[f"{name}, processor of a worker"] = processor_seconds(client) - before
            del rows
    return result


def opening(n_workers: int, preloaded: bool = False) -> dict[str, float]:
    """Seconds in which the first two sessions of a cluster open."""
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        dataset = dshuffle.create_dataset(f"{folder}/d.zarr", {"x": np.zeros((20_000, 64), np.float32)})
        with clusters(n_workers, preloaded) as client:
            for name in ("first", "second"):
                before, started = processor_seconds(client), time.perf_counter()
                shuffler = dshuffle.Shuffler(client, dataset)
                result[name] = time.perf_counter() - started
                result[f"{name}, processor of a worker"] = processor_seconds(client) - before
                shuffler.close()
    return result


def rows_from(first: int) -> np.ndarray[Any, Any]:
    """Chunks of an array that no function of dask.array makes."""
    return np.arange(first, first + 100)


def in_memory(client: Client) -> None:
    """An exchange that needs no dataset."""
    chunks = [dask.array.from_delayed(dask.delayed(rows_from)(100 * k), (100,), np.dtype(int)) for k in range(8)]
    wait(dshuffle.permute(client, dask.array.concatenate(chunks), 1))


def of_dataset(client: Client) -> None:
    """An epoch of a session."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = dshuffle.create_dataset(f"{folder}/d.zarr", {"x": np.zeros((1000, 8), np.float32)})
        with dshuffle.Shuffler(client, dataset) as shuffler:
            for epoch in shuffler.epochs(2):
                client.gather(epoch.map(len))


def imports(n_workers: int) -> dict[str, float]:
    """Processor seconds of the imports of a worker, beyond those of every worker of Dask."""
    result = {}
    for name, run in (("in memory", in_memory), ("dataset", of_dataset)):
        with clusters(n_workers) as client:
            before = set(modules(client))
            run(client)
            more = [module for module in modules(client) if module not in before]
        command = [sys.executable, "-c", IMPORT, json.dumps(more)]
        seconds = [float(subprocess.run(command, check=True, capture_output=True).stdout) for _ in range(3)]
        result[name] = statistics.median(seconds)
    return result


def exits(_: int) -> dict[str, float]:
    """Processor seconds from close to exit, beyond those of plain Dask, after a session and after an exchange."""
    ran = subprocess.run([sys.executable, str(HERE / "exits.py")], check=True, capture_output=True, text=True)
    results = json.loads(ran.stdout.splitlines()[-1])
    return {
        name: results[scene]["processor"] - results["plain Dask"]["processor"]
        for name, scene in (("beyond plain Dask", "session"), ("permute, beyond plain Dask", "permute"))
    }


def compare(_: int) -> dict[str, float]:
    """Seconds until ``dshuffle compare`` prints its first line."""
    script = "from dshuffle.cli import script; script()"
    with tempfile.TemporaryDirectory() as folder:
        dshuffle.create_dataset(f"{folder}/d.zarr", {"x": np.ones((2000, 8)), "y": np.ones(2000)})
        command = [sys.executable, "-c", script, "compare", f"{folder}/d.zarr", "--workers", "2", "--epochs", "2"]
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder) as process:
            assert process.stdout is not None
            line = process.stdout.readline().decode()
            seconds = time.perf_counter() - started
            process.send_signal(signal.SIGINT)
            process.stdout.read()
    if not line.strip() or line.startswith(("Usage", "Error")):
        raise RuntimeError(f"dshuffle compare has printed {line!r}")
    return {"first line": seconds}


SCENES: dict[str, Callable[[int], dict[str, float]]] = {
    "permute": permute,
    "permute, preloaded": lambda n_workers: permute(n_workers, preloaded=True),
    "open": opening,
    "open, preloaded": lambda n_workers: opening(n_workers, preloaded=True),
    "imports": imports,
    "exit": exits,
    "compare": compare,
}


def environment() -> dict[str, str]:
    """Variables of a user: an installed package has its bytecode."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def repeated(command: list[str], repeats: int) -> dict[str, float]:
    """Medians of what a command prints as JSON, in a process for each repetition, after one that does not count."""
    results = []
    for _ in range(repeats + 1):
        ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=180)
        if ran.returncode:
            sys.exit(ran.stderr)
        results.append(json.loads(ran.stdout.splitlines()[-1]))
    medians = {name: statistics.median(result[name] for result in results[1:]) for name in results[0]}
    if "first" in medians:
        medians["first / second"] = statistics.median(result["first"] / result["second"] for result in results[1:])
    return medians


def table(results: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Lines: scene, figure, bound."""
    lines = []
    for scene, figures in results.items():
        for name, figure in figures.items():
            label = f"{scene}: {name}"
            bound = f"   bound {BOUNDS[label]:g}" if label in BOUNDS else ""
            lines.append(f"{label:55s} {figure:7.2f}{bound}")
    return lines


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=list(SCENES), choices=list(SCENES))
    parser.add_argument("--rival", help="Python of an environment with dask-array and frisky")
    parser.add_argument("--scene", choices=list(SCENES), help=argparse.SUPPRESS)  # of a process of its own
    options = parser.parse_args(argv)
    if options.scene:
        print(json.dumps(SCENES[options.scene](options.workers)))
        return {}
    results = {}
    for scene in options.only:
        command = [sys.executable, __file__, f"--workers={options.workers}", "--scene", scene]
        results[scene] = repeated(command, options.repeats)
    if options.rival:
        sizes = [str(size) for size in (ROWS, ROW_NBYTES, CHUNKS, options.workers)]
        rival = repeated([options.rival, str(HERE / "cold_rival.py"), *sizes], options.repeats)
        results["rival"] = rival
        if "permute" in results:
            rival["permute / rival"] = results["permute"]["first"] / rival["first"]
    print("\n".join(table(results)))
    print(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
