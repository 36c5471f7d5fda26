"""Shuffling on a Dask cluster: the scheduler and worker plugins and the user-facing classes."""

from dshuffle.runtime.collective import Group
from dshuffle.runtime.epoch import Epoch, gathered
from dshuffle.runtime.measure.probe import measure_cluster
from dshuffle.runtime.partition import Partition
from dshuffle.runtime.permutation import permute
from dshuffle.runtime.retrying import retrying
from dshuffle.runtime.session_spec import PerRank
from dshuffle.runtime.session_widget import watch
from dshuffle.runtime.shuffler import Shuffler
from dshuffle.runtime.taking import take

__all__ = [
    "Epoch",
    "Group",
    "Partition",
    "PerRank",
    "Shuffler",
    "gathered",
    "measure_cluster",
    "permute",
    "retrying",
    "take",
    "watch",
]
