"""``partial:Q``: every worker exchanges a fraction of its samples with the others."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Self

from dshuffle.checks import as_ratio
from dshuffle.planning.assignment.balance import exchange_in_classes
from dshuffle.planning.assignment.draws import exchange_samples
from dshuffle.planning.assignment.rule import Assignment, Draw
from dshuffle.planning.packets import Packets
from dshuffle.planning.types import Ranks


@dataclass(frozen=True, slots=True)
class Partial(Assignment):
    """Every worker exchanges a fraction of its share with other workers.

    Parameters
    ----------
    fraction
        Q in [0, 1]. 0 is the same as ``local``. 1 is not the same as ``global``: every sample moves to another worker.

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
    forms: ClassVar[str] = "'partial:Q' (Q in [0, 1])"

    fraction: float

    def __post_init__(self) -> None:
        as_ratio("assignment.fraction", self.fraction, Fraction(0))
        object.__setattr__(self, "fraction", float(self.fraction))

    def __str__(self) -> str:
        return f"partial:{self.fraction}"

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
        wanted = as_ratio("assignment.fraction", self.fraction, Fraction(0)) * n_samples / n_workers
        # as_ratio rounds a Q below 1e-12 to 0, but a positive Q must move something.
        at_least = 1 if self.fraction > 0 else 0
        return min(max(-(-wanted.numerator // wanted.denominator), at_least), n_samples // n_workers)

    @classmethod
    def parse(cls, parameter: str | None) -> Self:
        """See :class:`Assignment`."""
        return cls(float(parameter or ""))

    def draw(self, draw: Draw) -> tuple[Ranks, Packets | None]:
        """See :class:`Assignment`."""
        count = self.n_exchanged(len(draw.previous), draw.n_workers)
        if draw.classes is not None:
            return exchange_in_classes(draw.previous, draw.classes, draw.n_workers, count, draw.seed, draw.epoch), None
        return exchange_samples(draw.previous, draw.n_workers, count, draw.seed, draw.epoch), None

    @property
    def shuffled_fraction(self) -> float:
        """Q."""
        return self.fraction

    @property
    def redraws_all(self) -> bool:
        """Never: with Q = 1 every sample moves to another worker, which is not a uniform draw."""
        return False

    def most_incoming(self, n_samples: int, n_workers: int, largest_share: int) -> int:
        """See :class:`Assignment`."""
        return self.n_exchanged(n_samples, n_workers)

    def missing_fraction(self, cached: float, excess: float) -> float:
        """See :class:`Assignment`; samples go to workers other than their owners, who hold them by excess alone."""
        return self.fraction * (1 - excess)
