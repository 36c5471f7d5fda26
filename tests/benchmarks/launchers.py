"""`dshuffle.spmd` and a Dask session beside other loaders: the same samples, network and number of ranks.

    python tests/benchmarks/launchers.py [--ranks 1 2 4] [--samples 20000] [--rounds 2] [--ways spmd DistributedSampler]

Each way runs in processes of its own, one way after the other, in several rounds. The ranks are processes with the
variables of torchrun, or Dask workers. The data of all ways are converted before, and in the page cache.

* `loading` and `training` are samples a second of all ranks: a loop that does nothing, and one that trains a small
  network with DistributedDataParallel. They leave the first epoch out.
* `first` is the time from the call that makes the loader to the first batch of the slowest rank. Imports and the start
  of the ranks, or of the Dask cluster, come before.
* `memory` is the largest sum of the proportional set sizes of all processes.
* `once` says how many samples of an epoch were missing, and how many came again.

Packages that are not installed are left out: `pip install streaming-community litdata insitubatch`. insitubatch has no
ranks: each rank gets a range of chunks of its own, which is the same in all epochs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import dshuffle

SIDE, BATCH, CHUNK_ROWS = 32, 64, 250
LOADING_EPOCHS, TRAINING_EPOCHS = 5, 3
SAMPLE_AFTER = 0.5
"""Seconds between two looks at the memory."""

Epochs = Iterator[Iterable[Any]]
"""For each epoch the batches of this rank: images, labels and numbers of the samples."""


class Images(Dataset[Any]):
    """Arrays in memory maps."""

    def __init__(self, folder: Path) -> None:
        self.arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xyi"]

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitems__(self, positions: list[int]) -> list[torch.Tensor]:
        """Return a batch at once, which is how a map-style dataset is the fastest."""
        return [torch.from_numpy(array[positions]) for array in self.arrays]


def with_sampler(folder: Path, epochs: int) -> Epochs:
    dataset = Images(folder)
    sampler: Any = DistributedSampler(dataset, seed=0)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, collate_fn=lambda batch: batch)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield loader


def with_spmd(folder: Path, epochs: int, assignment: str) -> Epochs:
    options: Any = {"assignment": assignment, "arrays": ["x", "y", "i"], "device": "cpu"}
    with dshuffle.spmd(f"{folder}/d.zarr", batch_size=BATCH, **options) as loader:
        yield from loader.epochs(epochs)


def with_streaming(folder: Path, epochs: int) -> Epochs:
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=f"{folder}/mds", shuffle=True, batch_size=BATCH)
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=1, persistent_workers=True)
    for _ in range(epochs):
        yield fields(loader)


def with_litdata(folder: Path, epochs: int) -> Epochs:
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(f"{folder}/litdata", shuffle=True)
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=1, persistent_workers=True)
    for _ in range(epochs):
        yield fields(loader)


def with_insitubatch(folder: Path, epochs: int) -> Epochs:
    from insitubatch import InSituDataset, as_torch, obstore_store, open_geometries, split_by_chunk

    store = obstore_store(f"file://{folder}/d.zarr")
    geometries = open_geometries(store, variables=["x", "y", "i"])
    n_samples, size, rank = geometries["x"].n_samples, dist.get_world_size(), dist.get_rank()
    own = n_samples * rank // size, n_samples * (rank + 1) // size
    manifest = split_by_chunk(geometries["x"], fractions=(1.0, 0.0, 0.0), sample_range=own)
    dataset = InSituDataset(store, manifest, geometries=geometries, batch_size=BATCH)
    loader = DataLoader(as_torch(dataset.train), batch_size=None, num_workers=0)
    for epoch in range(epochs):
        dataset.set_epoch(epoch)
        yield fields(loader)


def fields(loader: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    return ((batch["x"], batch["y"], batch["i"]) for batch in loader)


SESSION = "Dask session, global"

WAYS: dict[str, tuple[str, Callable[[Path, int], Epochs] | None]] = {
    "DistributedSampler": ("torch", with_sampler),
    "spmd, global": ("dshuffle", lambda folder, epochs: with_spmd(folder, epochs, "global")),
    "spmd, partial:0.1": ("dshuffle", lambda folder, epochs: with_spmd(folder, epochs, "partial:0.1")),
    SESSION: ("dshuffle", None),
    "streaming-community": ("streaming-community", with_streaming),
    "litdata": ("litdata", with_litdata),
    "insitubatch": ("insitubatch", with_insitubatch),
}
"""By name of the way: the package, and the function that makes its epochs."""


def trainer() -> Callable[[torch.Tensor, torch.Tensor], None]:
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, 2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 15 * 15, 10)
    )
    model = torch.nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x.permute(0, 3, 1, 2) / 255.0), y).backward()
        optimizer.step()

    return step


def run_through(batches: Iterable[Any], step: Callable[..., None] | None) -> tuple[np.ndarray, float]:
    """Numbers of the samples of an epoch, and the time of its first batch."""
    numbers, first = [], 0.0
    for x, y, i in batches:
        first = first or time.time()
        numbers.append(np.asarray(i))
        if step is not None:
            step(x, y)
    return np.concatenate(numbers), first


def as_rank(way: str, folder: Path, group: Path) -> None:
    """One rank: all epochs without training, then all with it. Rank 0 prints the measures."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(group), size), rank=rank, world_size=size)
    make = WAYS[way][1]
    assert make is not None
    n_samples = len(np.load(folder / "i.npy", mmap_mode="r"))
    measures: dict[str, Any] = {}
    for name, epochs in (("loading", LOADING_EPOCHS), ("training", TRAINING_EPOCHS)):
        step = trainer() if name == "training" else None
        dist.barrier()
        began, started, seconds, samples, firsts = time.perf_counter(), time.time(), [], [], []
        for batches in make(folder, epochs):
            numbers, first = run_through(batches, step)
            samples.append(numbers)
            firsts.append(first - started)
            dist.barrier()
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
        measures[name] = [n_samples / taken for taken in seconds[1:]]
        everything: list[Any] = [None] * size
        dist.all_gather_object(everything, (samples, firsts))
        if name == "loading":
            measures["first"] = max(of_rank[0] for _, of_rank in everything)
            measures["once"] = [misses([of_rank[e] for of_rank, _ in everything], n_samples) for e in range(epochs)]
    if rank == 0:
        print(json.dumps(measures), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def misses(samples: list[np.ndarray], n_samples: int) -> tuple[int, int]:
    """How many samples are missing, and how many came more than once."""
    counts = np.bincount(np.concatenate(samples), minlength=n_samples)
    return int((counts == 0).sum()), int((counts > 1).sum())


def of_worker(partition: dshuffle.Partition, group: str, trains: bool) -> tuple[np.ndarray, float]:
    """An epoch on one Dask worker. The process group and the model stay from epoch to epoch."""
    from distributed import get_worker

    worker: Any = get_worker()
    if not dist.is_initialized():
        torch.set_num_threads(1)
        size = int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=dist.FileStore(group, size), rank=partition.rank, world_size=size)
    if trains and not hasattr(worker, "benchmark_step"):
        worker.benchmark_step = trainer()
    batches = partition.to_torch(BATCH, mode="uneven", arrays=("x", "y", "i"))
    return run_through(batches, worker.benchmark_step if trains else None)


