"""Measure the seconds of a shuffle on a cluster for each way in the tables of Chung et al. (2017).

    python pipelines/ubershuffle_tables.py --links 20mbit --store 160mbit
    python pipelines/ubershuffle_tables.py --scheduler ADDRESS --mbit 100 --data /mnt/shared/tables
        [--storage nfs=/mnt/nfs/tables] [--storage s3=s3://bucket/tables] [--setup a --setup 2] [--output tables.json]

Setups a to d are those of Table 1. Setup 2 is Table 2, which compares UberShuffle with re-reading from shared storage.
The paper had 20 workers and a server at 1 Gbit/s. This script keeps the cache fraction (at least a worker's share) and
the ratio of row bytes to link rate, and uses the fraction `--scale` of the rows. The paper does not give the bytes of a
row. They follow from its uncoded seconds, because the server's link carried nothing else:
bytes = seconds x rate / (rows x (1 - cache fraction)).

With --links, the workers and a server are processes of this machine, whose links and store are emulated without root,
and everything is in a temporary folder. Of a cluster that runs (--scheduler), one worker must have the resource
`dshuffle-server`. The dataset is written to --data, which all hosts must see, and to every --storage, from which it is
re-read. The table shows the ratios of the paper beside the measured ratios. Compare
ratios, not seconds. A time with less than 15 % of the processors idle (marked !) says nothing about the network.

References
----------
Chung et al. (2017), Tables 1 and 2; see docs/papers.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client
from rich.console import Console
from rich.table import Table
from studies.scripts import at_least

import dshuffle
from dshuffle.compare import EmulatedRates, Way, connect, count_training_workers
from dshuffle.planning import Choices, Chunks, Global
from dshuffle.report import CPU_BOUND
from dshuffle.units import human_bytes, human_ratio, human_seconds, parse_rate

PAPER_RATE = 1e9 / 8
"""Rate of the paper's links in bytes per second."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A setup of the paper: number of rows, cache fraction, and seconds of a shuffle for each way."""

    rows: int
    cache_fraction: float
    seconds: dict[str, float]
    row_nbytes: int = 0

    def bytes_at(self, rate: float) -> int:
        """Return the bytes of a row, scaled to another link rate and rounded to a multiple of 8."""
        at_paper = self.row_nbytes or self.seconds["server"] * PAPER_RATE / (self.rows * (1 - self.cache_fraction))
        return max(8, round(at_paper * rate / PAPER_RATE / 8) * 8)


SETUPS = {
    "a": Setup(100_000, 0.2, {"server": 105.5, "coded": 123.6, "ubershuffle": 65.2}),
    "b": Setup(300_000, 0.2, {"server": 35.0, "coded": 28.8, "ubershuffle": 25.3}),
    "c": Setup(68_000, 0.2, {"server": 0.42, "coded": 1.66, "ubershuffle": 1.52}),
    "d": Setup(700_000, 0.14, {"server": 112.9, "coded": 94.6, "ubershuffle": 60.82}),
    # The rows are those of setup b, which has the same matrix: 1,000 entries per row, about 18 bytes per entry.
    "2": Setup(300_000, 0.05, {"ubershuffle": 34, "storage": 110, "EFS": 490, "EFS Max I/O": 1100}, 18_229),
}
NETWORK = ("server", "coded", "ubershuffle", "clique", "peer")


