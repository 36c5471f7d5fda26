"""The order of training, which epochs have an exchange, and the sizes of shares."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from dshuffle.checks import as_integer, as_ratio
from dshuffle.errors import InvalidParameter
from dshuffle.planning.randomness import permutation, random_words, words_at
from dshuffle.planning.types import Integers, Samples


def row_permutation(n_rows: int, seed: int = 0) -> Samples:
    """Permutation that :func:`dshuffle.permute` applies.

    Row k of the permuted dataset is row ``row_permutation(...)[k]`` of the original one.

    Parameters
    ----------
    n_rows
        Number of rows, at least 0 and below 2**32.
    seed
        Any integer.

    Returns
    -------
    (n_rows,) int64
        The original row at each position.

    Raises
    ------
    InvalidParameter
        If a parameter is not an integer, or ``n_rows`` is out of range.

    Examples
    --------
    >>> row_permutation(5, seed=1)
    array([2, 0, 1, 3, 4])
    """
    return permutation(as_integer("n_rows", n_rows, 0), "permute", as_integer("seed", seed))


Weights = tuple[int, ...]
"""One weight for each rank, or none for equal shares."""

LARGEST_WEIGHT = 1000
"""The largest weight. Measured speeds are no more exact than one part in a thousand."""


def as_weights(shares: Sequence[float]) -> Weights:
    """Weights in proportion to ``(n,)`` positive numbers; none if they are equal."""
    largest = max(shares)
    weights = tuple(max(1, round(LARGEST_WEIGHT * (share / largest))) for share in shares)
    return () if min(weights) == LARGEST_WEIGHT else weights


def check_weights(weights: Weights, n_workers: int) -> None:
    """Refuse weights that are not those of so many ranks."""
    if weights and (len(weights) != n_workers or not all(1 <= weight <= LARGEST_WEIGHT for weight in weights)):
        allowed = f"{n_workers} integers in [1, {LARGEST_WEIGHT}], one for each rank, or () for equal shares"
        raise InvalidParameter.of("weights", weights, allowed)


@functools.lru_cache(maxsize=64)
def share_sizes(n_units: int, weights: Weights) -> Integers:
    """``(n,)`` int64 sizes in proportion to the weights. They add up to ``n_units``, and each is at least 1."""
    # Each size is the exact proportion rounded down or up: the units that are left after rounding down go to the
    # largest remainders, and to lower ranks among equals. Ranks that would get nothing take a unit from the largest
    # sizes.
    # Python's integers: the products may have more than 64 bits.
    parts = [divmod(n_units * weight, sum(weights)) for weight in weights]
    sizes = np.array([whole for whole, _ in parts], np.int64)
    by_remainder = sorted(range(len(weights)), key=lambda rank: -parts[rank][1])
    sizes[by_remainder[: n_units - int(sizes.sum())]] += 1
    for rank in np.flatnonzero(sizes == 0).tolist():
        sizes[rank] += 1
        sizes[max(range(len(weights)), key=lambda other: (sizes[other], -weights[other]))] -= 1
    sizes.flags.writeable = False
    return sizes


def largest_share(n_samples: int, n_workers: int, chunk_rows: int = 1, weights: Weights = ()) -> int:
    """Number of samples in the largest share, which is the same in every epoch."""
    # With weights and chunks it may be less, because a short chunk at the end belongs to any rank.
    whole, short = divmod(n_samples, chunk_rows)
    if weights:
        return int(share_sizes(whole, weights).max()) * chunk_rows + short
    each, extra = divmod(whole, n_workers)
    return (each + 1) * chunk_rows if extra else each * chunk_rows + short


def cache_capacity(cache_fraction: float | None, n_samples: int, n_workers: int, *, chunk_rows: int = 1) -> int:
    """Number of samples that a worker may hold between epochs."""
    # It is ``floor(alpha * q)``, but at least the largest share.
    partition = largest_share(n_samples, n_workers, chunk_rows)
    if cache_fraction is None:
        return partition
    hint = f"Each of the {n_workers} workers must hold its own share of the samples."
    alpha = as_ratio("cache_fraction", cache_fraction, Fraction(1, n_workers), hint)
    return max(partition, alpha.numerator * n_samples // alpha.denominator)


BETWEEN = ("redraw", "reverse")
"""Every order in epochs without an exchange: a new random one, or that of the epoch before backwards."""


@dataclass(frozen=True, slots=True)
class ExchangeEpochs:
    """Which epochs have an exchange, and the order of training in all epochs."""

    # Epoch 0 is loaded, and counts as one with an exchange.

    every: int = 1  # K: the epochs K, 2 K, ... have an exchange.
    between: str = "redraw"  # The order in the other epochs: a name in :data:`BETWEEN`.

    def has_exchange(self, epoch: int) -> bool:
        """Whether samples may change workers for an epoch."""
        return epoch % self.every == 0

    def last(self, epoch: int) -> int:
        """The last epoch up to this one that has an exchange. Workers train on its samples."""
        return epoch - epoch % self.every

    def after(self, first: int, last: int) -> range:
        """The epochs after ``first`` and up to ``last`` that have an exchange."""
        return range(self.last(first) + self.every, last + 1, self.every)

    def permutation(self, sample_ids: Samples, *, seed: int, epoch: int, rank: int) -> Samples:
        """``(k,)`` int64 positions in the ``(k,)`` samples of a worker, in training order."""
        # It depends only on the seed, the epoch, the rank and the set of samples.
        # Samples are sorted by words drawn for each of them, no two of which are equal. So the order of any subset can
        # be computed without the other samples. A worker that receives rows knows in which order their sender trains.
        # "reverse" is FlipFlop of Rajput et al. (2022), see docs/papers.md, who reverse every second epoch of one
        # worker's data. Here each worker reverses the order of its own samples, in all epochs between two exchanges.
        drawn = self.last(epoch) if self.between == "reverse" else epoch
        order = np.argsort(words_at(random_words(1, "order", seed, drawn, rank)[0], sample_ids))
        return order[::-1].copy() if (epoch - drawn) % 2 else order

    def order(self, sample_ids: Samples, *, seed: int, epoch: int, rank: int) -> Samples:
        """The ``(k,)`` samples of a worker in training order."""
        return sample_ids[self.permutation(sample_ids, seed=seed, epoch=epoch, rank=rank)]

    @property
    def label(self) -> str:
        """What a label of a way adds; empty if every epoch has an exchange."""
        order = "" if self.between == "redraw" else f", {self.between}"
        return "" if self.every == 1 else f", every {self.every} epochs{order}"


EVERY_EPOCH = ExchangeEpochs()
"""Every epoch has an exchange."""
