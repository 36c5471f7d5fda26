"""The interface of a delivery to the rest of dshuffle."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Self

import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.planning.delivery.relay import MESSAGE_BYTES, WINDOW_BYTES, Batches, Pacing
from dshuffle.planning.epoch_plan import SERVER, Moves, Packets, missing_samples
from dshuffle.planning.exchange_epochs import Weights
from dshuffle.planning.types import Amounts, Holders, Ranks, Samples


@dataclass(frozen=True, slots=True, eq=False)
class PlanInput:
    """Where samples are, where they must go, and what else a plan may depend on."""

    # :func:`~dshuffle.planning.delivery.plan_delivery` checks all of it. Deliveries use the parts that they need.

    holders: Holders  # ``(q, words)`` uint64 masks of the workers that hold each sample.
    destinations: Ranks  # ``(q,)`` int32, the worker that will train on each sample.
    n_workers: int
    seed: int
    start: Packets | None = None  # Good packets that are known beforehand.
    hosts: Sequence[int] = ()  # Host of each worker, numbered; empty if every worker has its own.
    weights: Weights = ()  # Relative share of each worker; empty if shares are equal.

    def missing_samples(self) -> Samples:
        """The samples whose workers do not hold them, ascending."""
        return missing_samples(self.holders, self.destinations)


CHECKSUM_NBYTES = 4
"""Size in bytes of the checksum that is sent with each row."""


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Bytes and counts of one epoch's exchange. Arrays of shape ``(n,)`` are per worker."""

    needed: float  # needed, packets: Number of samples that a worker lacks, and of packets sent to deliver them.
    packets: float
    server_out: float  # Bytes out of the server.
    encoded: float  # Bytes of rows that the server reads to encode packets.
    worker_out: Amounts  # worker_out, worker_in: ``(n,)`` bytes out of and into each worker for the exchange of rows.
    worker_in: Amounts
    decoded: Amounts  # ``(n,)`` bytes of packets and rows that each worker reads to decode its rows.
    read: Amounts  # read, requests: ``(n,)`` bytes and number of objects that each worker reads from the storage.
    requests: Amounts
    passed_on: float = 0.0  # For the ring relay, the bytes that its second stage sends over a link; otherwise 0.
    needed_nbytes: float = 0.0  # Bytes of the rows needed from the storage. ``read`` counts their whole chunks.

    @property
    def amplification(self) -> float:
        """Bytes read from the storage per byte needed; 1 if none are needed."""
        return float(self.read.sum()) / self.needed_nbytes if self.needed_nbytes else 1.0

    @classmethod
    def none(cls, n_workers: int, *, packets: float = 0.0) -> Self:
        """No bytes at all."""
        workers = np.zeros(n_workers)
        return cls(0.0, packets, 0.0, 0.0, workers, workers, workers, workers, workers)

    def rows_received(self, row_nbytes: int) -> float:
        """Number of rows that workers receive from other participants."""
        return float(self.worker_in.sum()) / (row_nbytes + CHECKSUM_NBYTES)


@dataclass(frozen=True, slots=True)
class Demand:
    """A job, and how its plan relates to it. A large job is planned with fewer samples, and with at most 64 workers."""

    n_workers: int  # Number of workers of the plan.
    # n_samples, row_nbytes, chunk_rows: Number of samples in the dataset, bytes of a sample, and samples of a chunk of
    # the store.
    n_samples: int
    row_nbytes: int
    chunk_rows: int
    relay: str  # How packets of several samples travel.
    in_chunks: bool
    n_planned: int  # Number of samples that were planned.
    growth: float  # Rows that a worker receives in the job, for each row in the plan.
    fewer: float = 1.0  # Packets for each sample in the job, divided by those in the plan.

    @property
    def wire_nbytes(self) -> int:
        """Bytes of a row on a link."""
        return self.row_nbytes + CHECKSUM_NBYTES

    def no_loads(self, *, packets: float) -> Loads:
        """Loads of an exchange of this many packets, of which no part of the cluster has any yet."""
        return Loads.none(self.n_workers, packets=packets)


