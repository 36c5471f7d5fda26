"""Shuffle quality of the ways of a comparison, computed from their plans for a subset of the dataset's rows."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.planning import SHARDINGS, Assignment, Choices, Classes, GivenSharding, ShuffleSpec
from dshuffle.planning.assignment.balance import balanced_sizes, deal_classes, label_codes
from dshuffle.planning.mixing import ShuffleQuality, planned_quality
from dshuffle.planning.randomness import choose
from dshuffle.runtime.dataset_inputs import STRATIFIED, read_labels, unit_rows, with_chunks_of
from dshuffle.store import Dataset, read_sharding

MOST_SAMPLES = 200_000
"""Largest number of rows to plan for. It gives two significant digits in a tenth of a second."""
LEAST_CHUNK_ROWS = 16
"""Smallest number of rows per chunk to plan for, unless chunks are smaller."""
EPOCHS = 4
BATCH_ROWS = 256
MOST_CLASSES = 1000
SLICES = 64


@dataclass(frozen=True, slots=True, eq=False)
class RowSubset:
    """Evenly spaced subset of the rows of a dataset that represents all rows.

    Parameters
    ----------
    sample_ids
        Rows of the subset, ascending int64.
    chunk_rows
        Number of rows of the subset in each chunk (the last chunk may have fewer).
    of_chunk
        Number of rows of a chunk in the dataset.
    """

    sample_ids: NDArray[np.int64]
    chunk_rows: int
    of_chunk: int

    @classmethod
    def of(cls, n_samples: int, chunk_rows: int, at_most: int = MOST_SAMPLES) -> Self:
        """Take some rows of each chunk, and if chunks have few rows, take only some of the chunks.

        Examples
        --------
        >>> RowSubset.of(10_000, 100, at_most=5_000).sample_ids[:5]
        array([0, 2, 4, 6, 8])
        >>> RowSubset.of(10_000, 20, at_most=5_000).chunk_rows
        16
        """
        if n_samples <= at_most:
            return cls(np.arange(n_samples), chunk_rows, chunk_rows)
        rows = max(min(chunk_rows, LEAST_CHUNK_ROWS), chunk_rows * at_most // n_samples)
        n_chunks = -(-n_samples // chunk_rows)
        kept = min(n_chunks, at_most // rows)
        starts = np.arange(kept) * n_chunks // kept * chunk_rows
        ids = (starts[:, np.newaxis] + np.arange(rows) * chunk_rows // rows).ravel()
        return cls(ids[ids < n_samples], rows, chunk_rows)

    def assignment(self, assignment: Assignment, n_workers: int) -> Assignment:
        """The assignment for these rows; ``chunks`` has as many fewer rows as there are."""
        if assignment.unit is None:
            return assignment
        rows = max(1, assignment.unit * self.chunk_rows // self.of_chunk)
        return assignment.with_unit(min(rows, (len(self.sample_ids) - 1) // max(1, n_workers - 1)))


class QualityOfWays:
    """Shuffle quality of any way on one dataset.

    Parameters
    ----------
    dataset
        Dataset. Only its shape, its chunks (those of :func:`~dshuffle.runtime.dataset_inputs.unit_rows`) and its
        classes matter.
    target
        Name of the array whose values are the classes, if it has integers or booleans and at most 1,000 distinct
        values. None takes the first array of labels: one integer or boolean per sample, at most 1,000 distinct values,
        and two samples of each on average. Otherwise the classes are 64 slices of the rows in stored order, as if the
        data were stored by class.
    in_random_order
        Whether the dataset is a copy in random order, so that such slices of the original are random sets of its rows.

    Attributes
    ----------
    classes
        Description of the classes for the report.
    """

    def __init__(self, dataset: Dataset, target: str | None, *, in_random_order: bool = False) -> None:
        self._dataset = dataset
        self._labels = functools.cache(lambda name: read_labels(dataset, name))
        self._subset = RowSubset.of(dataset.n_samples, unit_rows(dataset))
        ids = self._subset.sample_ids
        if target is None:
            target, values = self._first_labels(ids)
        else:
            values = _values(dataset, target, ids)
        if values is None:
            self._classes = np.arange(len(ids)) * SLICES // len(ids)
            if in_random_order:
                self._classes = np.random.default_rng(0).permutation(self._classes)
            self.classes = (
                f"{SLICES} slices of the stored order; if that order is random, they say nothing. "
                + ("No array has labels" if target is None else f"{target} has no labels")
                + f", which are integers or booleans with at most {MOST_CLASSES:,} values"
            )
        else:
            self._classes = values
            self.classes = f"{values.max() + 1} values of {target}"

    def _first_labels(self, ids: NDArray[np.int64]) -> tuple[str | None, NDArray[np.int64] | None]:
        for name in sorted(self._dataset.arrays):
            info = self._dataset.arrays[name]
            if info.dtype.kind in "biu" and not info.shape:
                values, classes = np.unique(self._labels(name)[ids], return_inverse=True)
                if len(values) <= min(MOST_CLASSES, len(ids) // 2):
                    return name, classes.astype(np.int64)
        return None, None

    def of(self, choices: Choices, n_workers: int) -> ShuffleQuality | None:
        """The quality of one way; None for a dataset with too few rows to shuffle.

        If only a subset is planned for, a stored sharding is evened out. With a ``balance``, a random balanced sharding
        replaces any other.
        """
        n_samples = len(self._subset.sample_ids)
        if n_samples < 2:
            return None
        assignment = self._subset.assignment(with_chunks_of(self._dataset, choices.assignment), n_workers)
        sharding = (
            "random" if choices.balance is not None else self._sharding(choices.sharding, n_workers, choices.seed)
        )
        balance = None if choices.balance is None else self._balance(choices.balance.name)
        # Who trains on what does not depend on the delivery.
        choices = dataclasses.replace(
            choices, assignment=assignment, delivery="storage", sharding=sharding, balance=balance
        )
        spec = ShuffleSpec.at_first(n_samples, n_workers, choices)
        return planned_quality(
            spec,
            epochs=EPOCHS,
            chunk_rows=self._subset.chunk_rows,
            batch_rows=BATCH_ROWS,
            classes=self._classes,
        )

    def _balance(self, balance: str) -> Classes:
        return Classes.of(balance, self._labels(balance)).only(self._subset.sample_ids)

    def _sharding(self, sharding: str | GivenSharding, n_workers: int, seed: int) -> str | GivenSharding:
        ids = self._subset.sample_ids
        if isinstance(sharding, GivenSharding) and sharding.ranks is not None:
            return GivenSharding.of(sharding.name, _evened(sharding.ranks[ids], n_workers))
        sharding = str(sharding)
        if sharding in SHARDINGS:
            return sharding
        if sharding.startswith(STRATIFIED):
            codes, classes = label_codes(self._labels(sharding.removeprefix(STRATIFIED)))
            return GivenSharding.of(sharding, deal_classes(codes[ids], len(classes), n_workers, seed=seed))
        return GivenSharding.of(sharding, _evened(read_sharding(self._dataset, sharding)[ids], n_workers))


def _evened(ranks: NDArray[np.int32], n_workers: int) -> NDArray[np.int32]:
    """Change some ranks so that partition sizes differ by at most one.

    Examples
    --------
    >>> np.bincount(_evened(np.array([0, 0, 0, 1, 2, 2], np.int32), 3))
    array([2, 2, 2])
    """
    sizes = np.bincount(ranks, minlength=n_workers)
    quotas = np.empty_like(sizes)
    quotas[np.argsort(-sizes, kind="stable")] = np.sort(balanced_sizes(len(ranks), n_workers))[::-1]
    surplus = [
        choose(np.flatnonzero(ranks == rank), int(sizes[rank] - quotas[rank]), "evened", rank)
        for rank in np.flatnonzero(sizes > quotas).tolist()
    ]
    evened = ranks.copy()
    if surplus:
        evened[np.concatenate(surplus)] = np.repeat(np.arange(n_workers), np.maximum(quotas - sizes, 0))
    return evened


def _values(dataset: Dataset, target: str, ids: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the classes of some samples, as integers from 0; None if the target does not have classes."""
    if target not in dataset.arrays:
        raise InvalidParameter.of("target", target, f"one of the dataset's arrays: {', '.join(sorted(dataset.arrays))}")
    info = dataset.arrays[target]
    if info.dtype.kind not in "biu" or info.shape:
        return None
    values, classes = np.unique(dataset.read_rows(ids)[target], return_inverse=True)
    return classes.astype(np.int64) if len(values) <= MOST_CLASSES else None
