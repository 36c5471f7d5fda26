"""Learning-rate schedules: the factor on the first step, epoch by epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter


class Schedule(Protocol):
    """Any function of the epoch."""

    def __call__(self, epoch: int) -> float:
        """The factor on the step in an epoch, from 0."""
        ...


@dataclass(frozen=True, slots=True)
class Decay:
    """The step is multiplied by a factor after every epoch; by 1 it stays as it is.

    Parameters
    ----------
    factor
        In (0, 1].

    Raises
    ------
    InvalidParameter
        The factor is outside (0, 1].

    References
    ----------
    Paper 000 (UberShuffle), section 5.1: step sizes decay by 0.9 an epoch.

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
        """``factor ** epoch``."""
        return float(self.factor**epoch)


@dataclass(frozen=True, slots=True)
class Linear:
    """The step falls on a line from all of it in the first epoch, and then stays.

    Parameters
    ----------
    last
        Fraction of the first step that is left in the end, in (0, 1].
    epochs
        In how many epochs, the first one included, it gets there.

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
        """The point of the line at an epoch."""
        return 1 - (1 - self.last) * min(1.0, epoch / (self.epochs - 1))


CONSTANT = Decay(1.0)
"""The step of the first epoch in all of them."""
