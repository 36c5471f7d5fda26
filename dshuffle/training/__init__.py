"""Trainers: SGD on shuffled partitions."""

from dshuffle.training.fit import CONSTANT, Decay, EarlyStopping, History, Linear, OnEpoch, Schedule, epoch_bar
from dshuffle.training.inputs import accuracy_on, rmse_on
from dshuffle.training.linear_regression import fit_linear_regression
from dshuffle.training.matrix_completion import Factors, fit_matrix_completion, split_entries
from dshuffle.training.parallel_sgd import fit_parallel_sgd
from dshuffle.training.parameter_server import (
    LinearModel,
    Model,
    SoftmaxRegression,
    fit_parameter_server,
    simulate_parameter_server,
)
from dshuffle.training.synchronous import Network, TrainedNetwork, fit_synchronous_sgd

__all__ = [
    "CONSTANT",
    "Decay",
    "EarlyStopping",
    "Factors",
    "History",
    "Linear",
    "LinearModel",
    "Model",
    "Network",
    "OnEpoch",
    "Schedule",
    "SoftmaxRegression",
    "TrainedNetwork",
    "accuracy_on",
    "epoch_bar",
    "fit_linear_regression",
    "fit_matrix_completion",
    "fit_parallel_sgd",
    "fit_parameter_server",
    "fit_synchronous_sgd",
    "rmse_on",
    "simulate_parameter_server",
    "split_entries",
]
