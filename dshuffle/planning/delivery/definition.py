"""The interface of a delivery to the rest of dshuffle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from dshuffle.errors import InvalidParameter
from dshuffle.planning.packets import Packets

DeliveryPlanner = Callable[..., Packets]
"""``planner(holders, destinations, n_workers, *, seed, **options) -> Packets``.

The arrays are already checked: ``(q, words)`` uint64 holders and ``(q,)`` int32 destinations. The packets must pass
:func:`~dshuffle.planning.check_plan.check_plan` and depend on the arguments alone. A delivery with ``extends_plans``
also takes ``start``, packets that it keeps, and one that ``knows_hosts`` takes ``hosts``, the host of each worker.
"""


class Source(Enum):
    """Who sends the samples that a worker does not hold."""

    PEERS = "peers"
    SERVER = "server"
    STORE = "store"


class Excess(Enum):
    """How a delivery uses samples that workers hold beyond their shares."""

    IGNORED = "ignored"
    """The number of packets is the number of samples to deliver."""
    USED = "used"
    """The more samples workers hold, the fewer packets there are."""
    REFUSED = "refused"
    """The delivery is made for caches without excess."""


@dataclass(frozen=True, slots=True)
class PacketModel:
    """How the cost model estimates the packets of a coded delivery.

    Parameters
    ----------
    without_excess
        The formula for caches without excess: ``"tables"`` (Chung et al. (2017), Algorithm 2), ``"cycles"`` or
        ``"leftover"`` (Attia and Tandon (2016), Theorem 1).
    fit, aligned_fit
        Coefficients of the regression for caches with excess, and for ``aligned`` assignments; None if ``"tables"``
        is exact.
    at_least
        The model of a delivery that never needs more packets.
    """

    without_excess: str = "tables"
    fit: tuple[float, ...] | None = None
    aligned_fit: tuple[float, ...] | None = None
    at_least: PacketModel | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """A way to deliver the samples that workers do not hold.

    Parameters
    ----------
    name
        What users call it.
    plan
        Its planner.
    source
        Who sends.
    excess
        How it uses samples held beyond the share.
    coded
        Whether a packet may hold several samples. The server then needs all rows in memory.
    most_workers
        Largest number of workers it supports; None for any.
    extends_plans
        Whether the planner can start from packets that are already known, such as those of ``aligned``.
    knows_hosts
        Whether the planner can prefer senders on the host of the destination.
    packet_model
        For the cost model, if it is coded.
    two_hops
        Whether workers send rows through other workers, see :mod:`dshuffle.planning.delivery.grid`.
    proposed_from
        Number of workers from which comparisons and ``auto`` consider it. It works with fewer workers, too.

    Raises
    ------
    InvalidParameter
        If a coded delivery has no packet model or does not come from the server.
    """

    name: str
    plan: DeliveryPlanner
    source: Source
    excess: Excess = Excess.IGNORED
    coded: bool = False
    most_workers: int | None = None
    extends_plans: bool = False
    knows_hosts: bool = False
    packet_model: PacketModel | None = None
    two_hops: bool = False
    proposed_from: int = 1

    def __post_init__(self) -> None:
        if self.coded and self.source is not Source.SERVER:
            raise InvalidParameter.of("source", self.source, "Source.SERVER for a coded delivery")
        if self.coded != (self.packet_model is not None):
            raise InvalidParameter.of(
                "packet_model", self.packet_model, "given for coded deliveries, and only for them"
            )

    @property
    def needs_server(self) -> bool:
        """Whether one worker must be able to send every sample."""
        return self.source is Source.SERVER

    @property
    def reads_store(self) -> bool:
        """Whether workers read the samples from the dataset again."""
        return self.source is Source.STORE

    def supports(self, n_workers: int, *, excess: bool) -> bool:
        """Whether it can serve this many workers, with or without excess in their caches."""
        if self.most_workers is not None and n_workers > self.most_workers:
            return False
        return not (excess and self.excess is Excess.REFUSED)
