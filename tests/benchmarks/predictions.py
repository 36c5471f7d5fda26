"""Predicted against measured: many clusters and jobs drawn at random, on the testbed or on links in software.

    python storage/testbed.py up --workers 8 --rate 100mbit --storage-rate 800mbit --server
    python storage/testbed.py storage sharedfs /data/moosefs
    python tests/benchmarks/predictions.py [--settings 20] [--seed 0] [--local FOLDER] [--output FILE]
    python tests/benchmarks/predictions.py --fast [--settings 20] [--seed 0] [--output FILE]

Each setting has its own link rate, storage rate, row size, chunk size and cache fraction. The cluster is measured for
some seconds, every way is predicted, then run four times, of which the median of the last three counts; the first
partitions of three sessions are loaded; then `auto` runs for a few epochs. A time that processors limited is marked
(!): the model is told how busy they are, but ten processes on two cores are not the network that it describes.

With ``--fast``, links have 100 Mbit/s to 2 Gbit/s, and exchanges take tens to hundreds of milliseconds, of which much
is fixed. A local cluster of few processes emulates links and store, without a testbed, and every way runs eight times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

import dshuffle
from dshuffle.compare import EmulatedRates, Way, local_cluster
from dshuffle.compare.comparison import predicted
from dshuffle.planning import Choices
from dshuffle.report.summary import CPU_BOUND
from dshuffle.runtime.measure.measurement import measure_cluster

WAYS = {
    "peer": ("global", "peer", "pipelined"),
    "server": ("global", "server", "pipelined"),
    "clique": ("global", "clique", "pipelined"),
    "clique, ring": ("global", "clique", "ring"),
    "storage": ("global", "storage", "pipelined"),
    "chunks, storage": ("chunks", "storage", "pipelined"),
}
AMONG = ("peer", "server", "clique", "storage")
"""What `auto` chooses from."""
EXCHANGES = 3
"""The middle one counts."""
FAST_EXCHANGES = 7
"""The same with ``--fast``."""
LOADS = 3
"""Sessions whose first partitions are loaded."""
HALF_IDLE = 0.5
"""Share of the processors' time from which on a setting counts as one whose processors are half idle."""


def draw(rng: np.random.Generator) -> dict[str, Any]:
    """A setting in which the server's unicasts take a few seconds."""
    mbit = int(rng.choice([25, 50, 100]))
    row_nbytes = int(rng.choice([4096, 8192, 16384]))
    seconds = rng.uniform(3, 6)
    return {
        "mbit": mbit,
        "storage_mbit": int(rng.choice([100, 200, 400, 800])),
        "row_nbytes": row_nbytes,
        "rows": int(seconds * mbit * 125_000 / row_nbytes) // 64 * 64,
        "chunk_rows": int(rng.choice([1, 8, 64])),
        "cache_fraction": float(rng.choice([0.2, 0.35, 0.5])),
    }


