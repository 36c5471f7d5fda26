"""Comparing ways of shuffling: the runs, their figures, and where they run."""

from dshuffle.compare.comparison import Way, compare_ways, default_ways, modest_step, product_of_ways
from dshuffle.compare.exchanges import measure_exchanges
from dshuffle.compare.kernel_cache import compile_kernels
from dshuffle.compare.local_cluster import connect, local_cluster
from dshuffle.compare.logical_workers import fit_logical_workers
from dshuffle.compare.stored_order import AsStored
from dshuffle.compare.variance import VarianceRatio, variance_ratio

__all__ = [
    "AsStored",
    "VarianceRatio",
    "Way",
    "compare_ways",
    "compile_kernels",
    "connect",
    "default_ways",
    "fit_logical_workers",
    "local_cluster",
    "measure_exchanges",
    "modest_step",
    "product_of_ways",
    "variance_ratio",
]
