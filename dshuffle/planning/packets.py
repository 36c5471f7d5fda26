"""The plan of one epoch's exchange: the packets, their senders, and what each worker gets from each packet.

A packet is the XOR of the rows of its components. A component is a (sample, destination) pair. The destination
decodes the sample from the packet by XORing away the rows of all other components. It must hold these rows, or have
decoded them from other packets of the plan. An uncoded packet has one component, so it is the row itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dshuffle.errors import PlanError
from dshuffle.kernels import kernel
from dshuffle.planning.grouping import holds
from dshuffle.planning.types import Holders, Ranks, Samples

SERVER = -1
"""Sender of the packets that the server sends."""
STORE = -2
"""Sender of the rows that their destination reads from the store."""
FORWARDER = -3
"""The worker of rank r is participant ``FORWARDER - r`` where it forwards rows between others."""


def name_of(participant: int) -> str:
    """Return the name of a participant of an exchange for messages to users.

    Examples
    --------
    >>> name_of(3), name_of(SERVER), name_of(forwarder_of(3))
    ('rank 3', 'the server', 'the forwarder on rank 3')
    """
    if participant <= FORWARDER:
        return f"the forwarder on rank {forwarder_of(participant)}"
    return {SERVER: "the server", STORE: "the store"}.get(participant, f"rank {participant}")


def forwarder_of(rank: int) -> int:
    """Return the number of a rank's forwarder. Given that number, return the rank."""
    return FORWARDER - rank


@dataclass(frozen=True, slots=True, eq=False)
class Packets:
    """All packets of one epoch, in sending order.

    Parameters
    ----------
    offsets
        ``(P + 1,)`` int64. Packet p has the components ``offsets[p]`` to ``offsets[p + 1] - 1``, at least one.
    samples
        ``(E,)`` int64, the sample of each component.
    destinations
        ``(E,)`` int32, the worker that decodes the sample of each component.
    senders
        ``(P,)`` int32, the sender of each packet: a rank, :data:`SERVER` or :data:`STORE`.

    Raises
    ------
    PlanError
        If an array has a wrong dtype or shape, or the arrays do not match.

    Examples
    --------
    >>> plan = Packets.uncoded(np.array([4, 2]), np.array([0, 1]), np.array([1, SERVER]))
    >>> plan.n_packets, plan.n_components, plan.offsets
    (2, 2, array([0, 1, 2]))
    """

    offsets: Samples
    samples: Samples
    destinations: Ranks
    senders: Ranks

    def __post_init__(self) -> None:
        for name, dtype in (
            ("offsets", np.int64),
            ("samples", np.int64),
            ("destinations", np.int32),
            ("senders", np.int32),
        ):
            values = getattr(self, name)
            if not isinstance(values, np.ndarray) or values.dtype != dtype or values.ndim != 1:
                raise PlanError(f"Packets.{name} must be a one-dimensional array of {np.dtype(dtype)}")
        if len(self.destinations) != len(self.samples):
            raise PlanError(f"{len(self.samples)} samples do not match {len(self.destinations)} destinations")
        if len(self.offsets) != len(self.senders) + 1:
            raise PlanError(f"{len(self.offsets)} offsets do not match {len(self.senders)} senders; expected one more")
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.samples):
            raise PlanError(
                f"offsets run from {self.offsets[0]} to {self.offsets[-1]}, not from 0 to {len(self.samples)}"
            )
        if (short := np.flatnonzero(self.offsets[1:] <= self.offsets[:-1])).size:
            raise PlanError(f"packet {short[0]} has no components: offsets must increase")

    @classmethod
    def uncoded(cls, samples: ArrayLike, destinations: ArrayLike, senders: ArrayLike) -> Packets:
        """Build a plan with one packet per (sample, destination) pair."""
        return cls(
            offsets=np.arange(np.size(samples) + 1, dtype=np.int64),
            samples=np.asarray(samples, dtype=np.int64),
            destinations=np.asarray(destinations, dtype=np.int32),
            senders=np.asarray(senders, dtype=np.int32),
        )

    @property
    def n_packets(self) -> int:
        """Number of packets."""
        return len(self.senders)

    @property
    def n_components(self) -> int:
        """Number of components of all packets."""
        return len(self.samples)

    @property
    def coded(self) -> bool:
        """Whether any packet has more than one component."""
        return self.n_components != self.n_packets


def missing_samples(holders: Holders, destinations: Ranks) -> Samples:
    """Return the samples that their destination does not hold, ascending; ``(D,)`` int64.

    Parameters
    ----------
    holders
        ``(q, words)`` masks, see :func:`~dshuffle.planning.holders.as_holders`.
    destinations
        ``(q,)`` int32 ranks that will train on the samples.

    Examples
    --------
    >>> missing_samples(np.array([[0b01], [0b11], [0b01]], np.uint64), np.array([1, 1, 0], np.int32))
    array([0])
    """
    missing = np.empty(len(destinations), dtype=np.int64)
    return missing[: _missing(holders, destinations, missing)]


@kernel("(u8[:,::1], i4[::1], i8[::1])")
def _missing(holders, destinations, missing):  # type: ignore[no-untyped-def]
    count = 0
    for sample in range(destinations.size):
        missing[count] = sample
        count += not holds(holders, sample, destinations[sample])
    return count
