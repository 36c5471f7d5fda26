"""The position of an iterator: an epoch, and how many of its items were given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter

T = TypeVar("T")


class Position:
    """An epoch, and how many of its items were given. If it was ``resumed``, the next iteration begins there, otherwise
    at the start of the epoch.

    Each iteration has a position of its own, so that an earlier one that is still open changes nothing.
    """

    def __init__(self, epoch: int, given: int = 0, *, resumed: bool = False) -> None:
        self.epoch, self.given, self.resumed = epoch, given, resumed

    @property
    def first(self) -> int:
        """Number of items that the next iteration leaves out, because they were given before."""
        return self.given if self.resumed else 0

    def iterate(self, n_items: int, item: Callable[[int], T]) -> Iterator[T]:
        """Give the items that are left."""
        for index in range(self.given, n_items):
            value = item(index)
            self.given = index + 1
            yield value


class Positioned(Generic[T]):
    """Something that gives the items of an epoch, and goes on from a state. Subclasses say what the items are."""

    _position: Position
    _set_to: int | None = None
    """The epoch that the loop has set since the last iteration began."""

    _go_to: Callable[[int], None]
    """Prepare the items of an epoch, or refuse it."""

    _identity: Callable[[], dict[str, Any]]
    """What a state must have in common with what loads it."""

    @property
    def _n_items(self) -> int:
        raise NotImplementedError

    def _items(self) -> Callable[[int], T]:
        """Return what returns an item by its number."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[T]:
        return Iteration(self)

    def _begin(self) -> Iterator[T]:
        """Begin an iteration."""
        items, before = self._items(), self._position
        self._position, self._set_to = Position(before.epoch, before.first), None
        return self._position.iterate(self._n_items, items)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, forward or back.

        A position in this epoch from :meth:`load_state_dict` stays, until an iteration has begun there.
        """
        self._go_to(as_integer("epoch", epoch))
        self._set_to = epoch
        if not (self._position.resumed and self._position.epoch == epoch):
            self._position = Position(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position for :meth:`load_state_dict`: the epoch, and how many of its items the last iteration has given.

        ``"yielded"`` equals ``"of"`` at the end of an epoch. A ``DataLoader`` with workers asks for ids ahead of
        training: set ``"yielded"`` to the number of ids that were trained on.
        """
        position = self._position
        return {**self._identity(), "epoch": position.epoch, "yielded": position.given, "of": self._n_items}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a state. The next iteration gives the items that are left of its epoch.

        :meth:`set_epoch` with this epoch keeps the position. Nothing is left at the end of an epoch.

        Raises
        ------
        InvalidParameter
            If the state is one of another iterator, or of a release that gives other items.
        """
        epoch, given, n_items = self._checked(state)
        self._go_to(epoch)
        if n_items != self._n_items:
            raise InvalidParameter.of("state['of']", n_items, f"{self._n_items}, the items of epoch {epoch}")
        self._position = Position(epoch, given, resumed=True)

    def _checked(self, state: Mapping[str, Any]) -> tuple[int, int, int]:
        for name, value in self._identity().items():
            if state.get(name) != value:
                hint = "The state belongs to another iterator."
                raise InvalidParameter.of(f"state[{name!r}]", state.get(name), f"{value!r}, as here", hint)
        epoch = as_integer("state['epoch']", state.get("epoch"))
        given, n_items = (as_integer(f"state[{name!r}]", state.get(name), 0) for name in ("yielded", "of"))
        if given > n_items:
            raise InvalidParameter.of("state['yielded']", given, f"at most {n_items}, the items of epoch {epoch}")
        return epoch, given, n_items


class Iteration(Iterator[T]):
    """An iteration over something with a position. It begins when its first item is asked for.

    torchdata's ``StatefulDataLoader`` loads a state when an iteration begins, so after the loop has set the epoch. It
    loads the state of what it iterates over first, and then that of a new iteration, which has these two methods so
    that it hears of it:

    * The epoch that the loop has set is the one that the loop gets.
    * If nothing is left, the ``StatefulDataLoader`` begins one more iteration for the loop. Then this one does not
      count, although loader processes may ask it for items.
    """

    def __init__(self, owner: Positioned[T]) -> None:
        self._owner, self._is_loaded = owner, False
        self._given: Iterator[T] | None = None

    def __next__(self) -> T:
        owner = self._owner
        if self._given is None:
            if self._is_loaded and owner._position.resumed and owner._position.given == owner._n_items:
                raise StopIteration
            self._given = owner._begin()
        return next(self._given)

    def state_dict(self) -> dict[str, int]:
        """Nothing is needed beside the state of what this iterates over."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Note that the position was loaded for this iteration."""
        self._is_loaded = True
        if self._owner._set_to not in (None, self._owner._position.epoch):
            self._owner.set_epoch(self._owner._set_to)