def rows_of(setup: Setup, rate: float, scale: float) -> np.ndarray[Any, Any]:
    """Make random rows; their content does not matter, because nothing is compressed."""
    shape = max(64, round(setup.rows * scale)), setup.bytes_at(rate)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def measure(client: Client, name: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure all ways for one setup."""
    setup = SETUPS[name]
    rate = options.mbit * 1e6 / 8
    rows = rows_of(setup, rate, options.scale)
    at_storage = {}
    for label, url in options.storage.items():
        at_storage[label] = dshuffle.create_dataset(
            f"{url}/{name}.zarr", {"x": rows}, chunk_rows=options.chunk_rows, overwrite=True
        )
    local = dshuffle.create_dataset(f"{options.data}/{name}.zarr", {"x": rows}, overwrite=True)
    del rows
    results: dict[str, Any] = {}
    n_workers = count_training_workers(client)
    fraction = max(setup.cache_fraction, 1 / n_workers)
    network = Choices(Global(), cache_fraction=fraction, sharding="contiguous")
    storage = dataclasses.replace(network, delivery="storage")
    chunks = dataclasses.replace(storage, assignment=Chunks())
    ways = [(way, local, Way(way, dataclasses.replace(network, delivery=way))) for way in NETWORK]
    ways += [(label, there, Way(label, storage)) for label, there in at_storage.items()]
    ways += [(f"{label}, chunks", there, Way(label, chunks)) for label, there in at_storage.items()]
    for label, dataset, way in ways:
        with console.status(f"setup {name}: {label}"):
            with dshuffle.Shuffler(client, dataset, **way.choices.keywords()) as shuffler:
                for epoch in shuffler.epochs(options.epochs + 1):
                    for task in epoch.map(lambda _: time.sleep(0.5)):
                        task.result()
            records = shuffler.records[1:]
        results[label] = {
            "seconds": statistics.median(record.exchange_seconds for record in records),
            "cpu_idle": statistics.median(record.cpu_idle for record in records),
            "packets": records[-1].packets,
            "wire_bytes": records[-1].wire_bytes,
            "store_bytes": records[-1].store_bytes,
            "read_amplification": records[-1].read_amplification,
        }
    return {
        "rows": local.n_samples,
        "row_nbytes": local.row_nbytes,
        "workers": n_workers,
        "cache_fraction": fraction,
        "ways": results,
        "paper": setup.seconds,
    }


def show(name: str, found: dict[str, Any], console: Console) -> None:
    """Print seconds, and the ratios to UberShuffle here and in the paper."""
    shape = f"{found['rows']:,} rows of {human_bytes(found['row_nbytes'])}, {found['workers']} workers"
    table = Table(title=f"Setup {name}: {shape}, cache fraction {found['cache_fraction']:.3g}", title_justify="left")
    for heading in (
        "way",
        "seconds",
        "idle CPU",
        "over ubershuffle",
        "in the paper",
        "from the store",
        "amplification",
    ):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    ways, paper = found["ways"], found["paper"]
    for label, way in ways.items():
        in_paper = paper.get(label, paper.get("storage") if label in found["storages"] else None)
        table.add_row(
            label,
            human_seconds(way["seconds"]),
            f"{way['cpu_idle']:.0%}" + (" !" if way["cpu_idle"] < CPU_BOUND else ""),
            f"{way['seconds'] / ways['ubershuffle']['seconds']:.2f}",
            "" if in_paper is None else f"{in_paper / paper['ubershuffle']:.2f}",
            human_bytes(way["store_bytes"]),
            "" if way["read_amplification"] is None else human_ratio(way["read_amplification"]),
        )
    console.print(table)


def labelled(text: str) -> tuple[str, str]:
    """Split ``LABEL=URL``."""
    label, separator, url = text.partition("=")
    if not (label and separator and url):
        raise argparse.ArgumentTypeError(f"{text!r} is not LABEL=URL, such as nfs=/mnt/nfs/tables")
    return label, url.rstrip("/")


def rates_of(options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """The options of emulated rates, by their names."""
    return [("links", options.links), ("store", options.store)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduler", help="address of a Dask scheduler (default: a local cluster)")
    parser.add_argument("--workers", type=at_least(1), default=8, help="number of workers of the local cluster")
    parser.add_argument("--links", help="emulated rate of every local worker's link, such as 20mbit")
    parser.add_argument("--store", help="emulated rate at which all local workers together read the store")
    parser.add_argument("--mbit", type=float, help="rate of every worker's link in Mbit/s, if it is not emulated")
    parser.add_argument("--data", help="folder that all hosts see (default: a temporary one on this machine)")
    parser.add_argument("--storage", type=labelled, action="append", default=[], help="LABEL=URL; may be repeated")
    parser.add_argument(
        "--setup", dest="setups", action="append", choices=[*SETUPS], help="may be repeated (default: all)"
    )
    parser.add_argument("--scale", type=float, default=0.1, help="fraction of the paper's rows")
    parser.add_argument("--chunk-rows", type=at_least(1), default=64, help="rows per chunk at --storage")
    parser.add_argument("--epochs", type=at_least(1), default=3)
    parser.add_argument("--output", type=Path, help="write all figures as JSON")
    options = parser.parse_args()
    if options.scheduler and (options.links or options.store or not options.data):
        parser.error("--scheduler needs --data, and no --links or --store: its workers run already")
    if bool(options.links) == bool(options.mbit):
        parser.error("give either --links, to emulate them, or --mbit, the rate of real links")
    options.storage = dict(options.storage)
    console = Console()
    found = {}
    with tempfile.TemporaryDirectory(prefix="ubershuffle-") as folder, ExitStack() as stack:
        options.data = options.data or f"{folder}/data"
        try:
            links, store = (text and parse_rate(name, text) for name, text in rates_of(options))
            rates = EmulatedRates(links or None, store or None)
            client = stack.enter_context(connect(options.scheduler, options.workers, rates))
        except dshuffle.DShuffleError as error:
            parser.error(str(error))
        if rates.links:
            options.mbit = 8 * rates.links / 1e6
        if rates.store:
            options.storage = options.storage or {"storage": f"{folder}/storage"}
        if str(rates):
            console.print(f"Emulated: {rates}, by processes of this machine.", highlight=False)
        for name in options.setups or SETUPS:
            facts = {"storages": list(options.storage), "emulated": str(rates)}
            found[name] = measure(client, name, options, console) | facts
            show(name, found[name], console)
            if options.output:
                options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
