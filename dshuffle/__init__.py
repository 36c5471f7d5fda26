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

    from dshuffle.errors import ClusterError as ClusterError
    from dshuffle.errors import DatasetError as DatasetError
    from dshuffle.errors import DShuffleError as DShuffleError
    from dshuffle.errors import ExchangeError as ExchangeError
    from dshuffle.errors import InvalidParameter as InvalidParameter
    from dshuffle.launched.spmd import spmd as spmd
    from dshuffle.pipeline import Pipeline as Pipeline
    from dshuffle.pipeline import Training as Training
    from dshuffle.planning import Choices as Choices
    from dshuffle.planning import row_permutation as row_permutation
    from dshuffle.planning.cost import ClusterRates as ClusterRates
    from dshuffle.records import EpochRecord as EpochRecord
    from dshuffle.runtime import Epoch as Epoch
    from dshuffle.runtime import Group as Group
    from dshuffle.runtime import Partition as Partition
    from dshuffle.runtime import PerRank as PerRank
    from dshuffle.runtime import Shuffler as Shuffler
    from dshuffle.runtime import measure_cluster as measure_cluster
    from dshuffle.runtime import permute as permute
    from dshuffle.runtime import retrying as retrying
    from dshuffle.runtime import take as take
    from dshuffle.runtime import watch as watch
    from dshuffle.sharding import Sharding as Sharding
    from dshuffle.store import Dataset as Dataset
    from dshuffle.store import create_dataset as create_dataset
    from dshuffle.store import open_dataset as open_dataset
    from dshuffle.store import shuffle_dataset as shuffle_dataset
    from dshuffle.store import verify_dataset as verify_dataset
    from dshuffle.training.estimator import ShuffledSGD as ShuffledSGD

    __version__: str

_MODULES = {
    "dshuffle.errors": (
        "ClusterError",
        "DShuffleError",
        "DatasetError",
        "ExchangeError",
        "InvalidParameter",
    ),
    "dshuffle.launched.spmd": ("spmd",),
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
        "retrying",
        "take",
        "watch",
    ),
    "dshuffle.sharding": ("Sharding",),
    "dshuffle.store": ("Dataset", "create_dataset", "open_dataset", "shuffle_dataset", "verify_dataset"),
    "dshuffle.training.estimator": ("ShuffledSGD",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted([*_HOMES, "__version__"])


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
    await importlib.import_module("dshuffle.runtime.worker.preload").load(server)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
