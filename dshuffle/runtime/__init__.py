"""Running on Dask: the scheduler and worker plugins, and what users hold."""

from dshuffle.runtime.epoch import Epoch
from dshuffle.runtime.group import Group
from dshuffle.runtime.partition import Partition
from dshuffle.runtime.permutation import permute
from dshuffle.runtime.shuffler import Shuffler
from dshuffle.runtime.spec import PerRank
from dshuffle.runtime.tasks import gathered

__all__ = ["Epoch", "Group", "Partition", "PerRank", "Shuffler", "gathered", "permute"]
