"""dshuffle: epoch shuffling for distributed SGD on Dask.

The names below load on first use, so that ``import dshuffle`` (and every ``import dshuffle.planning``) loads neither
Dask nor Zarr.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the table below, for type checkers; a test compares them
    from distributed.core import Server

    from dshuffle.errors import ClusterError, DatasetError, DShuffleError, ExchangeError, InvalidParameter
    from dshuffle.launched.loader import spmd
    from dshuffle.pipeline import Pipeline, Training
    from dshuffle.planning import Choices, row_permutation
    from dshuffle.planning.cost import ClusterRates
    from dshuffle.records import EpochRecord
    from dshuffle.runtime import (
        Epoch,
        Group,
        Partition,
        PerRank,
        Shuffler,
        measure_cluster,
        permute,
        run_with_retries,
        take,
        watch,
    )
    from dshuffle.sharding import Sharding
    from dshuffle.store import Dataset, create_dataset, open_dataset, shuffle_dataset, verify_dataset
    from dshuffle.training.estimator import ShuffledSGD

    __version__: str

_MODULES = {
    "dshuffle.errors": (
        "ClusterError",
        "DShuffleError",
        "DatasetError",
        "ExchangeError",
        "InvalidParameter",
    ),
    "dshuffle.launched.loader": ("spmd",),
    "dshuffle.pipeline": ("Pipeline", "Training"),
    "dshuffle.planning": ("Choices", "row_permutation"),
    "dshuffle.planning.cost": ("ClusterRates",),
    "dshuffle.records": ("EpochRecord",),
    "dshuffle.runtime": (
        "Epoch",
        "Group",
        "PerRank",
        "Partition",
        "Shuffler",
        "measure_cluster",
        "permute",
        "run_with_retries",
        "take",
        "watch",
    ),
    "dshuffle.sharding": ("Sharding",),
    "dshuffle.store": ("Dataset", "create_dataset", "open_dataset", "shuffle_dataset", "verify_dataset"),
    "dshuffle.training.estimator": ("ShuffledSGD",),
}
__all__ = [
    "Choices",
    "ClusterError",
    "ClusterRates",
    "DShuffleError",
    "Dataset",
    "DatasetError",
    "Epoch",
    "EpochRecord",
    "ExchangeError",
    "Group",
    "InvalidParameter",
    "Partition",
    "PerRank",
    "Pipeline",
    "Sharding",
    "ShuffledSGD",
    "Shuffler",
    "Training",
    "__version__",
    "create_dataset",
    "measure_cluster",
    "open_dataset",
    "permute",
    "run_with_retries",
    "row_permutation",
    "shuffle_dataset",
    "spmd",
    "take",
    "verify_dataset",
    "watch",
]
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = importlib.metadata.version("dshuffle")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        errors = importlib.import_module("dshuffle.errors")  # most of them are only there
        place = f"; it is in {errors.__name__}" if hasattr(errors, name) else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{place}")
    globals()[name] = value
    return value


async def dask_setup(server: Server) -> None:
    """Load what sessions need while a worker or a scheduler starts: ``dask worker --preload dshuffle``."""
    await importlib.import_module("dshuffle.runtime.worker.worker_plugin").preload(server)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
