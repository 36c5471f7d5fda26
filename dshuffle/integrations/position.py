"""The position of an iterator: an epoch, and how many of its items were given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Place:
    epoch: int
    n_given: int = 0
    resumed: bool = False
    """Whether the next iteration begins here. Otherwise it begins at the start of the epoch."""
    at_end: bool = False
    """Whether it was resumed at the end of the epoch."""


class Position:
    """Where an iterator is. It counts items, and begins iterations.

    Each iteration has a place of its own, so that an earlier iteration that is still open changes nothing.

    Parameters
    ----------
    epoch
        The epoch, at whose start the position is.
    """

    def __init__(self, epoch: int) -> None:
        self._place = _Place(epoch)
        self._set_epoch: int | None = None  # by the loop, since the last iteration has begun

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

    @property
    def set_to(self) -> int | None:
        """The epoch that the loop has set since the last iteration began, if it differs from that of the position."""
        return None if self._set_epoch == self._place.epoch else self._set_epoch

    @property
    def is_resumed_at_end(self) -> bool:
        """Whether the next iteration gives nothing, because the state was that of the end of the epoch."""
        return self._place.at_end

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, for the loop. A position in this epoch that was resumed, and not used, stays."""
        self._set_epoch = epoch
        if not (self._place.resumed and self._place.epoch == epoch):
            self._place = _Place(epoch)

    def resume(self, epoch: int, n_given: int, *, at_end: bool = False) -> None:
        """Go to a position. The next iteration begins there; it gives nothing if it is the end of the epoch."""
        self._place = _Place(epoch, n_given, resumed=True, at_end=at_end)

    def iterate(self, n_items: int, item: Callable[[int], T]) -> Iterator[T]:
        """Give the items of the epoch, from the position on if it was resumed, otherwise from the first one."""
        first = self.first
        place = self._place = _Place(self._place.epoch, first)
        self._set_epoch = None
        for index in range(first, n_items):
            value = item(index)
            place.n_given = index + 1
            yield value


class Iteration(Iterator[T]):
    """An iteration over something with a position. It begins when its first item is asked for.

    torchdata's ``StatefulDataLoader`` loads a state when an iteration begins, so after the loop has set the epoch. It
    loads the state of what it iterates over first, and then that of a new iteration, which has these two methods so
    that it hears of it:

    * The epoch that the loop has set is the one that the loop gets.
    * If nothing is left, the ``StatefulDataLoader`` begins one more iteration for the loop. Then this one does not
      count, although loader processes may ask it for items.

    Parameters
    ----------
    items
        Returns the items. Called when the iteration begins.
    set_epoch
        Goes to the start of an epoch.
    """

    def __init__(self, position: Position, items: Callable[[], Iterator[T]], set_epoch: Callable[[int], None]) -> None:
        self._position, self._items, self._set_epoch = position, items, set_epoch
        self._given: Iterator[T] | None = None
        self._is_loaded = False

    def __next__(self) -> T:
        if self._given is None:
            if self._is_loaded and self._position.is_resumed_at_end:
                raise StopIteration
            self._given = self._items()
        return next(self._given)

    def state_dict(self) -> dict[str, int]:
        """Nothing is needed beside the state of what this iterates over."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Note that the position was loaded for this iteration."""
        self._is_loaded = True
        if self._position.set_to is not None:
            self._set_epoch(self._position.set_to)
