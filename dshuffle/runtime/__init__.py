"""Shuffling on a Dask cluster: the scheduler and worker plugins and the user-facing classes.

The names below load on first use, so that a worker does not load what only a client calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshuffle.lazy_names import loader

if TYPE_CHECKING:  # the table below, for type checkers; a test compares them
    from dshuffle.runtime.client.epoch import Epoch as Epoch
    from dshuffle.runtime.client.epoch import gathered as gathered
    from dshuffle.runtime.client.shuffler import Shuffler as Shuffler
    from dshuffle.runtime.client.shuffler import run_with_retries as run_with_retries
    from dshuffle.runtime.client.shuffler import watch as watch
    from dshuffle.runtime.collective import Group as Group
    from dshuffle.runtime.gather.row_gather import permute as permute
    from dshuffle.runtime.gather.row_gather import take as take
    from dshuffle.runtime.measure.measurement import measure_cluster as measure_cluster
    from dshuffle.runtime.partition import Partition as Partition
    from dshuffle.runtime.session_spec import PerRank as PerRank

_HOMES = {
    "Epoch": "dshuffle.runtime.client.epoch",
    "Group": "dshuffle.runtime.collective",
    "Partition": "dshuffle.runtime.partition",
    "PerRank": "dshuffle.runtime.session_spec",
    "Shuffler": "dshuffle.runtime.client.shuffler",
    "gathered": "dshuffle.runtime.client.epoch",
    "measure_cluster": "dshuffle.runtime.measure.measurement",
    "permute": "dshuffle.runtime.gather.row_gather",
    "run_with_retries": "dshuffle.runtime.client.shuffler",
    "take": "dshuffle.runtime.gather.row_gather",
    "watch": "dshuffle.runtime.client.shuffler",
}
__all__ = sorted(_HOMES)

__getattr__ = loader(__name__, _HOMES)
