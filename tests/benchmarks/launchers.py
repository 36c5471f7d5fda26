"""`dshuffle.spmd` beside PyTorch's DistributedSampler over a memory map, in the same processes.

    torchrun --nproc-per-node 2 tests/benchmarks/launchers.py [--samples 40000] [--epochs 4] [--batch 64]

Samples a second of all ranks: when the loop does nothing, and when it trains a small network with
DistributedDataParallel. `waits` is the time that a rank waits for its batches in the median epoch. These columns leave
the first epoch out; its seconds are `first`. Both have the same rows in memory or in the page cache, so this says what
the exchange costs a loop on one machine, and nothing about storage.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import dshuffle

SIDE = 32


class Images(torch.utils.data.Dataset[Any]):
    """Images and labels in memory maps."""

    def __init__(self, folder: Path) -> None:
        self.x, self.y = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xy")

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch at once, which is how a map-style dataset is the fastest."""
        return torch.from_numpy(self.x[positions]), torch.from_numpy(self.y[positions])


def with_sampler(folder: Path, batch: int, epochs: int) -> Iterator[Iterable[Any]]:
    dataset = Images(folder)
    sampler: Any = torch.utils.data.DistributedSampler(dataset, seed=0)
    loader = torch.utils.data.DataLoader(dataset, batch_size=batch, sampler=sampler, collate_fn=lambda both: both)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield loader


def with_spmd(folder: Path, batch: int, epochs: int, **options: Any) -> Iterator[Iterable[Any]]:
    with dshuffle.spmd(f"{folder}/d.zarr", batch_size=batch, device="cpu", arrays=["x", "y"], **options) as loader:
        yield from loader.epochs(epochs)


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


def measure(epochs: Iterator[Iterable[Any]], step: Callable[..., None] | None) -> tuple[list[float], list[float]]:
    """Seconds of each epoch, and of the waits of this rank in it."""
    seconds, waits = [], []
    began = time.perf_counter()
    for batches in epochs:
        waited, asked = time.perf_counter() - began, time.perf_counter()
        for x, y in batches:
            waited += time.perf_counter() - asked
            if step is not None:
                step(x, y)
            asked = time.perf_counter()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        waits.append(waited)
        began = time.perf_counter()
    return seconds, waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders, 0)
    folder = Path(str(folders[0]))
    if rank == 0:
        rng = np.random.default_rng(0)
        x = rng.integers(0, 256, (options.samples, SIDE, SIDE, 3), dtype="u1")
        y = rng.integers(0, 10, options.samples)
        np.save(folder / "x.npy", x)
        np.save(folder / "y.npy", y)
        dshuffle.create_dataset(f"{folder}/d.zarr", {"x": x, "y": y})
        print(f"{options.samples} images of {SIDE}x{SIDE}x3 bytes, {dist.get_world_size()} ranks, {torch.__version__}")
        print(f"{'':30}  samples/s   (least, most)   waits   first")
    dist.barrier()
    ways: dict[str, Callable[[], Iterator[Iterable[Any]]]] = {
        "DistributedSampler": lambda: with_sampler(folder, options.batch, options.epochs),
        "spmd, global": lambda: with_spmd(folder, options.batch, options.epochs, assignment="global"),
        "spmd, partial:0.1": lambda: with_spmd(folder, options.batch, options.epochs, assignment="partial:0.1"),
    }
    for training in (False, True):
        for name, way in ways.items():
            seconds, waits = measure(way(), trainer() if training else None)
            rates = [options.samples / one for one in seconds[1:]]
            if rank == 0:
                what = f"{'training' if training else 'loading'}, {name}"
                rate = f"{np.median(rates):9,.0f}   ({min(rates):,.0f}, {max(rates):,.0f})"
                print(f"{what:30}  {rate:30}  {np.median(waits[1:]):.2f} s  {seconds[0]:.2f} s", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
