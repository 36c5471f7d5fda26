"""Measure how well a shuffle mixes, with three figures that are compared to pure chance.

Training depends on which rows are trained on together, not on which worker reads them. A shuffle may move few rows and
mix well, or read everything again and leave the rows of every chunk next to each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel
from dshuffle.planning.grouping import group_by
from dshuffle.planning.planner import EpochPlanner
from dshuffle.planning.randomness import log_choose
from dshuffle.planning.shuffle_spec import ShuffleSpec
from dshuffle.planning.types import Samples

Orders = Sequence[Samples]
"""The samples of every worker in training order, one array per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleQuality:
    """How well a sequence of epochs is shuffled.

    Parameters
    ----------
    meets_again
        In [0, 1]: probability that two rows of one chunk that share a worker in an epoch also share a worker in the
        next. 1 for ``local`` and ``chunks``. None if no two rows of a chunk shared a worker.
    by_chance
        In [0, 1]: the same probability in a uniform draw, about 1 / n.
    neighbour_distance
        At least 0: mean distance in training order of two rows that are neighbors in the store, relative to a uniform
        permutation, where it is 1. Near 0 if rows are trained on in stored order.
    class_spread
        At least 0: total variation distance between the classes of a batch and those of all rows (mean over batches),
        relative to batches of uniformly random rows, where it is 1. Larger if batches contain few classes, below 1 if
        they are stratified. None if all rows are of one class, or the classes are unknown.
    epochs_to_mix
        Epochs until the worker of a sample says nothing about its first worker, to 1 %; infinite if samples never move.
        None if rows move in groups, or the assignment is unknown.
    """

    meets_again: float | None
    by_chance: float
    neighbour_distance: float
    class_spread: float | None
    epochs_to_mix: float | None = None

    def __post_init__(self) -> None:
        for name in ("meets_again", "by_chance", "neighbour_distance", "class_spread", "epochs_to_mix"):
            value = getattr(self, name)
            most = 1.0 if name in ("meets_again", "by_chance") else math.inf
            if value is not None and not 0 <= value <= most:
                raise InvalidParameter.of(name, value, f"in [0, {most}]")


def planned_quality(
    spec: ShuffleSpec, *, epochs: int, chunk_rows: int, batch_rows: int, classes: ArrayLike | None = None
) -> ShuffleQuality:
    """Measure the first epochs that a specification plans.

    Parameters
    ----------
    spec
        Specification of the shuffle. Its delivery makes no difference.
    epochs
        Number of epochs, at least 2.
    chunk_rows, batch_rows, classes
        See :func:`shuffle_quality`.

    Raises
    ------
    InvalidParameter
        As in :func:`shuffle_quality`, or if the specification broadcasts samples.

    Examples
    --------
    >>> from dshuffle.planning import Choices, Chunks, Global, Local
    >>> for assignment in (Local(), Global(), Chunks(100)):
    ...     spec = ShuffleSpec(4000, 4, Choices(assignment))
    ...     quality = planned_quality(spec, epochs=4, chunk_rows=100, batch_rows=50)
    ...     print(f"{quality.meets_again:.2f} {quality.by_chance:.2f} {quality.neighbour_distance:.1f}")
    1.00 0.25 1.0
    0.25 0.25 1.0
    1.00 0.25 1.0
    """
    epochs = as_integer("epochs", epochs, 2, "At least two epochs are needed to see whether rows meet again.")
    orders = orders_of_first_epochs(spec, epochs)
    quality = shuffle_quality(orders, chunk_rows=chunk_rows, batch_rows=batch_rows, classes=classes)
    exchanges = spec.choices.assignment.epochs_to_mix(spec.n_workers)
    return dataclasses.replace(quality, epochs_to_mix=exchanges and exchanges * spec.choices.every)


