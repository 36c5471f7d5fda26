"""Steps for a linear regression, from the rows of its dataset."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.store import Dataset
from dshuffle.training.fit import CONSTANT, Linear, Schedule, check_finite
from dshuffle.training.linear_regression import check_dataset

PLACES = 1000
"""Places of a dataset at which consecutive rows are read, if it has too many rows to read all."""

MOST_BYTES = 1 << 25
"""Most bytes of rows to read. Heavy tails need many rows: a few large ones decide the step."""

MOST_PRODUCTS = 200_000_000
"""Most products of two features to add up, which takes less than 0.1 s."""

ROUNDING = 1e-6
"""Singular values relative to the largest one that are rounding of float32 data."""


def stable_step(dataset: Dataset, *, features: str = "x", target: str = "y", batch_size: int = 1) -> float:
    """Return the step 1 / R² for SGD on single rows, where R² is the least number with ``E[|x|² x xᵀ] ≤ R² E[x xᵀ]``.

    With the mean gradient of a batch of B rows, R² is replaced by ``R² / B + (1 - 1 / B) L``, where L is the largest
    eigenvalue of ``E[x xᵀ]``: the step grows with the batch as long as its rows are rarely alike.

    With steps below 2 / R² the mean squared error of the weights does not grow. The expectations are over all rows. Of
    a dataset with more than 32 MiB, or with so many features that this would take long, they are over rows at 1,000
    evenly spaced places. Rows of norm 1 have the step 1.

    Raises
    ------
    InvalidParameter
        ``features`` and ``target`` do not suit a linear regression, all these rows are zero or not finite, or a
        float64 cannot hold the step.

    References
    ----------
    Bach and Moulines (2013); P. Jain et al., "Parallelizing stochastic gradient descent for least squares regression",
    JMLR, 2018, for batches; see docs/papers.md.

    Examples
    --------
    >>> from dshuffle import create_dataset
    >>> rows = {"x": 5 * np.eye(4, dtype=np.float32), "y": np.ones(4)}
    >>> round(stable_step(create_dataset("memory://doc-step", rows, overwrite=True)), 6)
    0.04
    """
    check_dataset(dataset, features, target)
    ids = sample_ids(dataset, dataset.arrays[features].shape[0])
    rows = dataset.read_rows(ids)[features].astype(np.float64)
    check_finite("features", features, rows, ids)
    if not np.any(rows):
        raise InvalidParameter.of("features", features, "an array of values that are not all zero")
    largest = float(max(rows.max(), -rows.min()))
    rows /= largest  # so that squares do not overflow
    ratio = _largest_ratio(rows)
    if batch_size > 1:
        small = rows @ rows.T if rows.shape[1] > len(rows) else rows.T @ rows
        ratio = ratio / batch_size + (1 - 1 / batch_size) * float(np.linalg.eigvalsh(small)[-1]) / len(rows)
    step = 1 / ratio / largest / largest
    if not sys.float_info.min <= step <= sys.float_info.max:
        hint = f"The largest one is {largest:.3g}. Scale the features."
        raise InvalidParameter.of("features", features, "an array of values with squares that a float64 can hold", hint)
    return step


def sample_ids(dataset: Dataset, n_features: int) -> NDArray[np.int64]:
    """The rows to look at: all, or as many as are cheap, at evenly spaced places. Consecutive ones share chunks."""
    most = min(MOST_BYTES // dataset.row_nbytes, MOST_PRODUCTS // n_features**2)
    length = max(1, most // PLACES)
    if dataset.n_samples <= max(most, PLACES):
        return np.arange(dataset.n_samples)
    starts = np.linspace(0, dataset.n_samples - length, PLACES).astype(np.int64)
    return np.unique(starts[:, np.newaxis] + np.arange(length))


def _largest_ratio(rows: NDArray[np.float64]) -> float:
    """The largest v' E[|x|² x x'] v / v' E[x x'] v."""
    norms = np.einsum("ij,ij->i", rows, rows)
    if rows.shape[1] >= len(rows):  # as a rule, no row is a sum of others
        return float(norms.max())
    second, fourth = rows.T @ rows, rows.T @ (rows * norms[:, np.newaxis])
    values, vectors = np.linalg.eigh(second)
    spanned = values > ROUNDING**2 * values[-1]
    whitening = vectors[:, spanned] / np.sqrt(values[spanned])
    return float(np.linalg.eigvalsh(whitening.T @ fourth @ whitening)[-1])


def falling(epochs: int) -> Schedule:
    """Return steps that fall linearly: 1 - t / T in epoch t of T.

    SGD ends near the least error, where a constant step would leave the noise of the last rows. It is the schedule
    with the best bound for the last iterate.

    References
    ----------
    Defazio, Cutkosky, Mehta and Mishchenko (2023); see docs/papers.md.

    Examples
    --------
    >>> [round(falling(4)(epoch), 2) for epoch in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    return Linear(1 / epochs, epochs) if epochs > 1 else CONSTANT
