"""``partial:Q``: every worker exchanges a fraction of its samples with the others."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Self

import numpy as np

from dshuffle.checks import as_ratio
from dshuffle.planning.assignment.balance import exchange_in_classes
from dshuffle.planning.assignment.rule import Assignment, Draw, EpochDraw
from dshuffle.planning.assignment.slots import Blocks, SlotExchange, Slots, WorkerChange, path_of
from dshuffle.planning.grouping import count_keys, group_by

FIXED_POINTS = ":fixed-points"


@dataclass(frozen=True, slots=True)
class Partial(Assignment):
    """Every worker exchanges a fraction of its share with other workers.

    Parameters
    ----------
    fraction
        Q in [0, 1]. 0 is the same as ``local``. 1 is not the same as ``global``: every sample moves to another worker.
        More is not always better: see :meth:`return_probability`.
    fixed_points
        Allow rounds that send every sample to the worker that has it, as Nguyen et al. do for single samples. Workers
        then exchange at most as many samples, and about 1/n fewer on average, and every larger Q mixes better.

    References
    ----------
    Nguyen et al. (2022), Algorithm 1; see docs/papers.md. :func:`~dshuffle.planning.next_ranks` says how we
    differ.

    Examples
    --------
    >>> str(Partial(0.3))
    'partial:0.3'
    """

    name: ClassVar[str] = "partial"
    forms: ClassVar[str] = "'partial:Q' or 'partial:Q:fixed-points' (Q in [0, 1])"
    can_weigh: ClassVar[bool] = True

    fraction: float
    fixed_points: bool = False

    def __post_init__(self) -> None:
        as_ratio("assignment.fraction", self.fraction, Fraction(0))
        object.__setattr__(self, "fraction", float(self.fraction))

    def __str__(self) -> str:
        return f"partial:{self.fraction}{FIXED_POINTS if self.fixed_points else ''}"

    def n_exchanged(self, n_samples: int, n_workers: int) -> int:
        """Number of samples that every worker sends and receives in an epoch.

        ``ceil(Q * q / n)``, but at most the smallest share, and 0 if there is only one worker.

        Examples
        --------
        >>> Partial(0.1).n_exchanged(1000, 10), Partial(0.1).n_exchanged(1001, 10)
        (10, 11)
        """
        if n_workers == 1:
            return 0
        n_exchanged = as_ratio("assignment.fraction", self.fraction, Fraction(0)) * n_samples / n_workers
        # as_ratio rounds a Q below 1e-12 to 0, but a positive Q must move something.
        at_least = 1 if self.fraction > 0 else 0
        return min(max(-(-n_exchanged.numerator // n_exchanged.denominator), at_least), n_samples // n_workers)

    @classmethod
    def parse(cls, parameter: str | None) -> Self:
        number = (parameter or "").removesuffix(FIXED_POINTS)
        return cls(float(number), fixed_points=number != parameter)

    def draw(self, draw: Draw) -> EpochDraw:
        count = self.n_exchanged(draw.n_samples, draw.n_workers)
        if draw.classes is not None:
            ranks = exchange_in_classes(draw.previous, draw.classes, draw.n_workers, count, draw.seed, draw.epoch)
            return EpochDraw(ranks)
        slots = group_by(draw.previous, draw.n_workers)[0] if draw.slots is None else draw.slots
        if not count:
            return EpochDraw(draw.previous.copy(), slots=slots)
        sizes = count_keys(draw.previous, 0, draw.n_workers)
        exchange = SlotExchange.drawn(sizes, count, self.fixed_points, *path_of(draw.seed, draw.epoch))
        slots = exchange.applied(slots)
        ranks = np.empty_like(draw.previous)
        ranks[slots] = np.repeat(np.arange(draw.n_workers, dtype=np.int32), sizes)
        return EpochDraw(ranks, slots=slots)

    def slots(self, first: Blocks, seed: int, changes: Sequence[WorkerChange] = ()) -> Slots:
        count = functools.partial(self.n_exchanged, first.n_samples)
        return Slots.of(first, changes, count, fixed_points=self.fixed_points, seed=seed)

    @property
    def shuffled_fraction(self) -> float:
        """Q."""
        return self.fraction

    def least_share(self, n_samples: int, n_workers: int) -> int:
        """Every rank exchanges as many samples."""
        return max(1, self.n_exchanged(n_samples, n_workers))

    def most_incoming(self, n_samples: int, n_workers: int, largest_share: int) -> int:
        return self.n_exchanged(n_samples, n_workers)

    def missing_fraction(self, cached: float, excess: float) -> float:
        """See :class:`Assignment`; samples go to workers other than their owners, who hold them by excess alone."""
        return self.fraction * (1 - excess)

    @property
    def can_balance(self) -> bool:
        """Balanced classes are exchanged without fixed points."""
        return not self.fixed_points

    def persistence(self, n_workers: int) -> float:
        """lambda: how strongly the worker of a sample in one epoch predicts that in the next; 1 if nothing moves.

        ``1 - Q n / (n - 1)``, or with fixed points ``1 - Q``. It is negative where samples tend to leave the worker
        that had them. The nearer to 0, the better an exchange mixes.

        Examples
        --------
        >>> Partial(0.5).persistence(2), Partial(1.0).persistence(2), Partial(1.0, fixed_points=True).persistence(2)
        (0.0, -1.0, 0.0)
        """
        if n_workers == 1:
            return 0.0
        return 1 - self.fraction * (1 if self.fixed_points else n_workers / (n_workers - 1))

    def return_probability(self, n_workers: int, epochs: int) -> float:
        """Probability that a sample is with the same worker again after some exchanges.

        ``1 / n + (1 - 1 / n) lambda ** epochs``; a uniform draw has ``1 / n``. Two workers that exchange everything
        (Q = 1) swap their shares for ever and mix nothing.

        Examples
        --------
        >>> [Partial(1.0).return_probability(2, epochs) for epochs in (1, 2, 3)]
        [0.0, 1.0, 0.0]
        >>> Partial(0.5).return_probability(2, 1)
        0.5
        """
        return 1 / n_workers + (1 - 1 / n_workers) * self.persistence(n_workers) ** epochs

    def warning(self, n_workers: int) -> str:
        persistence = self.persistence(n_workers)
        if persistence >= 0:
            return ""
        best, alike = (n_workers - 1) / n_workers, 2 * (n_workers - 1) / n_workers - self.fraction
        return (
            f"assignment={str(self)!r} mixes no better than 'partial:{alike:.3g}' on {n_workers} workers, although it "
            f"moves more samples, because no sample stays with its worker. Use 'global', 'partial:{best:.3g}' or "
            f"'{self}{FIXED_POINTS}'."
        )
