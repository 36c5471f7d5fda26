"""The dataset of a simulation, which may be away for some time: in a folder, or in memory, where it is read faster."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dshuffle import Dataset, create_dataset
from dshuffle.errors import DatasetError, DatasetNotFound
from dshuffle.records import StoreTraffic
from dshuffle.rows import ByteMatrix
from dshuffle.store.places import Meter

N_SAMPLES = 60


class Store:
    """A dataset in a folder, and the same one in memory.

    Parameters
    ----------
    folder
        An empty folder.
    """

    def __init__(self, folder: str) -> None:
        rng = np.random.default_rng(0)
        rows = {"x": rng.integers(0, 255, (N_SAMPLES, 12), dtype=np.uint8), "y": np.arange(N_SAMPLES)}
        self.on_disk = create_dataset(f"{folder}/d.zarr", rows, chunk_rows=10)
        self.rows = self.on_disk.layout.empty(N_SAMPLES)
        self.on_disk.read_into(self.rows, np.arange(N_SAMPLES), np.arange(N_SAMPLES))
        self.truth = self.on_disk.read_rows(np.arange(N_SAMPLES))
        self.is_away = False
        STORES[self.on_disk.url] = self
        self.in_memory = MemoryDataset.like(self.on_disk)

    def go_away(self) -> None:
        """Let nobody read the dataset."""
        if not self.is_away:
            self.is_away = True
            os.rename(self.on_disk.url, self.on_disk.url + ".away")

    def come_back(self) -> None:
        """Let everybody read it again."""
        if self.is_away:
            self.is_away = False
            os.rename(self.on_disk.url + ".away", self.on_disk.url)


STORES: dict[str, Store] = {}
"""By URL. All simulated processes are in one process."""


class MemoryDataset(Dataset):
    """A dataset whose rows are in memory. What a session does with a dataset is overridden, and nothing else."""

    @classmethod
    def like(cls, dataset: Dataset) -> MemoryDataset:
        """The same dataset, with traffic of its own."""
        fields = {field.name: getattr(dataset, field.name) for field in dataclasses.fields(dataset)}
        return cls(**(fields | {"_meter": Meter()}))

    def read_into(
        self, rows: ByteMatrix, slots: ArrayLike, ids: ArrayLike, *, stop: Callable[[], bool] | None = None, **_: Any
    ) -> None:
        """Copy rows."""
        self.check_unchanged()
        if stop is not None and stop():
            raise DatasetError("reading was stopped")
        rows[slots] = STORES[self.url].rows[ids]
        nbytes = np.asarray(ids).size * self.row_nbytes
        self._meter.add(StoreTraffic(requests=1, fetched_bytes=nbytes, delivered_bytes=nbytes, seconds=1e-3))

    def check_unchanged(self) -> None:
        """Check that it is there."""
        if STORES[self.url].is_away:
            raise DatasetNotFound(f"no dataset exists at {self.url}")

    def close(self) -> None:
        """The store belongs to the dataset on disk."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.url,)


def _opened(url: str) -> MemoryDataset:
    dataset = STORES[url].in_memory
    dataset.check_unchanged()
    return MemoryDataset.like(dataset)
