"""A function to copy: move the files of samples between the local disks of ranks (Nguyen et al., 2022).

Each rank of a PyTorch script has one file for each of its samples in a folder. After ``sampler.set_epoch(epoch)`` of an
``ExchangeSampler``, ``exchange`` moves the files in the process group of the script, before the epoch. A file is
deleted only when all ranks have received and checked theirs, so a rank that fails can begin the same epoch again.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def write(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)  # a file is whole, or it is not there


def exchange(sampler: Any, folder: Path, storage: Path) -> None:
    """Let the folder of this rank have the files of its samples. Call it on all ranks, after set_epoch."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def gathered(value: Any) -> list[Any]:
        values = [None] * size
        dist.all_gather_object(values, value)
        return values

    sources, held = dict(zip(sampler.arrived.tolist(), sampler.sources.tolist(), strict=True)), {*sampler.held.tolist()}
    requests = gathered({s: sources.get(s, -1) for s in sorted(held) if not (folder / str(s)).exists()})
    asked = [sample for request in requests for sample, source in request.items() if source == rank]
    lacking = set().union(*gathered([sample for sample in asked if not (folder / str(sample)).exists()]))
    for request in requests:
        request.update({sample: -1 for sample in request if sample in lacking})
    missing = requests[rank]
    for sample, source in missing.items():
        if source == -1:
            write(folder / str(sample), (storage / str(sample)).read_bytes())
    for distance in range(1, size):
        after, before = (rank + distance) % size, (rank - distance) % size
        sends = [sample for sample, source in requests[after].items() if source == rank]
        receives = [sample for sample, source in missing.items() if source == before]
        for number in range(max(len(sends), len(receives))):
            sending = []
            if number < len(sends):
                content = np.fromfile(folder / str(sends[number]), dtype=np.uint8)
                header = torch.tensor([len(content), zlib.crc32(content)])
                sending = [dist.isend(header, after), dist.isend(torch.from_numpy(content), after)]
            if number < len(receives):
                header = torch.empty(2, dtype=torch.int64)
                dist.recv(header, before)
                received = torch.empty(int(header[0]), dtype=torch.uint8)
                dist.recv(received, before)
                taken = received.numpy().tobytes()
                if zlib.crc32(taken) != header[1]:
                    raise OSError(f"sample {receives[number]} has changed on its way from rank {before}")
                write(folder / str(receives[number]), taken)
            for work in sending:
                work.wait()
    dist.barrier()  # all ranks have all files
    for path in folder.iterdir():
        if path.name.isdecimal() and int(path.name) not in held:
            path.unlink()
