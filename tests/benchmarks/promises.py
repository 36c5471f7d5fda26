"""The promises of the README and the design notes that are about time and memory, measured and judged.

    python tests/benchmarks/promises.py [--quick]

Prints one line a promise: what was measured, the bound, and whether it holds. Read ratios: everything compared is
measured in one run. `--quick` leaves out `dask.array.shuffle`, which takes half a minute.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import psutil
from distributed import Client, LocalCluster, Worker

import dshuffle
from dshuffle.planning import Choices, EpochPlanner, Global, ShuffleSpec
from dshuffle.planning.planner import OwnPlanner
from dshuffle.planning.remainder import SampleDigest, due_in_an_epoch

MIB = 2**20


def _neighbour(name: str) -> ModuleType:
    """A benchmark that stands beside this file."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OWN_PARTS = (
    ("global", 10**9, 4096, 1, 0.4, 200 * MIB),
    ("global", 10**7, 256, 1, 0.06, 200 * MIB),
    ("global", 10**6, 20, 1, 0.06, 200 * MIB),
    ("partial:0.1", 10**7, 256, 1, 0.06, 200 * MIB),
    ("partial:0.1", 10**6, 20, 100, 1.0, 200 * MIB),
)
"""Assignment, samples, workers, epoch, and the processor seconds and bytes that planning one worker's part may take."""


def planning_seconds(n_samples: int = 1_000_000, n_workers: int = 20) -> float:
    """One global epoch with `peer`, checked, on one core, after compilation."""
    spec = ShuffleSpec(n_samples, n_workers, Choices(assignment=Global(), delivery="peer", sharding="random", seed=0))
    planner = EpochPlanner(spec)
    planner.load().for_worker(0)
    seconds = []
    for _ in range(4):
        started = time.process_time()
        planner.advance().for_worker(0)
        seconds.append(time.process_time() - started)
    return statistics.median(seconds[1:])


def own_part(spec: ShuffleSpec, rank: int, epoch: int) -> tuple[float, int]:
    """Processor seconds to plan one worker's part of an epoch, after compilation, and bytes above the start."""
    OwnPlanner(ShuffleSpec(64, 4, spec.choices), 0).plan(1, spec.choices.delivery)  # loads kernels
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak so far
    start, started = _peak_nbytes(), time.process_time()
    OwnPlanner(spec, rank).plan(epoch, spec.choices.delivery)
    return time.process_time() - started, _peak_nbytes() - start


def _peak_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def digest_fraction(n_samples: int = 10**8, n_workers: int = 16) -> float:
    """Processor time of the digests that a worker votes, by that of planning its own part of the same epoch."""
    spec = ShuffleSpec(n_samples, n_workers, Choices("global"))
    planner = OwnPlanner(spec, 1)
    planner.plan(1, "peer")  # compiles
    due_in_an_epoch(spec, 0)
    marks = [time.process_time()]
    order = planner.plan(2, "peer").order
    marks.append(time.process_time())
    SampleDigest.of(order, spec.choices.seed)
    due_in_an_epoch(spec, 1)  # in the first epoch; later ones find it in a cache
    marks.append(time.process_time())
    planning, digesting = np.diff(marks)
    return float(digesting / planning)


def _sleep(partition: dshuffle.Partition, seconds: float) -> None:
    time.sleep(seconds)


def overlap(client: Client, x: np.ndarray, training: float) -> tuple[float, float]:
    """Median wall seconds of an epoch whose training is a sleep, without and with an exchange beside it."""
    medians = []
    with tempfile.TemporaryDirectory() as folder:
        dataset = dshuffle.create_dataset(f"{folder}/x.zarr", {"x": x})
        for assignment in ("local", "global"):
            with dshuffle.Shuffler(client, dataset, assignment=assignment) as shuffler:
                marks = []
                for epoch in shuffler.epochs(7):
                    marks.append(time.perf_counter())
                    client.gather(epoch.map(_sleep, training))
            medians.append(statistics.median(np.diff(marks)[1:]))
    return medians[0], medians[1]