def loads_of_hops(
    demand: Demand, senders: Ranks, destinations: Ranks, row: float, *, sent: float | None = None
) -> dict[str, Any]:
    """Count the loads of links in the hops of a plan."""
    # senders, destinations: ``(m,)`` ends of each hop.
    n, served = demand.n_workers, int(np.count_nonzero(senders == SERVER))
    sent = float(served) if sent is None else sent
    away = np.bincount(senders[senders >= 0], minlength=n).astype(np.float64)
    factor = (len(destinations) - sent) / away.sum() if away.any() else 0.0
    received = np.bincount(destinations, minlength=n).astype(np.float64)
    return {"server_out": sent * row, "worker_in": received * row, "worker_out": away * (factor * row)}


def loads_of_one_hop(demand: Demand, plan: Packets) -> Loads:
    """Count the loads of a plan whose packets go from their senders to their destinations."""
    links = loads_of_hops(demand, plan.senders, plan.destinations, demand.wire_nbytes * demand.growth)
    return dataclasses.replace(demand.no_loads(packets=plan.n_packets * demand.growth), **links)


def messages_of_rows(loads: Loads, row_nbytes: int, n_flows: int, rate: float) -> float:
    """Estimate the number of messages if rows go in as few as possible."""
    rows = loads.rows_received(row_nbytes)
    longest = Pacing.of(rate, message_bytes=MESSAGE_BYTES, window_bytes=WINDOW_BYTES).message_nbytes
    full = max(1, longest // row_nbytes)
    return min(rows, float(n_flows * max(1, math.ceil(round(rows / n_flows) / full))))


PartsByWorker = dict[int, Samples]
"""Participant -> samples."""

DeliveryPlanner = Callable[..., Packets]
"""``plan(plan_input, **options) -> Packets``, with a :class:`~dshuffle.planning.delivery.definition.PlanInput`.

The packets must pass :func:`~dshuffle.planning.epoch_plan.check_plan` and depend on the arguments alone.
"""


class Excess(Enum):
    """How a delivery uses samples that workers hold beyond their shares."""

    IGNORED = "ignored"
    """The number of packets is the number of samples to deliver."""
    USED = "used"
    """The more samples workers hold, the fewer packets there are."""
    REFUSED = "refused"
    """The delivery is made for caches without excess."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a cluster and its caches offer a delivery."""

    n_workers: int  # Number of workers that train.
    excess: bool  # Whether workers hold more than their shares.
    has_server: bool = True  # Whether a worker can send every sample.
    server_holds_all: bool = True  # Whether that worker has memory for all rows.
    has_storage: bool = True  # Whether samples can be read again.


class Delivery(ABC):
    """A way to deliver the samples that workers do not hold: how it plans, what it needs, and what it costs."""

    # Deliveries have no state. Those that exist are in :data:`~dshuffle.planning.DELIVERIES`. The kinds are subclasses:
    # single rows from peers, from a server or from the store (``rows.py``), and packets from a server (``packets.py``).
    # family: deliveries of one family are alternatives, and the fastest stands for all of them.

    name: ClassVar[str]
    plan: ClassVar[DeliveryPlanner]  # Function that plans its packets.
    transport: ClassVar[str] = "rows"  # Name of its transport in :data:`dshuffle.exchange.transports.TRANSPORTS`.
    coded: ClassVar[bool] = False  # Whether a packet may combine several samples.
    needs_server: ClassVar[bool] = False  # Whether one worker must be able to send every sample.
    server_holds_all: ClassVar[bool] = False  # Whether that worker must have all rows in memory.
    reads_store: ClassVar[bool] = False  # Whether workers read the samples from the dataset again.
    excess: ClassVar[Excess] = Excess.IGNORED  # How it uses samples held beyond the share.
    most_workers: ClassVar[int | None] = None  # Largest number of workers that it supports; None for any.
    # Whether a worker can plan its own part without those of others, where the assignment allows it.
    plans_own_parts: ClassVar[bool] = False
    # How much a session must set aside for it: 0 for nothing, 1 for a server, 2 for a server with all rows. A session
    # that chooses among deliveries sets aside what the most demanding one needs.
    demands: ClassVar[int] = 0
    # Whether an exchange shows how fast the links into workers are. All workers share the link of a server.
    shows_link_rates: ClassVar[bool] = True

    def __repr__(self) -> str:
        return f"<delivery {self.name!r}>"

    def own_part(self, moves: Moves, n_workers: int) -> tuple[PartsByWorker, PartsByWorker]:
        """What a worker receives and sends if it plans alone, for deliveries with ``plans_own_parts``."""
        raise NotImplementedError(f"workers do not plan their own parts of the delivery {self.name!r}")

    @property
    def without_server(self) -> str:
        """The delivery that takes its place in a session whose server was lost."""
        return self.name

    @property
    def last_resort(self) -> str:
        """The delivery that takes its place in the last attempt at an epoch."""
        return self.name

    def supports(self, n_workers: int, *, excess: bool) -> bool:
        """Whether it can serve this many workers, with or without excess in their caches."""
        if self.most_workers is not None and n_workers > self.most_workers:
            return False
        return not (excess and self.excess is Excess.REFUSED)

    def connections(self, n_workers: int) -> int:
        """Number of other workers with which one exchanges messages, at most."""
        return n_workers - 1

    def suits(self, circumstances: Circumstances) -> bool:
        """Whether it is worth considering under these circumstances."""
        return (
            self.supports(circumstances.n_workers, excess=circumstances.excess)
            and (self.excess is Excess.IGNORED or circumstances.excess is (self.excess is Excess.USED))
            and (circumstances.has_server or not self.needs_server)
            and (circumstances.server_holds_all or not self.server_holds_all)
            and (circumstances.has_storage or not self.reads_store)
        )

    def gains_by(self, *, needs_holders: bool, in_chunks: bool, excess: bool) -> bool:
        """Whether it is a way of its own with an assignment; otherwise another assignment does the same."""
        return not needs_holders

    def check_storage(self, storage: float | None) -> None:
        """Raise :class:`InvalidParameter` if it needs the rate of a storage, and none is given."""
        if self.reads_store and storage is None:
            raise InvalidParameter.of("storage", None, f"bytes a second for the delivery {self.name!r}")

    def passed_on(self, n_workers: int, *, relay: str, in_chunks: bool, most_incoming: int) -> int:
        """Maximum number of rows, or packets, that a worker keeps to pass them on to others."""
        return 0

    @abstractmethod
    def counted_loads(self, demand: Demand, plan: Packets) -> Loads:
        """Count the loads of all parts of the cluster in a plan that is not empty. They are those of the job."""

    def pair_count(self, n_workers: int, relay: str) -> int:
        """Return the number of pairs of participants of which the first sends rows to the second: all workers."""
        return n_workers * (n_workers - 1)

    @abstractmethod
    def message_count(self, loads: Loads, row_nbytes: int, relay: str, rate: float) -> float:
        """Estimate the number of messages that bring rows, on links of a rate (bytes per second)."""
        # Some rows reach workers from other participants.

    def batches(self, loads: Loads, row_nbytes: int, relay: str) -> Batches | None:
        """The batches that relays pass on, each once all of it has arrived; None without such relays."""
        return None

    @property
    def relays(self) -> tuple[str, ...]:
        """Relays that make a difference to it; a single one if none does."""
        return ("pipelined",)

    def label(self, relay: str) -> str:
        """Its name, for tables, with the relay if that makes a difference."""
        return self.name

    @property
    def family(self) -> str:
        """Name of its family."""
        return self.name
