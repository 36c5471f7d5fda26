"""The position of an iterator: an epoch, and how many of its items were given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Place:
    epoch: int
    n_given: int = 0
    resumed: bool = False
    """Whether the next iteration begins here. Otherwise it begins at the start of the epoch."""


class Position:
    """Where an iterator is. It counts items, and begins iterations.

    Each iteration has a place of its own, so that an earlier iteration that is still open changes nothing.

    Parameters
    ----------
    epoch
        The epoch, at whose start the position is.

    Examples
    --------
    >>> position = Position(epoch=2)
    >>> position.resume(3, n_given=2)
    >>> position.set_epoch(3)  # the loop of a script sets the epoch that it resumes
    >>> list(position.iterate(4, "abcd".__getitem__))
    ['c', 'd']
    >>> position.epoch, position.n_given
    (3, 4)
    >>> list(position.iterate(4, "abcd".__getitem__))
    ['a', 'b', 'c', 'd']
    """

    def __init__(self, epoch: int) -> None:
        self._place = _Place(epoch)

    @property
    def epoch(self) -> int:
        """The epoch."""
        return self._place.epoch

    @property
    def n_given(self) -> int:
        """Number of items that were given; all of them at the end of the epoch."""
        return self._place.n_given

    @property
    def first(self) -> int:
        """Number of items that the next iteration leaves out, because they were given before."""
        return self._place.n_given if self._place.resumed else 0

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. A position in this epoch that was resumed, and not used yet, stays."""
        if not (self._place.resumed and self._place.epoch == epoch):
            self._place = _Place(epoch)

    def resume(self, epoch: int, n_given: int) -> None:
        """Go to a position. The next iteration begins there; it gives nothing if it is the end of the epoch."""
        self._place = _Place(epoch, n_given, resumed=True)

    def iterate(self, n_items: int, item: Callable[[int], T]) -> Iterator[T]:
        """Give the items of the epoch, from the position on if it was resumed, otherwise from the first one."""
        first = self.first
        place = self._place = _Place(self._place.epoch, first)
        for index in range(first, n_items):
            value = item(index)
            place.n_given = index + 1
            yield value
