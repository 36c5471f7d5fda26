"""The batches of one rank in one epoch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.integrations.position import Position
from dshuffle.launched.rank import Rank
from dshuffle.planning.batching import DROP, UNEVEN, Batching
from dshuffle.runtime import Partition

logger = logging.getLogger(__name__)

Arrays: TypeAlias = tuple[NDArray[Any], ...]

Convert: TypeAlias = Callable[[Callable[[int], Arrays], int], Callable[[int], Any]]
"""Takes a function that returns the arrays of a batch by its number, and the number of batches. Returns a function that
returns what the loop gets, by the number of the batch.
"""


def batching_of(partition: Partition, batch_size: int, mode: str, *, is_rest: bool) -> Batching | None:
    """Split a partition into batches, equally many on all ranks; None if there are none in the rest of an epoch."""
    n_own, (smallest, largest), unequal = len(partition), partition.shares, partition.unequal
    if not is_rest or (batch_size <= smallest and (mode != UNEVEN or -(-largest // batch_size) <= smallest)):
        return Batching(n_own, smallest, largest, batch_size, mode, unequal)
    if mode == DROP or largest == 0:
        return None
    if smallest == 0:
        reason = f"few samples of epoch {partition.epoch} are left: {largest} for one rank, and none for another"
        hint = "Finish this epoch with fewer ranks. A job of one rank can always do it, and the next one may have more."
        raise InvalidParameter.because("world_size", reason, f"{hint} mode='drop' leaves these samples out.")
    if mode != UNEVEN:
        return Batching(n_own, batch_size, max(batch_size, largest), batch_size, mode)  # filled up
    n_batches = min(-(-largest // batch_size), smallest)
    size = -(-largest // n_batches)
    if size > batch_size and partition.rank == 0:
        logger.warning(
            "dshuffle: batches of the rest of epoch %d have up to %d samples, although batch_size=%d: one rank has "
            "%d samples left and another %d, and no batch may be empty. A job with fewer ranks makes smaller ones",
            *(partition.epoch, size, batch_size, largest, smallest),
        )
    return Batching(n_own, largest, largest, size, mode)


def other_process() -> InvalidParameter:
    """The error of a process that is not the rank, such as a loader process of PyTorch."""
    hint = "The rows are in the memory of the rank's own process: a DataLoader around them needs num_workers=0."
    return InvalidParameter.because("num_workers", "the loader of dshuffle.spmd belongs to another process", hint)


class EpochBatches:
    """The batches of this rank in one epoch. Iterate over it, once in each epoch.

    It is valid until the loop asks for the next epoch. All ranks have the same number of batches, which is its length.

    Attributes
    ----------
    number
        Number of the epoch, from 0.
    partition
        The :class:`~dshuffle.Partition` of this rank, for everything that batches do not do.
    """

    def __init__(
        self,
        partition: Partition,
        batching: Batching | None,
        names: Sequence[str],
        rank: Rank,
        convert: Convert | None,
    ) -> None:
        self.number = partition.epoch
        self.partition = partition
        self._batching, self._names, self._rank, self._convert = batching, tuple(names), rank, convert
        self._position = Position(partition.epoch)
        self._marked: int | None = None
        self._pid = os.getpid()

    def __len__(self) -> int:
        return 0 if self._batching is None else len(self._batching)

    def __repr__(self) -> str:
        return f"<EpochBatches epoch={self.number} rank={self.partition.rank} batches={len(self)}>"

    def __iter__(self) -> Iterator[Any]:
        batch = self._arrays if self._convert is None else self._convert(self._arrays, len(self))
        self._position = Position(self.number)
        yield from self._position.iterate(len(self), batch)

    @property
    def n_given(self) -> int:
        """Number of batches that the loop was given."""
        return self._position.given

    @property
    def n_trained(self) -> int:
        """Number of batches that count as trained on: those that the loop was given, or has marked."""
        return self.n_given if self._marked is None else self._marked

    @property
    def is_complete(self) -> bool:
        """Whether all batches count as trained on."""
        return self.n_trained == len(self)

    def mark_trained(self, n_batches: int) -> None:
        """Say how many batches of this epoch the loop has trained on, if something asks for batches ahead of it.

        A batch counts as trained on when the loop was given it. After the first call of this method, only this number
        counts: for :meth:`SpmdLoader.save` and :meth:`SpmdLoader.state_dict`, and when the loop ends in the middle of
        the epoch. Call it with 0 before the first batch is asked for, and on all ranks.

        Raises
        ------
        InvalidParameter
            If it is not in [0, number of batches that were given].
        """
        if as_integer("n_batches", n_batches, 0) > self.n_given:
            raise InvalidParameter.of("n_batches", n_batches, f"at most {self.n_given}, the batches that were given")
        self._marked = n_batches
        self._rank.check_batch(self.number, n_batches)

    def mark(self, n_batches: int) -> None:
        """Note for the session that the first batches were trained on."""
        n_samples = len(self.partition)  # what was dropped is not trained on in this epoch
        if self._batching is not None and n_batches < len(self):
            n_samples = self._batching.n_samples(n_batches)
        self.partition.mark_trained(n_samples)

    def __reduce__(self) -> Any:
        raise other_process()

    def _arrays(self, number: int) -> Arrays:
        if os.getpid() != self._pid:
            raise other_process()
        assert self._batching is not None
        self._rank.check_batch(self.number, number + 1 if self._marked is None else 0)
        return tuple(self.partition.take(self._batching.positions(number), self._names).values())
