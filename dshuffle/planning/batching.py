"""Batches of a worker's samples, of which every worker has the same number, and positions in what iterators give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning.types import Samples

T = TypeVar("T")

DROP, PAD, UNEVEN = "drop", "pad", "uneven"
MODES = (DROP, PAD, UNEVEN)


@dataclass(frozen=True, slots=True)
class Batching:
    """The batches of one worker in an epoch; every worker has the same number."""

    # Equal shares differ in size by one sample, or with ``chunks`` by up to one chunk. Synchronous training hangs if
    # one worker has an extra batch. With unequal shares only ``"uneven"`` has batches of all samples, in proportion to
    # the shares. There are fewer and larger batches if the smallest share has too few samples, because measured shares
    # change while a model is trained.

    n_own: int  # Number of samples of this worker.
    # smallest, largest: Numbers of samples of the smallest and the largest share; the same on every worker.
    smallest: int
    largest: int
    # Number of samples per batch, at most ``smallest``. With unequal shares, the largest number in a batch of the
    # largest share, unless the smallest share would have fewer than ``least`` in a batch; and at most ``largest``.
    batch_size: int
    # ``"drop"``: ``smallest // batch_size`` full batches; the remaining samples are skipped. ``"pad"``: ``ceil(largest
    # / batch_size)`` full batches; the last ones are filled up with the first samples, which are trained on twice.
    # ``"uneven"``: ``ceil(largest / batch_size)`` batches that contain every sample once. Their sizes are at most
    # ``batch_size`` and differ by at most one.
    mode: str
    # Whether shares are or may become unequal on purpose (:class:`~dshuffle.planning.Choices`, ``shares``).
    unequal: bool = False
    least: int = 1  # With unequal shares, the smallest number of samples in a batch.
    # Whether it is the rest of an epoch, whose shares are as they are. Then no batch size is too large, ``"drop"`` may
    # have no batches, and ``"uneven"`` has fewer and larger ones if the smallest share has too few samples.
    rest: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidParameter.of("mode", self.mode, f"one of {list(MODES)}")
        size = as_integer("batch_size", self.batch_size, 1)
        if self.unequal and self.mode != UNEVEN:
            now = f"{self.smallest} to {self.largest} samples now"
            hint = f"Batches are in proportion to shares. These have {now}, and measured shares change."
            raise InvalidParameter.of("mode", self.mode, f"{UNEVEN!r} with unequal shares", hint)
        if self.rest:
            if self.smallest == 0 < self.largest and self.mode != DROP:
                reason = f"few samples of the epoch are left: {self.largest} for one rank, and none for another"
                hint = "Finish it with fewer ranks. A job of one rank can always do it, and the next one may have more."
                raise InvalidParameter.because("world_size", reason, f"{hint} mode='drop' leaves these samples out.")
            return
        most, which = (self.largest, "largest") if self.unequal else (self.smallest, "smallest")
        if size > most:
            hint = f"A batch cannot be larger than the {which} share. Use smaller batches or fewer workers."
            raise InvalidParameter.of("batch_size", size, f"in [1, {most}]", hint)
        if self.unequal and self.smallest < self.least:
            reason = f"the smallest share has {self.smallest} samples, and a batch needs {self.least}"
            raise InvalidParameter.because("shares", reason, "Use more equal shares or fewer workers.")
        if self.mode == UNEVEN and len(self) > self.smallest:
            allowed = f"at least {-(-self.largest // self.smallest)} with mode='uneven'"
            hint = f"Workers have {self.smallest} to {self.largest} samples, and no batch may be empty."
            raise InvalidParameter.of("batch_size", size, allowed, hint)

    def __len__(self) -> int:
        if self.mode == DROP:
            return self.smallest // self.batch_size
        n_batches = -(-self.largest // self.batch_size)
        if self.mode == UNEVEN and (self.unequal or self.rest):
            return min(n_batches, self.smallest // self.least)
        return n_batches

    def positions(self, batch: int) -> Samples:
        """``(size,)`` int64 positions of a batch's samples within the worker's order."""
        if self.mode == UNEVEN:
            return np.arange(self.n_own * batch // len(self), self.n_own * (batch + 1) // len(self))
        return np.arange(batch * self.batch_size, (batch + 1) * self.batch_size) % self.n_own

    def n_samples(self, n_batches: int) -> int:
        """Number of samples in the first batches, from the first one in training order."""
        if self.mode == UNEVEN:
            return self.n_own * n_batches // len(self)
        return min(n_batches * self.batch_size, self.n_own)


@dataclass(slots=True)
class Position:
    """How many items of an epoch were given. If it was ``resumed``, the next iteration leaves these out."""

    given: int = 0
    resumed: bool = False


class Positioned(Generic[T]):
    """Something that gives the items of an epoch, and goes on from a state. Subclasses say what the items are."""

    epoch: int
    _position: Position
    """Each iteration has one of its own, so that an earlier one that is still open changes nothing."""
    _set_to: int | None = None
    """The epoch that the loop has set since the last iteration began."""
    _n_items: int

    def _items(self) -> Callable[[int], T]:
        """Return what returns an item by its number."""
        raise NotImplementedError

    def _go_to(self, epoch: int) -> None:
        """Prepare the items of an epoch, or refuse it."""
        raise NotImplementedError

    def _identity(self) -> dict[str, Any]:
        """What a state must have in common with what loads it."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[T]:
        return Iteration(self)

    @property
    def _first(self) -> int:
        """Number of items that the next iteration leaves out, because they were given before."""
        return self._position.given if self._position.resumed else 0

    def _begin(self) -> Iterator[T]:
        """Begin an iteration."""
        items, position = self._items(), Position(self._first)
        self._position, self._set_to = position, None
        for index in range(position.given, self._n_items):
            item = items(index)
            position.given = index + 1
            yield item

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, forward or back.

        A position in this epoch from :meth:`load_state_dict` stays, until an iteration has begun there.

        Raises
        ------
        InvalidParameter
            If the epoch does not exist.
        """
        keeps = self._position.resumed and self.epoch == epoch
        self._go_to(as_integer("epoch", epoch))
        self._set_to = epoch
        if not keeps:
            self._position = Position()

    def state_dict(self) -> dict[str, Any]:
        """The position for :meth:`load_state_dict`: the epoch, and how many of its items the last iteration has given.

        ``"yielded"`` equals ``"of"`` at the end of an epoch. A ``DataLoader`` with workers asks for ids ahead of
        training: set ``"yielded"`` to the number of ids that were trained on.
        """
        return {**self._identity(), "epoch": self.epoch, "yielded": self._position.given, "of": self._n_items}

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
        self._position = Position(given, resumed=True)

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
        if self._given is None:
            if self._is_loaded and self._owner._first == self._owner._n_items:
                raise StopIteration
            self._given = self._owner._begin()
        return next(self._given)

    def state_dict(self) -> dict[str, int]:
        """Nothing is needed beside the state of what this iterates over."""
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Note that the position was loaded for this iteration."""
        self._is_loaded = True
        if self._owner._set_to not in (None, self._owner.epoch):
            self._owner.set_epoch(self._owner._set_to)
