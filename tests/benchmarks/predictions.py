"""Predicted against measured: many clusters and jobs drawn at random, on the testbed.

    python storage/testbed.py up --workers 8 --rate 100mbit --storage-rate 800mbit --server
    python storage/testbed.py storage sharedfs /data/moosefs
    python tests/benchmarks/predictions.py [--settings 20] [--seed 0] [--local FOLDER] [--output FILE]

Each setting has its own link rate, storage rate, row size, chunk size and cache fraction. The cluster is measured for
some seconds, every way is predicted, then run four times, of which the median of the last three counts; then `auto`
runs for a few epochs. A time that processors limited is marked (!): the model is told how busy they are, but ten
processes on two cores are not the network that it describes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

import dshuffle
from dshuffle.compare import Way, measure_exchanges
from dshuffle.compare.comparison import predicted
from dshuffle.planning import Choices
from dshuffle.report.summary import CPU_BOUND
from dshuffle.runtime.measure.probe import measure_cluster

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


def run_here(setting: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """One setting, on a host of the testbed."""
    shape = setting["rows"], setting["row_nbytes"]
    rows = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    dataset = dshuffle.create_dataset(options.data, {"x": rows}, chunk_rows=setting["chunk_rows"], overwrite=True)
    # What loads the caches of network ways is not measured here.
    local = dshuffle.create_dataset(options.local, {"x": rows}, overwrite=True) if options.local else dataset
    fraction = setting["cache_fraction"]
    found: dict[str, Any] = {}
    with Client(options.scheduler) as client:
        measured = measure_cluster(client, dataset, seconds=options.seconds)
        for name, (assignment, delivery, relay) in WAYS.items():
            # Contiguous shares are loaded chunk by chunk. The first exchange does not count: the server reads its rows.
            way = Way(name, Choices(assignment, delivery, relay=relay, cache_fraction=fraction, sharding="contiguous"))
            source = dataset if delivery == "storage" else local
            records = measure_exchanges(client, source, way, epochs=1 + EXCHANGES, training_seconds=0.3)
            middle = sorted(records[-EXCHANGES:], key=lambda record: record.exchange_seconds)[EXCHANGES // 2]
            found[name] = {
                "measured": middle.exchange_seconds,
                "predicted": predicted(measured.cluster, dataset, way).exchange_seconds,
                "cpu_idle": middle.cpu_idle,
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
                client.gather(epoch.map(len))
        chosen = shuffler.records[-1].delivery
    best = min(found[name]["measured"] for name in AMONG)
    return {
        "ways": found,
        "auto": chosen,
        "auto_over_best": found[chosen]["measured"] / best,
        "cluster": dataclasses.asdict(measured.cluster),
    }


def show(number: int, setting: dict[str, Any], found: dict[str, Any]) -> None:
    """One line a setting."""
    ways = "  ".join(
        f"{name} {way['measured']:.2f} ({way['predicted'] / way['measured'] - 1:+.0%})"
        + ("!" if way["cpu_idle"] < CPU_BOUND else "")
        for name, way in found["ways"].items()
    )
    print(
        f"{number:2d} {setting}\n   {ways}  auto: {found['auto']} ({found['auto_over_best']:.2f} of the best)",
        flush=True,
    )


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
    options = parser.parse_args()
    if options.setting:
        print(json.dumps(run_here(json.loads(options.setting), options)))
        return
    testbed = [sys.executable, "storage/testbed.py"]
    rng = np.random.default_rng(options.seed)
    results = json.loads(options.output.read_text()) if options.output and options.output.exists() else []
    for number in range(options.settings):
        setting = draw(rng)
        if number < len(results):
            if setting != results[number]["setting"]:
                raise SystemExit(f"{options.output} is of another --seed: move it away")
            continue
        subprocess.run([*testbed, "shape", f"{setting['mbit']}mbit"], check=True)
        subprocess.run([*testbed, "shape", f"{setting['storage_mbit']}mbit", "storage"], check=True)
        inner = [sys.executable, __file__, "--data", options.data, "--scheduler", options.scheduler]
        inner += ["--seconds", str(options.seconds), "--setting", json.dumps(setting)]
        inner += ["--local", options.local] if options.local else []
        answer = subprocess.run([*testbed, "exec", "scheduler", *inner], check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(answer.stdout.splitlines()[-1])
        show(number, setting, found)
        results.append({"setting": setting, **found})
        if options.output:
            options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    errors = [
        abs(math.log(way["predicted"] / way["measured"]))
        for result in results
        for way in result["ways"].values()
        if way["cpu_idle"] >= CPU_BOUND
    ]
    if errors:
        within = sum(error <= math.log(1.2) for error in errors)
        print(
            f"{within} of {len(errors)} predictions within 20 % (median {math.exp(statistics.median(errors)) - 1:.0%})"
        )
    good = sum(result["auto_over_best"] <= 1.1 for result in results)
    print(f"auto took the fastest or one within 10 % of it in {good} of {len(results)} settings")


if __name__ == "__main__":
    main()
