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

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.planning.delivery.definition import Demand, Loads, loads_of_hops, messages_of_rows
from dshuffle.planning.delivery.peer import PEER, RowsFromPeers, plan_peer
from dshuffle.planning.epoch_plan import Packets

Numbers = NDArray[np.int64]

LUMPS = 2.5
"""Rows that a worker forwards at most, relative to the mean, if whole chunks move: counted in plans of few chunks."""


@dataclass(frozen=True, slots=True)
class WorkerGrid:
    """A grid of workers.

    Parameters
    ----------
    n_workers
        Number of workers, at least 1.
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


class Grid(RowsFromPeers):
    """The least loaded holder of a sample sends it, through a forwarder."""

    name = "grid"
    plan = staticmethod(plan_peer)
    transport: ClassVar[str] = "bundles"
    proposed_from: ClassVar[int] = 9
    """From here on there are half the messages of ``peer``."""
    simpler: ClassVar[str | None] = PEER.name
    """Two hops take memory for another share, and only short messages gain by them."""
    demands: ClassVar[int] = 1

    def connections(self, n_workers: int) -> int:
        """Those in its row and its column of the grid. A short last row uses forwarders of other rows."""
        return min(n_workers - 1, 3 * (WorkerGrid(n_workers).n_columns - 1))

    def passed_on(self, n_workers: int, *, relay: str, in_chunks: bool, most_incoming: int) -> int:
        """How many rows a worker forwards is up to chance."""
        uneven = LUMPS if in_chunks else 1.1
        return math.ceil(uneven * WorkerGrid(n_workers).most_forwarded * most_incoming)

    def counted_loads(self, demand: Demand, plan: Packets) -> Loads:
        """Count both hops."""
        through = WorkerGrid(demand.n_workers).forwarders(plan.senders, plan.destinations)
        starts, ends = np.concatenate([plan.senders, through]), np.concatenate([through, plan.destinations])
        moves = starts != ends
        links = loads_of_hops(demand, starts[moves], ends[moves], demand.wire_nbytes * demand.growth)
        return dataclasses.replace(demand.no_loads(packets=plan.n_packets * demand.growth), **links)

    def hops(self, n_workers: int) -> float:
        """Two, unless the forwarder is the sender or the destination: one of each row, or of each column."""
        return 2 - 2 / WorkerGrid(n_workers).n_columns

    def pair_count(self, n_workers: int, relay: str) -> int:
        """Workers send to the forwarders in their grid row, and to the members of their column."""
        return WorkerGrid(n_workers).n_messages

    def message_count(self, loads: Loads, row_nbytes: int, relay: str, rate: float) -> float:
        """Each pair has messages that suit the rate."""
        return messages_of_rows(loads, row_nbytes, self.pair_count(len(loads.worker_in), relay), rate)


GRID = Grid()
