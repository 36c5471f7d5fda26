"""Training on shuffled partitions, and the comparison of ways to shuffle."""

from dshuffle.training.cluster import connect, local_cluster
from dshuffle.training.comparison import Way, compare_ways, default_ways, modest_step, product_of_ways
from dshuffle.training.datasets import keyed_regression, keyed_weights
from dshuffle.training.linear_regression import History, fit_linear_regression
from dshuffle.training.measuring import measure_exchanges
from dshuffle.training.warmup import compile_kernels

__all__ = [
    "History",
    "Way",
    "compare_ways",
    "compile_kernels",
    "connect",
    "default_ways",
    "fit_linear_regression",
    "keyed_regression",
    "keyed_weights",
    "local_cluster",
    "measure_exchanges",
    "modest_step",
    "product_of_ways",
]