def orders_of_first_epochs(spec: ShuffleSpec, epochs: int) -> Iterator[Orders]:
    """Yield who trains on what in which order, for the first epochs of a shuffle.

    Raises
    ------
    InvalidParameter
        If the sharding broadcasts samples, because every worker trains on those.
    """
    if spec.n_broadcast:
        hint = "Pass only the ranks."
        raise InvalidParameter.of("sharding", str(spec.choices.sharding), "a sharding without broadcast samples", hint)
    # Assignments do not depend on the delivery, and reading from the store needs the least planning.
    planner = EpochPlanner(spec.with_choices(delivery="storage"), checks=False)
    for epoch in range(epochs):
        plan = planner.advance() if epoch else planner.load()
        order, offsets = group_by(plan.ranks, spec.n_workers)
        owns = [order[offsets[rank] : offsets[rank + 1]] for rank in range(spec.n_workers)]
        seed, ordered = spec.choices.seed, spec.choices.exchange_epochs.order
        yield [ordered(own, seed=seed, epoch=epoch, rank=rank) for rank, own in enumerate(owns)]


def shuffle_quality(
    epochs: Iterable[Orders], *, chunk_rows: int, batch_rows: int, classes: ArrayLike | None = None
) -> ShuffleQuality:
    """Measure the quality of consecutive epochs.

    Parameters
    ----------
    epochs
        For every epoch, the samples of each worker in training order, every sample once. At least one epoch and two
        samples.
    chunk_rows
        Number of samples per chunk. Samples 0 to ``chunk_rows - 1`` form the first chunk.
    batch_rows
        Number of samples per batch. All workers train on one batch each at the same time, so the training order is all
        first batches, then all second batches, and so on.
    classes
        ``(q,)`` integers from 0, the class of every sample.

    Raises
    ------
    InvalidParameter
        If a parameter is not allowed.

    Examples
    --------
    >>> as_stored = [np.arange(4), np.arange(4, 8)]  # the rows of two workers
    >>> quality = shuffle_quality([as_stored] * 2, chunk_rows=4, batch_rows=4, classes=[0, 0, 0, 0, 1, 1, 1, 1])
    >>> quality.meets_again, round(quality.by_chance, 3), round(quality.neighbour_distance, 3)
    (1.0, 0.429, 0.333)
    >>> round(quality.class_spread, 3)
    3.889
    """
    chunk_rows = as_integer("chunk_rows", chunk_rows, 1)
    batch_rows = as_integer("batch_rows", batch_rows, 1)
    labels = None if classes is None else _as_classes(classes)
    together = np.zeros(2)  # pairs of rows of a chunk that shared a worker, and how many of them did so again
    chances, distances, spreads = [], [], []
    before: NDArray[np.int64] | None = None
    for orders in epochs:
        sizes = np.array([len(order) for order in orders])
        samples, n_samples = np.concatenate(orders), int(sizes.sum())
        if n_samples < 2 or (labels is not None and len(labels) != n_samples):
            raise InvalidParameter.because(
                "epochs", f"an epoch has {n_samples} samples", "Pass at least two samples, and one class per sample."
            )
        ranks = np.empty(n_samples, dtype=np.int64)
        ranks[samples] = np.repeat(np.arange(len(sizes)), sizes)
        if before is not None:
            together += _pairs_together(before, ranks, len(sizes), chunk_rows)
        before = ranks
        chances.append(float((sizes * (sizes - 1)).sum()) / (n_samples * (n_samples - 1)))
        batches = np.concatenate([np.arange(size) // batch_rows for size in sizes])
        distances.append(_neighbour_distance(samples, batches * len(sizes) + ranks[samples]))
        if labels is not None:
            spreads.append(_class_spread(labels[samples], _batch_offsets(sizes, batch_rows)))
    if before is None:
        raise InvalidParameter.because("epochs", "it is empty", "Pass at least one epoch.")
    spread = np.sum(spreads, axis=0) if spreads else np.zeros(2)
    return ShuffleQuality(
        meets_again=float(together[1] / together[0]) if together[0] else None,
        by_chance=float(np.mean(chances)),
        neighbour_distance=float(np.mean(distances)),
        class_spread=float(spread[0] / spread[1]) if spread[1] else None,
    )


def _as_classes(classes: ArrayLike) -> Samples:
    labels = np.asarray(classes)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or (labels < 0).any():
        hint = "Pass a one-dimensional array of integers >= 0."
        raise InvalidParameter.because("classes", f"it has dtype {labels.dtype} and shape {labels.shape}", hint)
    return labels.astype(np.int64)


def _pairs_together(
    before: NDArray[np.int64], after: NDArray[np.int64], n_workers: int, chunk_rows: int
) -> NDArray[np.float64]:
    """Count the pairs of rows of a chunk that share a worker before, and that do so before and after."""
    chunks = np.arange(len(before)) // chunk_rows
    once = _pairs(chunks * n_workers + before)
    return np.array([once, _pairs((chunks * n_workers + before) * n_workers + after)])


def _pairs(keys: NDArray[np.int64]) -> float:
    counts = np.unique(keys, return_counts=True)[1]
    return float((counts * (counts - 1)).sum()) / 2


def _neighbour_distance(samples: Samples, steps: NDArray[np.int64]) -> float:
    """Mean distance of samples j and j + 1 when ordered by step, relative to (q + 1) / 3."""
    places = np.empty(len(samples), dtype=np.int64)
    places[samples[np.argsort(steps, kind="stable")]] = np.arange(len(samples))
    return float(np.abs(np.diff(places)).mean()) * 3 / (len(samples) + 1)


def _batch_offsets(sizes: NDArray[np.int64], batch_rows: int) -> NDArray[np.int64]:
    """Offset of each batch in the concatenated samples of all workers; the last offset is the end."""
    ends = np.cumsum(sizes)
    begins = [np.arange(end - size, end, batch_rows) for end, size in zip(ends, sizes, strict=True)]
    return np.append(np.concatenate(begins), ends[-1])


def _class_spread(classes: Samples, offsets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sums over batches of the deviation of their classes, and of the deviation of random batches."""
    totals = np.bincount(classes)
    sizes, times = np.unique(np.diff(offsets), return_counts=True)
    expected = sum(
        count * sum(mean_deviation(len(classes), int(total), int(size)) for total in totals) / int(size)
        for size, count in zip(sizes, times, strict=True)
    )
    return np.array([_deviations(classes, offsets, totals / len(classes)), expected])


@kernel("(i8[::1], i8[::1], f8[::1])")
def _deviations(classes, offsets, shares):  # type: ignore[no-untyped-def]
    """Sum over batches and classes of the difference between a class's share of the batch and of all rows."""
    total = 0.0
    counts = np.zeros(shares.size, dtype=np.int64)
    for batch in range(offsets.size - 1):
        begin, end = offsets[batch], offsets[batch + 1]
        counts[:] = 0
        for i in range(begin, end):
            counts[classes[i]] += 1
        for k in range(shares.size):
            total += abs(counts[k] / (end - begin) - shares[k])
    return total


def mean_deviation(n_samples: int, n_marked: int, n_drawn: int) -> float:
    """Mean absolute deviation of the number of marked samples in a draw without replacement.

    ``E|X - E X| = 2 v (N - K - m + v) / N * P(X = v)`` with ``v = 1 + floor(m K / N)``, for m samples drawn from N, of
    which K are marked. This is the hypergeometric counterpart of De Moivre's formula for the binomial distribution.

    Examples
    --------
    >>> mean_deviation(4, 2, 2)  # 0, 1 or 2 marked with probabilities 1/6, 4/6, 1/6
    0.333...
    """
    if not (0 < n_marked < n_samples and 0 < n_drawn < n_samples):
        return 0.0
    v = 1 + n_drawn * n_marked // n_samples
    others_left = n_samples - n_marked - n_drawn + v
    if v > min(n_marked, n_drawn):
        return 0.0
    log = log_choose(n_marked, v) + log_choose(n_samples - n_marked, n_drawn - v) - log_choose(n_samples, n_drawn)
    return 2 * v * others_left / n_samples * math.exp(log)
