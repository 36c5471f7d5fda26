"""What needs a CUDA card: batches on the card, `fit_torch_ddp` with NCCL, and the speed beside a `DataLoader`.

    bash tests/gpu.sh [--dry-run]     # sets up what this script needs
    python tests/benchmarks/gpu.py [--device cpu] [--images 60000]

One rank or worker has the card. Each line of the table is a check, which ends the script with an error if it fails, or
a rate in images a second: the median of the epochs after the first one, with the slowest and the fastest.

* `pinned` and `overlap` come from PyTorch's profiler: copies to the card come from pinned memory, and this part of
  their time passes while a kernel runs. The loop multiplies matrices for longer than a batch takes to be gathered.
* `loading` is a loop that moves batches to the card, and `training` one that trains a small CNN.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from distributed import Client, LocalCluster
from torch.utils.data import DataLoader, Dataset, RandomSampler

import dshuffle
from dshuffle.training.torch_ddp import fit_torch_ddp

SIDE, BATCH, EPOCHS = 32, 256, 5

Epochs = Iterator[Iterable[Any]]
"""For each epoch batches of images, labels and numbers, on the device."""


def line(name: str, result: str) -> None:
    print(f"{name:44} {result}", flush=True)


def done(device: Any) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def check_batches(batches: Iterable[Any], n_samples: int, device: str) -> None:
    """Each sample once, with its own image, on the device."""
    numbers, wrong = [], torch.zeros((), dtype=torch.int64, device=device)
    for x, y, i in batches:
        assert {one.device.type for one in (x, y, i)} == {torch.device(device).type}
        numbers.append(i)
        wrong += (x[:, 0, 0, 0] != i % 251).sum() + (y != i % 10).sum()
    assert int(wrong) == 0, f"{int(wrong)} samples are not their own"
    assert torch.equal(torch.cat(numbers).sort().values.cpu(), torch.arange(n_samples))


def copies(batches: Iterable[Any], device: str) -> str:
    """How the copies of an epoch were made, by PyTorch's profiler."""
    if device == "cpu":
        return f"{sum(1 for _ in batches)} batches, without a copy"
    matrix = torch.ones(4096, 4096, device=device)
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in batches:
            for _ in range(4):
                matrix @ matrix
        done(device)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    kernels = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "kernel"]
    moved = [e for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"]]
    assert moved, "the profiler saw no copy to the card"
    assert all("Pinned" in e["name"] for e in moved), {e["name"] for e in moved}
    within = total = 0.0
    for event in moved:
        first, last = event["ts"], event["ts"] + event["dur"]
        total += last - first
        within += max((min(last, end) - max(first, began) for began, end in kernels if began < last), default=0)
    return f"{len(moved)} copies, all from pinned memory; {within / total:.0%} of their time while a kernel runs"


def with_spmd(folder: Path, device: str, epochs: int) -> Epochs:
    options: Any = {"arrays": ["x", "y", "i"], "device": device, "rank": 0, "world_size": 1}
    with dshuffle.spmd(f"{folder}/d.zarr", batch_size=BATCH, **options) as loader:
        yield from loader.epochs(epochs)


class Images(Dataset[Any]):
    """Arrays in memory maps."""

    def __init__(self, folder: Path) -> None:
        self.arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in "xyi"]

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitems__(self, positions: list[int]) -> list[torch.Tensor]:
        """Return a batch at once, which is how a map-style dataset is the fastest."""
        return [torch.from_numpy(array[positions]) for array in self.arrays]


def as_it_is(batch: Any) -> Any:
    return batch


def with_loader(folder: Path, device: str, epochs: int, workers: int) -> Epochs:
    dataset = Images(folder)
    options: Any = {"pin_memory": device == "cuda", "num_workers": workers, "persistent_workers": workers > 0}
    loader = DataLoader(dataset, BATCH, sampler=RandomSampler(dataset), collate_fn=as_it_is, **options)
    for _ in range(epochs):
        yield (tuple(one.to(device, non_blocking=True) for one in batch) for batch in loader)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16 * 15 * 15, 10)
    )


def trainer(device: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x.permute(0, 3, 1, 2) / 255.0), y).backward()
        optimizer.step()

    return step