def draw_fast(rng: np.random.Generator) -> dict[str, Any]:
    """A setting in which a worker's link is busy for 10 to 150 ms."""
    workers = int(rng.choice([2, 2, 3, 4]))
    mbit = int(rng.choice([100, 200, 500, 1000, 2000]))
    row_nbytes = int(rng.choice([100, 1024, 4096, 16384]))
    seconds = float(np.exp(rng.uniform(np.log(0.03), np.log(0.5))))  # of all rows of a worker, of which 0.3 move
    rows = int(seconds * mbit * 125_000 / row_nbytes * workers)
    return {
        "workers": workers,
        "mbit": mbit,
        "storage_mbit": int(rng.choice([800, 1600, 3200])),
        "row_nbytes": row_nbytes,
        "rows": max(64 * workers, min(rows, 1_000_000) // 64 * 64),
        "chunk_rows": max(1, 2**18 // row_nbytes),
        "cache_fraction": 0.7,
    }


def sleep(partition: dshuffle.Partition, seconds: float) -> None:
    """Train, as far as an exchange notices."""
    time.sleep(seconds)


def run_here(client: Client, setting: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One setting, in a process that reaches the cluster."""
    shape = setting["rows"], setting["row_nbytes"]
    rows = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    dataset = dshuffle.create_dataset(options.data, {"x": rows}, chunk_rows=setting["chunk_rows"], overwrite=True)
    # What loads the caches of network ways is not measured here.
    local = dshuffle.create_dataset(options.local, {"x": rows}, overwrite=True) if options.local else dataset
    fraction = setting["cache_fraction"]
    exchanges = FAST_EXCHANGES if options.fast else EXCHANGES
    results: dict[str, Any] = {}
    measured = measure_cluster(client, dataset, seconds=options.seconds)
    for name, (assignment, delivery, relay) in WAYS.items():
        # Contiguous shares are loaded chunk by chunk. The first exchange does not count: the server reads its rows.
        way = Way(name, Choices(assignment, delivery, relay=relay, cache_fraction=fraction, sharding="contiguous"))
        source = dataset if delivery == "storage" else local
        seconds = predicted(measured.cluster, dataset, way).exchange_seconds
        # An exchange begins with the plan of the epoch if training has ended before the plan of the next one.
        training_seconds = 0.2 + 1.5 * seconds if options.fast else 0.3
        with dshuffle.Shuffler(client, source, **way.choices.keywords()) as shuffler:
            for epoch in shuffler.epochs(2 + exchanges):
                client.gather(epoch.map(sleep, training_seconds))
        records = shuffler.records
        middle = sorted(records[-exchanges:], key=lambda record: record.exchange_seconds)[exchanges // 2]
        results[name] = {
            "measured": middle.exchange_seconds,
            "predicted": seconds,
            # The counters of processors tick a hundred times per second, so one short exchange does not show it.
            "cpu_idle": statistics.mean(record.cpu_idle for record in records[-exchanges:]),
        }
    # Rows of random partitions lie in all chunks. The first session fills caches of files.
    way, loads = Way("load", Choices("global", "peer")), []
    for _ in range(1 + LOADS):
        with dshuffle.Shuffler(client, dataset) as shuffler:
            next(shuffler.epochs(1))
        loads.append(shuffler.records[0])
    del loads[0]
    results["load"] = {
        "measured": statistics.median(record.exchange_seconds for record in loads),
        "predicted": predicted(measured.cluster, dataset, way).load_seconds,
        "cpu_idle": statistics.mean(record.cpu_idle for record in loads),
    }
    with dshuffle.Shuffler(
        client,
        dataset,
        delivery="auto",
        sharding="contiguous",
        cluster=measured.cluster,
        cache_fraction=fraction,
    ) as shuffler:
        for epoch in shuffler.epochs(5):
            client.gather(epoch.map(sleep, seconds=0.2 + 1.5 * min(results[name]["predicted"] for name in AMONG)))
    chosen = shuffler.records[-1].delivery
    best = min(results[name]["measured"] for name in AMONG)
    return {
        "ways": results,
        "auto": chosen,
        "auto_over_best": results[chosen]["measured"] / best,
        "cluster": dataclasses.asdict(measured.cluster),
    }


def run_fast(setting: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One setting, on a local cluster with emulated links."""
    rates = EmulatedRates(links=setting["mbit"] * 125_000, store=setting["storage_mbit"] * 125_000)
    with tempfile.TemporaryDirectory() as folder, local_cluster(setting["workers"], rates=rates) as client:
        return run_here(client, setting, argparse.Namespace(**{**vars(options), "data": f"{folder}/predictions.zarr"}))


def run_on_testbed(setting: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One setting, on a host of the testbed."""
    testbed = [sys.executable, "storage/testbed.py"]
    subprocess.run([*testbed, "shape", f"{setting['mbit']}mbit"], check=True)
    subprocess.run([*testbed, "shape", f"{setting['storage_mbit']}mbit", "storage"], check=True)
    inner = [sys.executable, __file__, "--data", options.data, "--scheduler", options.scheduler]
    inner += ["--seconds", str(options.seconds), "--setting", json.dumps(setting)]
    inner += ["--local", options.local] if options.local else []
    answer = subprocess.run([*testbed, "exec", "scheduler", *inner], check=True, stdout=subprocess.PIPE, text=True)
    results: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return results


def show(number: int, setting: dict[str, Any], result: dict[str, Any]) -> None:
    """One line a setting."""
    ways = "  ".join(
        f"{name} {way['measured']:.3g} ({way['predicted'] / way['measured'] - 1:+.0%}, {way['cpu_idle']:.0%} idle)"
        + ("!" if way["cpu_idle"] < CPU_BOUND else "")
        for name, way in result["ways"].items()
    )
    print(
        f"{number:2d} {setting}\n   {ways}  auto: {result['auto']} ({result['auto_over_best']:.2f} of the best)",
        flush=True,
    )


def summarize(results: list[dict[str, Any]]) -> None:
    """For each way, how many predictions are close, by how idle the processors were."""
    bounds = {"half idle": (HALF_IDLE, 1.01), "less idle": (CPU_BOUND, HALF_IDLE), "busy (!)": (0.0, CPU_BOUND)}
    for label, (least, most) in bounds.items():
        for names in [[name] for name in WAYS] + [list(WAYS), ["load"]]:
            ratios = [
                way["predicted"] / way["measured"]
                for result in results
                for name, way in result["ways"].items()
                if name in names and least <= way["cpu_idle"] < most
            ]
            if not ratios:
                continue
            errors = [abs(math.log(ratio)) for ratio in ratios]
            within = [sum(error <= math.log(1 + part) for error in errors) for part in (0.1, 0.2)]
            worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
            print(
                f"{label:9s} {names[0] if len(names) == 1 else 'all':15s} {len(errors):4d} predictions: {within[0]} "
                f"within 10 %, {within[1]} within 20 %, median {math.exp(statistics.median(errors)) - 1:.0%}, "
                f"worst {worst - 1:+.0%}"
            )
    good = sum(result["auto_over_best"] <= 1.1 for result in results)
    print(f"auto took the fastest or one within 10 % of it in {good} of {len(results)} settings")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=12.0, help="of measuring the cluster")
    parser.add_argument("--data", default="/run/dshuffle-testbed/shared/predictions.zarr")
    parser.add_argument("--local", help="a folder of all hosts, from which network ways load their caches sooner")
    parser.add_argument("--scheduler", default="tcp://10.78.0.2:8786")
    parser.add_argument("--setting", help=argparse.SUPPRESS)  # one, as JSON: this process is on a host already
    parser.add_argument("--output", type=Path, help="results as JSON; a run that was interrupted goes on after them")
    parser.add_argument("--fast", action="store_true", help="short exchanges on fast links, on a local cluster")
    options = parser.parse_args()
    if options.setting:
        with Client(options.scheduler) as client:
            print(json.dumps(run_here(client, json.loads(options.setting), options)))
        return
    draw_one, run = (draw_fast, run_fast) if options.fast else (draw, run_on_testbed)
    rng = np.random.default_rng(options.seed)
    results = json.loads(options.output.read_text()) if options.output and options.output.exists() else []
    for number in range(options.settings):
        setting = draw_one(rng)
        if number < len(results):
            if setting != results[number]["setting"]:
                raise SystemExit(f"{options.output} is of another --seed: move it away")
            continue
        result = run(setting, options)
        show(number, setting, result)
        results.append({"setting": setting, **result})
        if options.output:
            options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    summarize(results)


if __name__ == "__main__":
    main()