def _watch(dask_worker: Worker) -> None:
    """Sample this process's resident memory from a thread."""
    samples: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        process = psutil.Process()
        while not stop.wait(0.002):
            samples.append(process.memory_info().rss)

    dask_worker.bench_memory = (samples, stop)
    threading.Thread(target=watch, daemon=True).start()


def _watched(dask_worker: Worker) -> int:
    samples, stop = dask_worker.bench_memory
    stop.set()
    return max(samples) - samples[0]


def extra_memory(client: Client, x: np.ndarray) -> tuple[int, int]:
    """Bytes by which a worker grows over its first exchange, at most, and bytes of the rows that came in."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = dshuffle.create_dataset(f"{folder}/x.zarr", {"x": x})
        with dshuffle.Shuffler(client, dataset) as shuffler:
            for epoch in shuffler.epochs(1):
                client.gather(epoch.map(_sleep, 0.2))
            client.run(_watch)
            for epoch in shuffler.epochs(1):
                client.gather(epoch.map(_sleep, 0.2))
            grown = max(client.run(_watched).values())
            record = shuffler.records[1]
    return grown, max(record.wire_received_bytes)


def main(argv: list[str] | None = None) -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--samples", type=int, default=200_000)
    options = parser.parse_args(argv)
    holds = True

    def judge(promise: str, measured: str, kept: bool) -> None:
        nonlocal holds
        holds &= kept
        print(f"{'holds' if kept else 'FAILS':6s} {promise}: {measured}", flush=True)

    plan = planning_seconds()
    judge("a global epoch of 1,000,000 samples, 20 workers, is planned in under 0.5 s", f"{plan:.3f} s", plan < 0.5)

    for assignment, n_samples, n_workers, epoch, seconds, nbytes in OWN_PARTS:
        spec = ShuffleSpec(n_samples, n_workers, Choices(assignment))
        used, extra = own_part(spec, n_workers // 2, epoch)
        judge(
            f"{assignment}: 1 of {n_workers:,} workers plans its part of {n_samples:,} samples for epoch {epoch} in "
            f"{seconds} s, {nbytes // MIB} MiB",
            f"{used:.3f} s, {extra / MIB:.0f} MiB",
            used <= seconds and extra <= nbytes,
        )

    fraction = digest_fraction()
    judge(
        "1 of 16 workers makes the digests of its part of 100,000,000 samples in 1 % of the time of planning it",
        f"{fraction:.2%}",
        fraction <= 0.01,
    )

    arguments = ["--samples", str(options.samples), *(["--skip", "array"] if options.quick else [])]
    results = _neighbour("exchange").main(arguments)
    ratios = {name: result["seconds"] / results["ours"]["seconds"] for name, result in results.items()}
    judge("at least 0.7 of the rate of a bare all-to-all", f"{ratios['bare']:.2f}", ratios["bare"] >= 0.7)
    judge("20 times a DataFrame P2P shuffle", f"{ratios['dataframe P2P']:.1f}", ratios["dataframe P2P"] >= 20)
    if not options.quick:
        judge("80 times dask.array.shuffle", f"{ratios['dask.array.shuffle']:.1f}", ratios["dask.array.shuffle"] >= 80)

    x = np.random.default_rng(0).integers(0, 256, (options.samples, 1024), dtype=np.uint8)
    with (
        LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=":0", memory_limit=0) as cluster,
        Client(cluster) as client,
    ):
        grown, incoming = extra_memory(client, x)
        judge(
            "a worker grows by its incoming rows and 128 MiB at most",
            f"{grown / MIB:.0f} MiB for {incoming / MIB:.0f} MiB of rows",
            grown <= incoming + 128 * MIB,
        )
        alone, beside = overlap(client, x, training=1.0)
        judge("an epoch takes at most 1.1 times its training", f"{beside / alone:.3f}", beside <= 1.1 * alone)
    return holds


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
