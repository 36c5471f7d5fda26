"""Trainers: SGD on shuffled partitions."""

from dshuffle.training.baseline import Baseline
from dshuffle.training.entry_shares import split_entries
from dshuffle.training.fit import EarlyStopping, History, OnEpoch, epoch_bar
from dshuffle.training.held_out import accuracy_on, rmse_on
from dshuffle.training.linear_regression import fit_linear_regression
from dshuffle.training.matrix_completion import Factors, column_blocks, entries_by_block, fit_matrix_completion
from dshuffle.training.mlp import Network, TrainedNetwork
from dshuffle.training.monitoring import EpochBreakdown, PhaseSeconds
from dshuffle.training.parallel_sgd import fit_parallel_sgd
from dshuffle.training.parameter_server.asynchronous import geometric_speeds
from dshuffle.training.parameter_server.models import LinearModel, Model, SoftmaxRegression
from dshuffle.training.parameter_server.simulated import simulate_parameter_server
from dshuffle.training.parameter_server.staleness import Staleness
from dshuffle.training.parameter_server.trainer import fit_parameter_server
from dshuffle.training.schedules import CONSTANT, Decay, Linear, Schedule
from dshuffle.training.synchronous import fit_synchronous_sgd

__all__ = [
    "Baseline",
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
    "OnEpoch",
    "PhaseSeconds",
    "Schedule",
    "SoftmaxRegression",
    "Staleness",
    "TrainedNetwork",
    "accuracy_on",
    "column_blocks",
    "entries_by_block",
    "epoch_bar",
    "fit_linear_regression",
    "fit_matrix_completion",
    "fit_parallel_sgd",
    "fit_parameter_server",
    "fit_synchronous_sgd",
    "geometric_speeds",
    "rmse_on",
    "simulate_parameter_server",
    "split_entries",
]
