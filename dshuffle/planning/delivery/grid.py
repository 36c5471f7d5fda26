r"""The delivery ``grid``: every row takes two hops over a grid of workers, so messages are few and long.

The ranks fill a grid of about :math:`\sqrt n` rows and columns, row by row. For each column, a worker packs all rows
for that column into one message. It sends the message to the worker of that column in its own grid row, the
*forwarder*. The forwarder sorts the rows by destination and sends them on. So a worker has :math:`2 (\sqrt n - 1)`
messages in each direction in place of :math:`n - 1`, and rows of samples cross the network up to twice. That pays where
messages are so short that their fixed cost is most of the exchange.

References
----------
All-to-all exchanges whose messages are combined on a two-dimensional mesh are described, for instance, in Bokhari and
Berryman (1992), "Complete exchange on a circuit switched mesh". None of the papers in docs/papers.md has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.planning.delivery.definition import Delivery, Source
from dshuffle.planning.delivery.uncoded import plan_peer

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class WorkerGrid:
    """A grid of workers.

    Parameters
    ----------
    n_workers
        Number of workers, at least 1.

    Raises
    ------
    InvalidParameter
        If there are no workers.

    Examples
    --------
    >>> grid = WorkerGrid(8)  # 0 1 2 / 3 4 5 / 6 7
    >>> grid.n_columns, grid.column_of(4), grid.forwarder(3, 7)
    (3, array([1, 4, 7]), 4)
    >>> grid.senders_through(4), grid.forwarder(6, 5)
    (array([3, 4, 5]), 2)
    """

    n_workers: int

    def __post_init__(self) -> None:
        if self.n_workers < 1:
            raise InvalidParameter.of("n_workers", self.n_workers, "an integer >= 1")

    @property
    def n_columns(self) -> int:
        """Number of columns, the least integer that is not below the root of ``n_workers``."""
        return math.isqrt(self.n_workers - 1) + 1

    def column_of(self, rank: int) -> Numbers:
        """The ranks in the column of a rank, ascending."""
        return np.arange(rank % self.n_columns, self.n_workers, self.n_columns)

    def forwarder(self, sender: int, destination: int) -> int:
        """The worker that forwards rows from ``sender`` to ``destination``; it may be one of the two."""
        return int(self.forwarders(np.array([sender]), np.array([destination]))[0])

    def forwarders(self, senders: NDArray[np.integer], destinations: NDArray[np.integer]) -> Numbers:
        """The workers that forward between pairs of workers; the arrays broadcast against each other."""
        width = self.n_columns
        columns = np.asarray(destinations, np.int64) % width
        in_row = np.asarray(senders, np.int64) // width * width + columns
        # The last row may be short. Its workers then use the other rows in turn.
        in_turn = np.asarray(senders, np.int64) % width % (self.n_workers // width) * width + columns
        ranks: Numbers = np.where(in_row < self.n_workers, in_row, in_turn)
        return ranks

    def forwarders_of(self, sender: int) -> list[int]:
        """The workers that a sender sends to, one for each column in turn."""
        return [int(rank) for rank in self.forwarders(np.array(sender), np.arange(self.n_columns))]

    def forwarders_to(self, destination: int) -> list[int]:
        """The workers that a destination receives from, ascending."""
        return [int(rank) for rank in np.unique(self.forwarders(np.arange(self.n_workers), np.array(destination)))]

    def senders_through(self, forwarder: int) -> Numbers:
        """The senders whose rows a worker forwards within its column, ascending."""
        return np.flatnonzero(self.forwarders(np.arange(self.n_workers), np.array(forwarder)) == forwarder)

    @property
    def most_forwarded(self) -> float:
        """Rows through the busiest worker, relative to what a worker receives, if all send equally to all others."""
        through = np.bincount(self.first_hops().ravel(), minlength=self.n_workers)
        members = np.bincount(np.arange(self.n_workers) % self.n_columns)[np.arange(self.n_workers) % self.n_columns]
        return float((through * members - 1).max()) / max(1, self.n_workers - 1)

    def first_hops(self) -> Numbers:
        """``(n, columns)``, the worker that each worker sends the rows for each column to."""
        return self.forwarders(np.arange(self.n_workers)[:, None], np.arange(self.n_columns)[None, :])

    @property
    def n_messages(self) -> int:
        """Number of messages over the network, if none is cut: pairs of different workers in the two hops."""
        through = self.first_hops()
        used = np.zeros((self.n_workers, self.n_columns), np.bool_)
        used[through, np.arange(self.n_columns)] = True
        members = np.bincount(np.arange(self.n_workers) % self.n_columns)
        first = np.count_nonzero(through != np.arange(self.n_workers)[:, None])
        return int(first + (used * (members - 1)).sum())


GRID = Delivery("grid", plan_peer, Source.PEERS, two_hops=True, proposed_from=9)  # half the messages of `peer`
