"""Learning-rate schedules: a factor on the first step for every epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter


class Schedule(Protocol):
    """Function from the epoch to a factor on the step."""

    def __call__(self, epoch: int) -> float:
        """Return the factor on the step in an epoch, counted from 0."""
        ...


@dataclass(frozen=True, slots=True)
class Decay:
    """Multiply the step by a factor after every epoch. A factor of 1 keeps it constant.

    Parameters
    ----------
    factor
        Factor in (0, 1].

    Raises
    ------
    InvalidParameter
        The factor is outside (0, 1].

    References
    ----------
    Chung et al. (2017), section 5.1, where steps decay by 0.9 an epoch; see docs/papers.md.

    Examples
    --------
    >>> [Decay(0.5)(epoch) for epoch in range(3)]
    [1.0, 0.5, 0.25]
    """

    factor: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.factor <= 1:
            raise InvalidParameter.of("factor", self.factor, "in (0, 1]")

    def __call__(self, epoch: int) -> float:
        """Return ``factor ** epoch``."""
        return float(self.factor**epoch)


@dataclass(frozen=True, slots=True)
class Linear:
    """Decrease the step linearly over the first epochs, then keep it constant.

    Parameters
    ----------
    last
        Fraction of the first step that remains at the end, in (0, 1].
    epochs
        Number of epochs until the step reaches ``last``, including the first one.

    Raises
    ------
    InvalidParameter
        A parameter is out of range.

    Examples
    --------
    >>> [Linear(0.5, epochs=3)(epoch) for epoch in range(5)]
    [1.0, 0.75, 0.5, 0.5, 0.5]
    """

    last: float
    epochs: int

    def __post_init__(self) -> None:
        if not 0 < self.last <= 1:
            raise InvalidParameter.of("last", self.last, "in (0, 1]")
        as_integer("epochs", self.epochs, 2)

    def __call__(self, epoch: int) -> float:
        """Return the factor in an epoch."""
        return 1 - (1 - self.last) * min(1.0, epoch / (self.epochs - 1))


CONSTANT = Decay(1.0)
"""Keep the step of the first epoch."""