def rates(epochs: Epochs, n_samples: int, device: str, step: Callable[..., None] | None) -> str:
    found, began = [], time.perf_counter()
    for batches in epochs:
        for x, y, _ in batches:
            if step is not None:
                step(x, y)
        done(device)
        found.append(n_samples / (time.perf_counter() - began))
        began = time.perf_counter()
    return f"{statistics.median(found[1:]):11,.0f} ({min(found[1:]):,.0f} to {max(found[1:]):,.0f})"


def of_worker(partition: dshuffle.Partition, device: str) -> str:
    """`to_torch` on a Dask worker."""
    options: Any = {"mode": "uneven", "arrays": ("x", "y", "i"), "device": device}
    check_batches(partition.to_torch(BATCH, **options), len(partition), device)
    return copies(partition.to_torch(BATCH, **options), device)


def training_step(model: Any, batch: Any) -> torch.Tensor:
    weight = next(model.parameters())
    assert weight.device == batch["x"].device
    ones = torch.ones(1, device=weight.device)
    torch.distributed.all_reduce(ones)  # on a card only NCCL can
    return torch.nn.functional.cross_entropy(model(batch["x"].permute(0, 3, 1, 2) / 255.0), batch["y"])


def on_workers(folder: Path, device: str) -> None:
    """`to_torch` and `fit_torch_ddp` with one Dask worker."""
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
        dshuffle.Shuffler(client, f"{folder}/d.zarr") as shuffler,
    ):
        for epoch in shuffler.epochs(1):
            [said] = client.gather(epoch.map(of_worker, device))
            line("to_torch: samples, pinned, overlap", f"each once; {said}")
    errors = {}
    for where in dict.fromkeys(("cpu", device)):
        with (
            LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
            Client(cluster) as client,
            dshuffle.Shuffler(client, f"{folder}/few.zarr", seed=1) as shuffler,
        ):
            options: Any = {"epochs": 3, "batch_size": 64, "training_step": training_step, "device": where}
            history = fit_torch_ddp(
                shuffler, network, lambda parameters: torch.optim.SGD(parameters, lr=0.01), **options
            )
            errors[where] = [point.error for point in history.points]
            assert all(parameter.device.type == "cpu" for parameter in history.model.parameters())
    assert np.allclose(errors["cpu"], errors[device], rtol=0.05), errors
    backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if device == "cuda" else "gloo"
    texts = [" ".join(f"{error:.4f}" for error in each) for each in errors.values()]
    line(f"fit_torch_ddp, {backend}: loss", f"{texts[-1]} (on the CPU {texts[0]})")


def write(folder: Path, n_samples: int) -> None:
    """Images whose first byte is their number modulo 251, and whose brightness gives their class away."""
    rng, i = np.random.default_rng(0), np.arange(n_samples)
    x = rng.integers(0, 100, (n_samples, SIDE, SIDE, 3), dtype="u1") + (i % 10 * 15).astype("u1")[:, None, None, None]
    x[:, 0, 0, 0] = i % 251
    arrays = {"x": x, "y": i % 10, "i": i}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    dshuffle.create_dataset(f"{folder}/d.zarr", arrays, chunk_rows=500)
    dshuffle.create_dataset(f"{folder}/few.zarr", {name: array[:4000] for name, array in arrays.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--images", type=int, help="by default 100,000, and 3,000 on a CPU")
    options = parser.parse_args()
    device, began = options.device, time.perf_counter()
    n_images = options.images or (100_000 if device == "cuda" else 3_000)
    if device == "cpu":
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name(0) if device == "cuda" else "no card (dry run on the CPU)"
    print(f"{name}; PyTorch {torch.__version__}, {n_images:,} images of {SIDE}x{SIDE}x3 bytes, batches of {BATCH}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder, n_images)
        for batches in with_spmd(folder, device, 1):
            check_batches(batches, n_images, device)
        for batches in with_spmd(folder, device, 1):
            said = copies(batches, device)
        line("spmd: samples, pinned, overlap", f"each once; {said}")
        on_workers(folder, device)
        workers = min(4, os.cpu_count() or 1)
        ways: dict[str, Callable[[int], Epochs]] = {
            "spmd": lambda epochs: with_spmd(folder, device, epochs),
            "DataLoader over a memory map": lambda epochs: with_loader(folder, device, epochs, 0),
            f"the same, {workers} loader processes": lambda epochs: with_loader(folder, device, epochs, workers),
        }
        for way, make in ways.items():
            for work in ("loading", "training"):
                step = trainer(device) if work == "training" else None
                line(f"{work}, {way}", f"{rates(make(EPOCHS), n_images, device, step)} images/s")
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
