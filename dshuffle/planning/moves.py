"""Which samples come to a worker for an epoch, and which leave it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from dshuffle.planning.epoch_plan import STORE
from dshuffle.planning.types import Ranks, Samples


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Which samples come to a worker for an epoch, and which leave it.

    Parameters
    ----------
    own
        Ascending int64, the samples that the worker trains on.
    arriving, senders
        The samples that it lacks, ascending, and the worker that has each of them.
    leaving, receivers
        The samples that it gives up, ascending, and the worker that each of them goes to.
    """

    own: Samples
    arriving: Samples
    senders: Ranks
    leaving: Samples
    receivers: Ranks

    @classmethod
    def none(cls, own: Samples) -> Moves:
        """Nothing comes or goes."""
        return cls(own, own[:0], np.empty(0, np.int32), own[:0], np.empty(0, np.int32))

    @classmethod
    def loading(cls, own: Samples) -> Moves:
        """Everything comes from the store."""
        return dataclasses.replace(cls.none(own), arriving=own, senders=np.full(len(own), STORE, np.int32))

    @classmethod
    def between(cls, before: Ranks, after: Ranks, rank: int) -> Moves:
        """The moves of a worker between two assignments of all samples, ``(q,)`` int32 each."""
        own, held = np.flatnonzero(after == rank), np.flatnonzero(before == rank)
        return cls.of(rank, own, before[own], held, after[held])

    @classmethod
    def of(cls, rank: int, own: Samples, before: Ranks, held: Samples, after: Ranks) -> Moves:
        """The moves of a worker that has ``held`` and trains on ``own`` next.

        ``before`` says which worker has each of its next samples, and ``after`` who gets each of those that it has.
        """
        missing, leaving = before != rank, after != rank
        return cls(own, own[missing], before[missing], held[leaving], after[leaving])
