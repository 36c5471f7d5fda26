"""Description of a job for the cost model: the samples, and the way of shuffling them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from dshuffle.checks import as_integer, as_ratio
from dshuffle.planning.cost.cluster import as_number
from dshuffle.planning.delivery import Delivery, get_delivery
from dshuffle.planning.shuffle_spec import Choices


@dataclass(frozen=True, slots=True)
class Work:
    """One epoch of a job: its samples, and the way of shuffling them.

    Parameters
    ----------
    n_samples
        Number of samples in the dataset.
    row_nbytes
        Bytes per sample.
    choices
        The way of shuffling. Its sharding, balance and seed do not change what an epoch costs.
    chunk_rows
        Number of samples per chunk, in the array with the most bytes. A chunk is one request.
    training_seconds
        Training time per epoch, during which the next epoch's samples are exchanged. None if unknown.

    Raises
    ------
    InvalidParameter
        If a value is not allowed.

    Examples
    --------
    >>> work = Work(100_000, 1024, Choices("partial:0.1"))
    >>> work.way, work.delivery.name
    ('partial:0.1 + peer', 'peer')
    """

    n_samples: int
    row_nbytes: int
    choices: Choices = field(default_factory=Choices)
    chunk_rows: int = 64
    training_seconds: float | None = None

    def __post_init__(self) -> None:
        get_delivery(self.choices.delivery)
        for name in ("n_samples", "row_nbytes", "chunk_rows"):
            as_integer(name, getattr(self, name), 1)
        if self.training_seconds is not None:
            as_number("training_seconds", self.training_seconds, 0.0)

    def with_choices(self, **changes: Any) -> Work:
        """The same job with other choices."""
        return dataclasses.replace(self, choices=dataclasses.replace(self.choices, **changes))

    @property
    def delivery(self) -> Delivery:
        """The delivery chosen."""
        return get_delivery(self.choices.delivery)

    @property
    def fraction(self) -> float:
        """Q: the fraction of its share that every worker exchanges; 1 unless the assignment has its own."""
        return self.choices.assignment.shuffled_fraction

    @property
    def in_chunks(self) -> bool:
        """Whether whole chunks move."""
        return self.choices.assignment.in_chunks

    @property
    def group_rows(self) -> int:
        """Samples that move together: those of a chunk with ``chunks`` and ``chunks:ROWS``, otherwise 1."""
        return min(self.n_samples, self.choices.assignment.unit or self.chunk_rows)

    @property
    def way(self) -> str:
        """The label of the choices, for tables."""
        return self.choices.label

    def alpha(self, n_workers: int) -> float:
        """Return the cache fraction for ``n_workers`` workers."""
        least = Fraction(1, n_workers)
        if self.choices.cache_fraction is None:
            return float(least)
        hint = f"Each of the {n_workers} workers must hold its own share of the samples."
        return float(as_ratio("cache_fraction", self.choices.cache_fraction, least, hint))

    def excess(self, n_workers: int) -> float:
        """Return the probability that a worker holds a sample outside its share.

        Examples
        --------
        >>> Work(1000, 8, Choices(cache_fraction=0.55)).excess(10), Work(1000, 8).excess(10)
        (0.5, 0.0)
        """
        if n_workers == 1:
            return 0.0
        share = 1 / n_workers
        return max(0.0, round((self.alpha(n_workers) - share) / (1 - share), 15))
