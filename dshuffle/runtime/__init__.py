"""Running on Dask: the scheduler and worker plugins, and what users hold."""

from dshuffle.runtime.partition import Partition
from dshuffle.runtime.permutation import permute
from dshuffle.runtime.shuffler import Epoch, Shuffler

__all__ = ["Epoch", "Partition", "Shuffler", "permute"]
