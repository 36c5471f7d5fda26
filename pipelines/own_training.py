"""Training functions to copy for dshuffle compare --train: with NumPy, scikit-learn and PyTorch.

    python pipelines/real_data.py digits digits.zarr
    cd pipelines
    dshuffle compare ../digits.zarr --train own_training:with_numpy --metric error_rate --lower-is-better --margin 0.01
    dshuffle compare ../digits.zarr --train own_training:with_sklearn --metric accuracy --margin 0.01
    dshuffle compare ../digits.zarr --train own_training:with_torch --metric accuracy --margin 0.01

dshuffle compare holds out another tenth of the samples in each pair of runs, and gives them to a function that has a
parameter test. A parameter seed has another value in each pair. First weights and batches should depend on nothing
else. The attribute averages says what a function averages: "models" once an epoch, or "gradients" in every step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import SGDClassifier

import dshuffle
from dshuffle.training import History, accuracy_on, fit_parallel_sgd

CLASSES = 10
Weights = NDArray[np.float64]


def with_numpy(
    shuffler: dshuffle.Shuffler, *, epochs: int, test: dshuffle.Dataset, seed: int = 0, step: float = 0.1
) -> dict[str, float]:
    """Softmax regression whose weights are averaged once an epoch; returns its metrics by name."""
    held_out = test.read_rows(np.arange(test.n_samples))
    shape = held_out["x"].shape[1], CLASSES
    weights = 0.01 * np.random.default_rng(seed).standard_normal(shape)
    for epoch in shuffler.epochs(epochs):
        results: Any = shuffler.client.gather(epoch.map(one_pass, weights, step))  # type: ignore[no-untyped-call]
        weights = np.mean(results, axis=0)
    wrong = np.argmax(held_out["x"] @ weights, axis=1) != held_out["y"]
    return {"error_rate": float(np.mean(wrong))}


with_numpy.averages = "models"  # type: ignore[attr-defined]  # for the report: once an epoch, and not gradients


def one_pass(partition: dshuffle.Partition, weights: Weights, step: float) -> Weights:
    """Train for one pass over a worker's samples, in batches of 8. Runs on the workers."""
    for batch in partition.batches(8):
        scores = batch["x"] @ weights
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)
        odds[np.arange(len(odds)), batch["y"]] -= 1
        weights = weights - step * batch["x"].T @ odds / len(odds)
    return weights


def with_sklearn(shuffler: dshuffle.Shuffler, *, epochs: int, test: dshuffle.Dataset, seed: int = 0) -> History[Any]:
    """Train a scikit-learn estimator with a trainer; returns its history."""

    def predict(model: Any, rows: Any) -> Any:
        return model.predict(rows)

    validate = accuracy_on(test, predict)
    return fit_parallel_sgd(shuffler, SGDClassifier(random_state=seed), epochs=epochs, validate=validate)


with_sklearn.averages = "models"  # type: ignore[attr-defined]


def with_torch(
    shuffler: dshuffle.Shuffler, *, epochs: int, test: dshuffle.Dataset, seed: int = 0, step: float = 0.1
) -> History[Any]:
    """Train a PyTorch module with DistributedDataParallel; returns its history."""
    from dshuffle.training.torch_ddp import fit_torch_ddp  # an optional extra

    def make_model() -> Any:
        from torch import nn

        return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))

    def make_optimizer(parameters: Any) -> Any:
        from torch import optim

        return optim.SGD(parameters, lr=step)

    def predict(model: Any, rows: Any) -> Any:
        from torch import from_numpy, no_grad

        with no_grad():
            return model(from_numpy(rows)).argmax(dim=1).numpy()

    options: dict[str, Any] = {"batch_size": 16, "seed": seed, "validate": accuracy_on(test, predict)}
    history: History[Any] = fit_torch_ddp(shuffler, make_model, make_optimizer, epochs=epochs, **options)
    return history


with_torch.averages = "gradients"  # type: ignore[attr-defined]
