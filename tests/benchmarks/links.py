"""Deliveries over links of a known rate: seconds and bytes an epoch, beside what the links allow.

    python tests/benchmarks/links.py (--scheduler tcp://... | --workers 4) --mbit 100 --data /tmp/links.zarr
        [--way server] [--way clique] [--way clique:ring] ... [--counters "COMMAND"]

For a cluster whose links are limited: real slow ones, or network namespaces with `tc`. With --workers, dshuffle's own
emulation limits those of a local cluster. One worker must have the resource `dshuffle-server`. All hosts must see the
folder of the data. COMMAND prints what has crossed the links so far, as `python storage/testbed.py bytes` does, and is
compared with what the records say.

The bound is the time of the most loaded link for the rows alone: no headers, no acknowledgements, nothing lost to
stages that wait for each other. A time with no idle processor left says nothing about the network.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

import dshuffle
from dshuffle.compare import EmulatedRates, connect
from dshuffle.records import EpochRecord

WAYS = ("peer", "server", "clique", "clique:ring", "clique:unicast")


def sleep(partition: dshuffle.Partition, seconds: float) -> None:
    """Stands for training that leaves the cores alone: the next plan is made meanwhile."""
    time.sleep(seconds)


def busiest_link(record: EpochRecord) -> int:
    """Rows that the most loaded direction of a link carries at least: what leaves the server, what enters a worker."""
    into_each = -(-record.needed // record.n_workers)
    if record.delivery == "peer":
        return into_each
    return max(record.packets if record.relay in ("pipelined", "ring") else record.components, into_each)


def crossed(command: str) -> int:
    """Bytes that all hosts have sent."""
    answer = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    return sum(host["sent"] for host in json.loads(answer).values())


def processor_times() -> np.ndarray:
    """Ticks that the processors of this machine were idle, that other machines took from it, and ticks in all."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return np.array([ticks[3] + ticks[4], ticks[7], sum(ticks)])


def measure(client: Client, dataset: dshuffle.Dataset, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the exchanged epochs of one way."""
    delivery, _, relay = way.partition(":")
    crossed_before = crossed(options.counters) if options.counters else 0
    with dshuffle.Shuffler(
        client,
        dataset,
        assignment=options.assignment,
        delivery=delivery,
        caching=options.caching,
        cache_fraction=options.cache_fraction,
        relay=relay or "pipelined",
    ) as shuffler:
        for number, epoch in enumerate(shuffler.epochs(options.epochs + 1)):
            if number == 0:
                before = processor_times()
            client.gather(epoch.map(sleep, options.training))
        idle, stolen, ticks = processor_times() - before
    records = shuffler.records[1:]
    seconds = [record.exchange_seconds for record in records]
    record = records[-1]
    bound = busiest_link(record) * record.row_nbytes * 8 / (options.mbit * 1e6)
    sent = [sum(record.wire_sent_bytes) + record.server_sent_bytes for record in records]
    result = {
        "seconds": statistics.median(seconds),
        "all": [round(second, 3) for second in seconds],
        "bound": bound,
        "over bound": statistics.median(seconds) / bound,
        "idle": round(idle / ticks, 3),
        "stolen": round(stolen / ticks, 3),
        "packets": record.packets,
        "degree": record.mean_degree,
        "server MB": record.server_sent_bytes / 1e6,
        "workers MB": sum(record.wire_sent_bytes) / 1e6,
        "uneven": max(record.wire_sent_bytes) / max(1, statistics.mean(record.wire_sent_bytes)),
        "metadata": record.metadata_bytes / sent[-1],
        "encode": record.encode_seconds,
        "decode": record.decode_seconds,
        "plan": record.plan_seconds,
    }
    if options.counters:
        result["links over records"] = (crossed(options.counters) - crossed_before) / sum(sent)
    print(f"{way:18s} {result['seconds']:7.2f} s  {result['over bound']:.3f} x bound  {json.dumps(result)}", flush=True)
    return result


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cluster = parser.add_mutually_exclusive_group(required=True)
    cluster.add_argument("--scheduler")
    cluster.add_argument("--workers", type=int)
    parser.add_argument("--mbit", type=float, required=True, help="rate of every link")
    parser.add_argument("--data", required=True, help="where to put the dataset")
    parser.add_argument("--samples", type=int, default=400_000)
    parser.add_argument("--row-bytes", type=int, default=1024)
    parser.add_argument("--cache-fraction", type=float, default=0.5)
    parser.add_argument("--assignment", default="global")
    parser.add_argument("--caching", default="uniform")
    parser.add_argument("--way", dest="ways", action="append", help=f"again for several (default: {', '.join(WAYS)})")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--training", type=float, default=2.0, help="seconds of each epoch's tasks")
    parser.add_argument("--counters", default="", help="command that prints the bytes of all links")
    options = parser.parse_args(argv)
    rows = np.random.default_rng(0).integers(0, 256, (options.samples, options.row_bytes), dtype=np.uint8)
    dataset = dshuffle.create_dataset(options.data, {"x": rows}, overwrite=True)
    del rows
    rates = EmulatedRates(links=options.mbit * 1e6 / 8)
    with connect(options.scheduler, options.workers or 0, rates) as client:
        return {way: measure(client, dataset, way, options) for way in options.ways or WAYS}


if __name__ == "__main__":
    main()
