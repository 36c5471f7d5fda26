"""Which epochs have an exchange, and in which order workers train on their samples in the epochs between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from dshuffle.planning.order import epoch_permutation
from dshuffle.planning.types import Samples


class Between(ABC):
    """The order of a worker's samples in an epoch without an exchange.

    Attributes
    ----------
    name
        What users call it.
    """

    name: ClassVar[str]

    @abstractmethod
    def permutation(self, sample_ids: Samples, *, seed: int, epoch: int, exchanged: int, rank: int) -> Samples:
        """``(k,)`` int64 positions in the ``(k,)`` samples, in training order.

        ``exchanged`` is the last epoch with an exchange. The order of any subset is that of all samples without the
        others, as in :func:`~dshuffle.planning.order.epoch_permutation`.
        """


class Redraw(Between):
    """A new random order in every epoch."""

    name = "redraw"

    def permutation(self, sample_ids: Samples, *, seed: int, epoch: int, exchanged: int, rank: int) -> Samples:
        """See :class:`Between`."""
        return epoch_permutation(sample_ids, seed=seed, epoch=epoch, rank=rank)


class Reverse(Between):
    """The order of the epoch before, backwards.

    References
    ----------
    Rajput et al. (2022), FlipFlop; see docs/papers.md. They reverse every second epoch of one worker's data. Here each
    worker reverses the order of its own samples, in as many epochs as lie between two exchanges.
    """

    name = "reverse"

    def permutation(self, sample_ids: Samples, *, seed: int, epoch: int, exchanged: int, rank: int) -> Samples:
        """See :class:`Between`."""
        order = epoch_permutation(sample_ids, seed=seed, epoch=exchanged, rank=rank)
        return order[::-1].copy() if (epoch - exchanged) % 2 else order


BETWEEN: dict[str, Between] = {between.name: between for between in (Redraw(), Reverse())}
"""Every order in epochs without an exchange, by name."""


@dataclass(frozen=True, slots=True)
class ExchangeEpochs:
    """Which epochs have an exchange, and the order of training in all epochs.

    Epoch 0 is loaded, and counts as one with an exchange.

    Parameters
    ----------
    every
        K: the epochs K, 2 K, ... have an exchange.
    between
        The order in the other epochs: a name in :data:`BETWEEN`.

    Examples
    --------
    >>> import numpy as np
    >>> epochs = ExchangeEpochs(2, "reverse")
    >>> [epochs.has_exchange(epoch) for epoch in range(5)]
    [True, False, True, False, True]
    >>> samples = np.array([10, 20, 30])
    >>> [epochs.order(samples, seed=0, epoch=epoch, rank=0).tolist() for epoch in (2, 3)]
    [[30, 10, 20], [20, 10, 30]]
    """

    every: int = 1
    between: str = Redraw.name

    def has_exchange(self, epoch: int) -> bool:
        """Whether samples may change workers for an epoch."""
        return epoch % self.every == 0

    def last(self, epoch: int) -> int:
        """The last epoch up to this one that has an exchange. Workers train on its samples."""
        return epoch - epoch % self.every

    def after(self, first: int, last: int) -> range:
        """The epochs after ``first`` and up to ``last`` that have an exchange.

        Examples
        --------
        >>> list(ExchangeEpochs(3).after(3, 9))
        [6, 9]
        """
        return range(self.last(first) + self.every, last + 1, self.every)

    def permutation(self, sample_ids: Samples, *, seed: int, epoch: int, rank: int) -> Samples:
        """``(k,)`` int64 positions in the ``(k,)`` samples of a worker, in training order.

        It depends only on the seed, the epoch, the rank and the set of samples.
        """
        if self.has_exchange(epoch):
            return epoch_permutation(sample_ids, seed=seed, epoch=epoch, rank=rank)
        chosen = BETWEEN[self.between]
        return chosen.permutation(sample_ids, seed=seed, epoch=epoch, exchanged=self.last(epoch), rank=rank)

    def order(self, sample_ids: Samples, *, seed: int, epoch: int, rank: int) -> Samples:
        """The ``(k,)`` samples of a worker in training order."""
        return sample_ids[self.permutation(sample_ids, seed=seed, epoch=epoch, rank=rank)]

    @property
    def label(self) -> str:
        """What a label of a way adds; empty if every epoch has an exchange."""
        if self.every == 1:
            return ""
        return f", every {self.every} epochs" + ("" if self.between == Redraw.name else f", {self.between}")


EVERY_EPOCH = ExchangeEpochs()
"""Every epoch has an exchange."""
