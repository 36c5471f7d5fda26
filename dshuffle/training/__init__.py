"""Trainers: SGD on shuffled partitions."""

from dshuffle.training.fit import (
    CONSTANT,
    Decay,
    EarlyStopping,
    FitOptions,
    History,
    Linear,
    OnEpoch,
    Schedule,
    accuracy_on,
    rmse_on,
)
from dshuffle.training.linear_regression import fit_linear_regression
from dshuffle.training.matrix_completion import Factors, fit_matrix_completion, split_entries
from dshuffle.training.parallel_sgd import fit_parallel_sgd
from dshuffle.training.parameter_server import SoftmaxRegression, fit_parameter_server
from dshuffle.training.synchronous import Network, TrainedNetwork, fit_synchronous_sgd

__all__ = [
    "CONSTANT",
    "Decay",
    "EarlyStopping",
    "Factors",
    "FitOptions",
    "History",
    "Linear",
    "Network",
    "OnEpoch",
    "Schedule",
    "SoftmaxRegression",
    "TrainedNetwork",
    "accuracy_on",
    "fit_linear_regression",
    "fit_matrix_completion",
    "fit_parallel_sgd",
    "fit_parameter_server",
    "fit_synchronous_sgd",
    "rmse_on",
    "split_entries",
]
