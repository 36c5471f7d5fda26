"""The interface of a transport: how the items of an exchange travel between participants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from dshuffle.exchange.bundles import ForwardedRows
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.endpoints import RowSink, RowSource
from dshuffle.exchange.messages import Flow, Items
from dshuffle.exchange.row_flows import Bring, RowHolder
from dshuffle.planning import EpochPlan, Packets, ShuffleSpec, WorkerPart
from dshuffle.rows import RowLayout

ItemsInFlows = tuple[Items, dict[int, Flow]]


class MessageLimits(Protocol):
    """Limits of the messages of a session."""

    @property
    def message_bytes(self) -> int:
        """Size of a full message."""

    @property
    def window_bytes(self) -> int:
        """Bytes that a participant has under way at most."""

    @property
    def window(self) -> int:
        """Full messages that fit into ``window_bytes``."""


class ServerHolder(RowHolder, Protocol):
    """What the server has: every row, and packets that combine them."""

    def encoded(self, plan: Packets, leaving: Items) -> RowSource:
        """Make a source whose items are these packets of a plan."""


@dataclass(frozen=True, slots=True)
class Flows:
    """What the participants of a process send and receive in an exchange, in which messages.

    Parameters
    ----------
    sends, receives
        Participant -> the items that it sends or receives, and their flows. The items are samples. In a coded plan, the
        items sent are packets and the items received are components.
    at_most, requests, answers
        Maximum number of items in a message, of messages that a participant requests at once, and of messages that it
        answers at once. (A server that sends packets answers fewer.)
    acknowledged
        Whether receivers acknowledge the messages of this process.
    bundle_requests, row_answers
        Maximum number of bundles that a forwarder requests, and of messages with their rows that it answers at once.
    """

    sends: dict[int, ItemsInFlows]
    receives: dict[int, ItemsInFlows]
    at_most: int
    requests: int
    answers: int
    acknowledged: bool = True
    bundle_requests: int = 1
    row_answers: int = 1


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """The plan of an epoch as one process needs it.

    Parameters
    ----------
    spec
        Specification of the shuffle.
    parts
        Participant of this process -> its part.
    epoch_plan
        The plan of the whole epoch; None if this worker has planned its own part alone.
    most_rows
        Largest number of samples that a worker trains on.
    layout, limits
        Layout of a row, and limits of messages.
    """

    spec: ShuffleSpec
    parts: Mapping[int, WorkerPart]
    epoch_plan: EpochPlan | None
    most_rows: int
    layout: RowLayout
    limits: MessageLimits


@dataclass(frozen=True)
class Transport(ABC):
    """How the items of one exchange travel, in one process. Those that exist are in ``transports.py``.

    Deliveries name their transports. The first epoch of a session, and what a lost worker had, is read from the store
    with the transport ``"rows"``, whatever the delivery.

    Attributes
    ----------
    name
        Name by which deliveries choose it.
    forwards
        Whether workers need a forwarder.
    encodes
        Whether packets are encoded and decoded, which is measured.
    readable
        Whether an item that does not arrive can be read from the store.
    kernels
        Modules whose kernels it calls.

    Parameters
    ----------
    plan
        The plan of the epoch.
    flows
        What this process sends and receives. None until it is known how fast the links are, if messages depend on that.
    """

    name: ClassVar[str]
    forwards: ClassVar[bool] = False
    encodes: ClassVar[bool] = False
    readable: ClassVar[bool] = True
    kernels: ClassVar[tuple[str, ...]] = ("rows", "exchange.cache_partition")

    plan: ProcessPlan
    flows: Flows | None = None

    @classmethod
    def of(cls, plan: ProcessPlan) -> Transport:
        """Make the transport of an exchange, as soon as it is planned."""
        return cls(plan)

    def for_disk(self, n_free: int) -> Transport:
        """The same exchange with rows in the order in which disks read them, if that matters.

        Parameters
        ----------
        n_free
            Number of free slots of this worker.
        """
        return self

    @abstractmethod
    def with_messages(self, rate: float | None) -> Transport:
        """The same exchange with its items cut into messages, for links of a rate (bytes per second into a worker)."""

    @property
    def messages(self) -> Flows:
        """The flows, once items have been cut into messages."""
        assert self.flows is not None
        return self.flows

    def answered_by(self, participant: int) -> int:
        """Number of messages that a participant sends at once."""
        return self.messages.answers

    def answered_to_one_by(self, participant: int) -> int | None:
        """Number of messages to one destination that a participant sends at once; None for no limit of its own."""
        return None

    def reuses_buffers(self, participant: int) -> bool:
        """Whether a participant may use the buffers of a message again, once it has been received."""
        return True

    @abstractmethod
    def source(self, rank: int, cache: CachePartition) -> RowSource:
        """Make the source of the items that a rank sends."""

    @abstractmethod
    def served(self, server: ServerHolder) -> RowSource:
        """Make the source of the items that the server sends."""

    @abstractmethod
    def sink(
        self,
        rank: int,
        cache: CachePartition,
        source: RowSource,
        bring: Bring,
    ) -> RowSink:
        """Make the sink of the items that the rank receives; ``source`` is the source that it sends from."""

    def forwarded(self, rank: int) -> ForwardedRows | None:
        """Make what the rank of this process keeps as a forwarder; None if it forwards nothing."""
        return None
