"""Training on shuffled partitions, and the comparison of ways to shuffle."""

from dshuffle.training.as_stored import AsStored
from dshuffle.training.asynchronous import geometric_speeds
from dshuffle.training.breakdown import EpochBreakdown, PhaseSeconds
from dshuffle.training.cluster import connect, local_cluster
from dshuffle.training.comparison import Way, compare_ways, default_ways, modest_step, product_of_ways
from dshuffle.training.datasets import (
    gaussian_blobs,
    keyed_regression,
    keyed_weights,
    low_rank_entries,
    low_rank_factors,
)
from dshuffle.training.history import EarlyStopping, History
from dshuffle.training.linear_regression import fit_linear_regression
from dshuffle.training.logical import fit_logical_workers
from dshuffle.training.matrix_completion import Factors, fit_matrix_completion
from dshuffle.training.measuring import measure_exchanges
from dshuffle.training.models import LinearModel, Model, SoftmaxRegression
from dshuffle.training.network import Network, TrainedNetwork
from dshuffle.training.parallel_sgd import fit_parallel_sgd
from dshuffle.training.parameter_server import fit_parameter_server
from dshuffle.training.progress import epoch_bar
from dshuffle.training.schedules import CONSTANT, Decay, Linear, Schedule
from dshuffle.training.simulated_server import simulate_parameter_server
from dshuffle.training.staleness import Staleness
from dshuffle.training.synchronous import fit_synchronous_sgd
from dshuffle.training.variance import VarianceRatio, variance_ratio
from dshuffle.training.warmup import compile_kernels

__all__ = [
    "AsStored",
    "CONSTANT",
    "Decay",
    "EarlyStopping",
    "EpochBreakdown",
    "Factors",
    "History",
    "Linear",
    "LinearModel",
    "Model",
    "Network",
    "PhaseSeconds",
    "Schedule",
    "SoftmaxRegression",
    "Staleness",
    "TrainedNetwork",
    "VarianceRatio",
    "Way",
    "compare_ways",
    "compile_kernels",
    "connect",
    "default_ways",
    "epoch_bar",
    "fit_linear_regression",
    "fit_logical_workers",
    "fit_matrix_completion",
    "fit_parallel_sgd",
    "fit_parameter_server",
    "fit_synchronous_sgd",
    "gaussian_blobs",
    "geometric_speeds",
    "keyed_regression",
    "keyed_weights",
    "local_cluster",
    "low_rank_entries",
    "low_rank_factors",
    "measure_exchanges",
    "modest_step",
    "product_of_ways",
    "simulate_parameter_server",
    "variance_ratio",
]
