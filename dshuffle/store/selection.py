"""Parts of a dataset: some of its samples, as a dataset of their own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_indices, as_integer, as_ratio
from dshuffle.errors import InvalidParameter


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Some samples of a stored dataset, in ascending order.

    Parameters
    ----------
    n_stored
        Number of samples of the stored dataset.
    bits
        One bit for each of them, packed: ``(ceil(n_stored / 8),)`` uint8.
    """

    n_stored: int
    bits: NDArray[np.uint8]

    @classmethod
    def of(cls, n_stored: int, ids: NDArray[np.int64]) -> Self:
        """The selection of distinct samples."""
        mask = np.zeros(n_stored, np.bool_)
        mask[ids] = True
        return cls(n_stored, np.packbits(mask))

    @property
    def ids(self) -> NDArray[np.int64]:
        """Ascending ids of the samples in the stored dataset."""
        return np.flatnonzero(np.unpackbits(self.bits, count=self.n_stored))

    def identity(self, stored: str) -> str:
        """Identity of the part, from that of the stored dataset."""
        return hashlib.sha256(stored.encode() + self.bits.tobytes()).hexdigest()[:32]


def wanted_samples(samples: ArrayLike, n_samples: int) -> NDArray[np.int64]:
    """Check a mask or ids, and return ascending ids.

    Raises
    ------
    InvalidParameter
        If it is neither a mask for all samples nor distinct ids, or selects nothing.
    """
    array = np.asarray(samples)
    if array.dtype == np.bool_:
        if array.shape != (n_samples,):
            raise InvalidParameter.of("samples.shape", array.shape, f"({n_samples},) for a mask")
        ids = np.flatnonzero(array)
    else:
        ids = np.unique(as_indices("samples", array, n_samples, "samples"))
        if len(ids) < array.size:
            raise InvalidParameter.because("samples", "some ids are repeated", "Select each sample once.")
    if not len(ids):
        raise InvalidParameter.because("samples", "it selects nothing", "Select at least one sample.")
    return ids


def split_samples(
    n_samples: int, fraction: float, groups: NDArray[np.int64] | None, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide samples at random into two parts.

    Parameters
    ----------
    fraction
        Fraction of the samples in the first part.
    groups
        ``(n_samples,)`` numbers. Samples with the same number stay together. None to draw single samples.

    Returns
    -------
    tuple
        Ascending ids of both parts.

    Raises
    ------
    InvalidParameter
        If a part would be empty.

    Examples
    --------
    >>> first, second = split_samples(10, 0.7, None, seed=0)
    >>> len(first), len(second), sorted([*first, *second]) == list(range(10))
    (7, 3, True)
    >>> first, second = split_samples(6, 0.5, np.array([0, 0, 1, 1, 2, 2]), seed=0)
    >>> first.tolist(), second.tolist()
    ([0, 1, 4, 5], [2, 3])
    """
    ratio = as_ratio("fraction", fraction, Fraction(0))
    rng = np.random.default_rng(as_integer("seed", seed, 0))
    if groups is None:
        order, sizes = rng.permutation(n_samples), np.ones(n_samples, np.int64)
    else:
        _, groups, counts = np.unique(groups, return_inverse=True, return_counts=True)
        order = rng.permutation(len(counts))
        sizes = counts[order]
    # Groups in random order go to the first part as long as at least half of each fits.
    first_part = np.cumsum(sizes) - sizes / 2 <= float(ratio * n_samples)
    chosen = order[first_part]
    mask = np.zeros(n_samples, np.bool_)
    if groups is None:
        mask[chosen] = True
    else:
        mask = np.isin(groups, chosen)
    return _both_parts(mask, fraction)


def split_strata(labels: NDArray[Any], fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide samples at random, so that the first part has the same fraction of the samples of every label.

    Parameters
    ----------
    labels
        ``(n_samples,)`` label of each sample.
    fraction
        Fraction of the samples of each label in the first part.

    Returns
    -------
    tuple
        Ascending ids of both parts. The number of samples of a label is rounded up or down.

    Raises
    ------
    InvalidParameter
        If a part would be empty.

    Examples
    --------
    >>> first, second = split_strata(np.array([7, 7, 7, 7, 9, 9, 9, 9]), 0.75, seed=0)
    >>> len(first), len(second), int(sum(second < 4))
    (6, 2, 1)
    """
    ratio = as_ratio("fraction", fraction, Fraction(0))
    rng = np.random.default_rng(as_integer("seed", seed, 0))
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    # The first part gets evenly spread samples of this order. The random offset makes all samples equally likely.
    places = np.arange(len(labels) + 1) * float(ratio) + rng.random()
    mask = np.zeros(len(labels), np.bool_)
    mask[order] = np.diff(np.floor(places)) > 0
    return _both_parts(mask, fraction)


def split_at_time(times: NDArray[Any], fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide samples into earlier and later ones. Samples of the same time stay together.

    Parameters
    ----------
    times
        ``(n_samples,)`` times, or numbers that grow with time.
    fraction
        Fraction of the samples in the first part.

    Returns
    -------
    tuple
        Ascending ids of both parts.

    Raises
    ------
    InvalidParameter
        If a part would be empty.

    Examples
    --------
    >>> split_at_time(np.array([3, 1, 2, 2]), 0.25)
    (array([1]), array([0, 2, 3]))
    """
    ratio = as_ratio("fraction", fraction, Fraction(0))
    size = max(1, round(ratio * len(times)))
    last = np.partition(times, size - 1)[size - 1]
    earlier, up_to_last = times < last, times <= last
    nearer = abs(np.count_nonzero(up_to_last) - size) <= abs(np.count_nonzero(earlier) - size)
    return _both_parts(up_to_last if nearer else earlier, fraction)


def _both_parts(first: NDArray[np.bool_], fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ids, other_ids = np.flatnonzero(first), np.flatnonzero(~first)
    if not len(ids) or not len(other_ids):
        raise InvalidParameter.of("fraction", fraction, "a fraction that leaves samples in both parts")
    return ids, other_ids
