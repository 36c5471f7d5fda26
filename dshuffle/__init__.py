"""Epoch shuffling for distributed SGD on Dask.

The public names are imported on first use. ``import dshuffle`` and ``import dshuffle.planning`` therefore load neither
Dask nor Zarr.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dshuffle.planning import Global, Local, Partial, row_permutation
    from dshuffle.records import EpochRecord
    from dshuffle.runtime import Epoch, Group, Partition, PerRank, Shuffler, permute
    from dshuffle.store import Dataset, create_dataset, open_dataset

    __version__: str

__all__ = [
    "Dataset",
    "Epoch",
    "EpochRecord",
    "Global",
    "Group",
    "Local",
    "Partial",
    "Partition",
    "PerRank",
    "Shuffler",
    "__version__",
    "create_dataset",
    "open_dataset",
    "permute",
    "row_permutation",
]

_HOMES = {
    "Dataset": "dshuffle.store",
    "create_dataset": "dshuffle.store",
    "open_dataset": "dshuffle.store",
    "Epoch": "dshuffle.runtime",
    "Group": "dshuffle.runtime",
    "Partition": "dshuffle.runtime",
    "PerRank": "dshuffle.runtime",
    "Shuffler": "dshuffle.runtime",
    "permute": "dshuffle.runtime",
    "Global": "dshuffle.planning",
    "Local": "dshuffle.planning",
    "Partial": "dshuffle.planning",
    "row_permutation": "dshuffle.planning",
    "EpochRecord": "dshuffle.records",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = importlib.metadata.version("dshuffle")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
