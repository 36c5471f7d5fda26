"""Trainers: SGD on shuffled partitions."""

from dshuffle.training.fit import (
    CONSTANT,
    Decay,
    EarlyStopping,
    EpochBreakdown,
    History,
    Linear,
    OnEpoch,
    PhaseSeconds,
    Schedule,
    epoch_bar,
)
from dshuffle.training.inputs import accuracy_on, rmse_on
from dshuffle.training.linear_regression import fit_linear_regression
from dshuffle.training.matrix_completion import (
    Baseline,
    Factors,
    column_blocks,
    entries_by_block,
    fit_matrix_completion,
    split_entries,
)
from dshuffle.training.parallel_sgd import fit_parallel_sgd
from dshuffle.training.parameter_server.slices import LinearModel, Model, SoftmaxRegression, Staleness
from dshuffle.training.parameter_server.trainer import fit_parameter_server, geometric_speeds, simulate_parameter_server
from dshuffle.training.synchronous import Network, TrainedNetwork, fit_synchronous_sgd

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