def as_session(folder: Path, group: Path, n_ranks: int) -> None:
    """The client of a Dask session."""
    from distributed import Client, LocalCluster

    measures: dict[str, Any] = {}
    dataset = dshuffle.open_dataset(f"{folder}/d.zarr")
    with (
        LocalCluster(n_workers=n_ranks, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        for name, epochs in (("loading", LOADING_EPOCHS), ("training", TRAINING_EPOCHS)):
            began, started, seconds = time.perf_counter(), time.time(), []
            with dshuffle.Shuffler(client, dataset, assignment="global") as shuffler:
                for epoch in shuffler.epochs(epochs):
                    results = client.gather(epoch.map(of_worker, str(group), name == "training"))
                    seconds.append(time.perf_counter() - began)
                    if name == "loading":
                        measures.setdefault("first", max(first for _, first in results) - started)
                        measures.setdefault("once", []).append(misses([i for i, _ in results], dataset.n_samples))
                    began = time.perf_counter()
            measures[name] = [dataset.n_samples / taken for taken in seconds[1:]]
    print(json.dumps(measures), flush=True)


def measured(way: str, folder: Path, n_ranks: int) -> dict[str, Any]:
    """Run a way in processes of its own."""
    group = Path(tempfile.mkdtemp(dir=folder)) / "store"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    variables = {**os.environ, "WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks), "OMP_NUM_THREADS": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, __file__, "--ways", way, "--as-rank", str(folder), str(group)]
    processes = [
        subprocess.Popen(
            command,
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(1 if way == SESSION else n_ranks)
    ]
    peak = 0
    try:
        while any(process.poll() is None for process in processes):
            peak = max(peak, sum(memory_of(process.pid) for process in processes))
            time.sleep(SAMPLE_AFTER)
    finally:
        for process in processes:
            process.kill()
    output = str(processes[0].communicate()[0])
    if any(process.returncode for process in processes):
        raise SystemExit(f"{way}: {output}")
    return {**json.loads(output.splitlines()[-1]), "memory": peak}


def memory_of(pid: int) -> int:
    """Sum of the proportional set sizes of a process and those that it started."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += member.memory_full_info().pss
    return total


def litdata_sample(number: int, folder: str) -> dict[str, Any]:
    x, y, i = (np.load(f"{folder}/{name}.npy", mmap_mode="r")[number] for name in "xyi")
    return {"x": x, "y": int(y), "i": int(i)}


def write(folder: Path, n_samples: int) -> None:
    """The dataset in the formats of all ways."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (n_samples, SIDE, SIDE, 3), dtype="u1")
    arrays = {"x": x, "y": rng.integers(0, 10, n_samples), "i": np.arange(n_samples)}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    dshuffle.create_dataset(f"{folder}/d.zarr", arrays, chunk_rows=CHUNK_ROWS)
    if importlib.util.find_spec("streaming") is not None:
        from streaming import MDSWriter

        columns = {"x": f"ndarray:uint8:{SIDE},{SIDE},3", "y": "int", "i": "int"}
        with MDSWriter(out=f"{folder}/mds", columns=columns) as writer:
            for number in range(n_samples):
                writer.write({"x": x[number], "y": int(arrays["y"][number]), "i": number})
    if importlib.util.find_spec("litdata") is not None:
        import functools

        import litdata

        sample = functools.partial(litdata_sample, folder=str(folder))
        litdata.optimize(sample, list(range(n_samples)), f"{folder}/litdata", chunk_bytes="8MB", num_workers=2)


def is_installed(package: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(package))
    return False


def spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):9,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), help="by default all that are installed")
    parser.add_argument("--as-rank", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        [way] = options.ways
        if way == SESSION:
            as_session(*options.as_rank, int(os.environ["WORLD_SIZE"]))
        else:
            as_rank(way, *options.as_rank)
        return
    ways = options.ways or [way for way, (package, _) in WAYS.items() if is_installed(package)]
    with tempfile.TemporaryDirectory() as place:
        write(Path(place), options.samples)
        packages = sorted({"torch", "dshuffle", "distributed", *(WAYS[way][0] for way in ways)})
        versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
        print(f"{date.today()}, Python {platform.python_version()}, {os.cpu_count()} processors. {versions}")
        for n_ranks in options.ranks:
            results: dict[str, list[dict[str, Any]]] = defaultdict(list)
            for _ in range(options.rounds):
                for way in ways:
                    results[way].append(measured(way, Path(place), n_ranks))
            print(f"\n{options.samples:,} images of {SIDE}x{SIDE}x3 bytes, {n_ranks} ranks, {options.rounds} rounds")
            print(f"{'':22} {'loading':32} {'training':32} {'first':>7} {'memory':>9}  missing, repeated")
            for way, runs in results.items():
                rates = [spread([rate for run in runs for rate in run[name]]) for name in ("loading", "training")]
                first = statistics.median(run["first"] for run in runs)
                memory = max(run["memory"] for run in runs) / 2**20
                worst = [max(column) for column in zip(*(pair for run in runs for pair in run["once"]), strict=True)]
                print(
                    f"{way:22} {rates[0]:32} {rates[1]:32} {first:5.2f} s {memory:5,.0f} MiB  {worst[0]}, {worst[1]}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
