"""Steps for a linear regression, from the rows of its dataset."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.store import Dataset
from dshuffle.training.linear_regression import check_dataset
from dshuffle.training.schedules import CONSTANT, Linear, Schedule

ROWS = 1000
"""Number of rows that are looked at."""

ROUNDING = 1e-6
"""Singular values relative to the largest one that are rounding of float32 data."""


def stable_step(dataset: Dataset, *, features: str = "x", target: str = "y") -> float:
    """Return the step 1 / R² for SGD on single rows, where R² is the least number with ``E[|x|² x xᵀ] ≤ R² E[x xᵀ]``.

    With steps below 2 / R² the mean squared error of the weights does not grow. The expectations are over 1,000 evenly
    spaced rows. Rows of norm 1 have the step 1.

    Raises
    ------
    InvalidParameter
        ``features`` and ``target`` do not suit a linear regression, or all these rows are zero or not finite.

    References
    ----------
    Bach and Moulines (2013); see docs/papers.md.

    Examples
    --------
    >>> from dshuffle import create_dataset
    >>> rows = {"x": 5 * np.eye(4, dtype=np.float32), "y": np.ones(4)}
    >>> round(stable_step(create_dataset("memory://doc-step", rows, overwrite=True)), 6)
    0.04
    """
    check_dataset(dataset, features, target)
    ids = np.linspace(0, dataset.n_samples - 1, min(ROWS, dataset.n_samples)).astype(np.int64)
    rows = dataset.read_rows(ids)[features].astype(np.float64)
    if not (np.isfinite(rows).all() and np.any(rows)):
        raise InvalidParameter.of("features", features, "an array of finite values that are not all zero")
    return 1 / _largest_ratio(rows)


def _largest_ratio(rows: NDArray[np.float64]) -> float:
    """The largest v' E[|x|² x x'] v / v' E[x x'] v."""
    norms = np.einsum("ij,ij->i", rows, rows)
    if rows.shape[1] >= len(rows):  # as a rule, no row is a sum of others
        return float(norms.max())
    left, singular, _ = np.linalg.svd(rows, full_matrices=False)
    left = left[:, singular > ROUNDING * singular[0]]
    return float(np.linalg.eigvalsh(left.T @ (left * norms[:, np.newaxis]))[-1])


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
