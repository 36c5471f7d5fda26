"""What a delivery is to the rest of dshuffle: how it plans, and what it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dshuffle.planning.delivery.relay import RELAYS
from dshuffle.planning.epoch_plan import Packets, missing_samples
from dshuffle.planning.exchange_epochs import Weights
from dshuffle.planning.types import Holders, Ranks, Samples


@dataclass(frozen=True, slots=True, eq=False)
class PlanInput:
    """Where samples are, where they must go, and what else a plan may depend on; all of it is checked."""

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


@dataclass(frozen=True, slots=True)
class Delivery:
    """A way to deliver the samples that workers do not hold; those that exist are in ``DELIVERIES``."""

    name: str
    # Plans its packets for a :class:`PlanInput`, and options. They must pass
    # :func:`~dshuffle.planning.epoch_plan.check_plan` and depend on the arguments alone.
    plan: Callable[..., Packets]
    coded: bool = False  # Whether packets combine several samples. They come from a server that holds all rows.
    needs_server: bool = False  # Whether one worker must be able to send every sample.
    reads_store: bool = False  # Whether workers read the samples from the dataset again.
    refuses_excess: bool = False  # Whether it is made for caches without samples beyond the share.
    most_workers: int | None = None  # Largest number of workers that it supports; None for any.
    # Whether a worker can plan its own part, where the assignment allows it: the worker that had a sample sends it.
    plans_own_parts: bool = False

    @property
    def demands(self) -> int:
        """What a session must set aside for it: 0 for nothing, 1 for a server, 2 for a server with all rows."""
        return self.needs_server + self.coded

    @property
    def without_server(self) -> str:
        """The delivery that takes its place in a session whose server was lost."""
        return "peer" if self.needs_server else self.name

    @property
    def last_resort(self) -> str:
        """The delivery that takes its place in the last attempt at an epoch."""
        # A packet that cannot be decoded spoils the rows that depend on it.
        return "storage" if self.coded else self.name

    def supports(self, n_workers: int, *, excess: bool) -> bool:
        """Whether it can serve this many workers, with or without excess in their caches."""
        few = self.most_workers is None or n_workers <= self.most_workers
        return few and not (excess and self.refuses_excess)

    def gains_by(self, *, needs_holders: bool, in_chunks: bool, excess: bool) -> bool:
        """Whether it is a way of its own with an assignment; otherwise another assignment does the same."""
        # Chunks leave nothing to combine. Without excess, an assignment cannot be drawn for packets.
        return not in_chunks and (excess or not needs_holders) if self.coded else not needs_holders

    def packets_passed_on(self, relay: str, most_incoming: int) -> int:
        """Maximum number of packets that a worker keeps for others: it only relays what it decodes a sample from."""
        return most_incoming if self.coded and relay != "unicast" else 0

    @property
    def relays(self) -> tuple[str, ...]:
        """Relays that make a difference to it; a single one if none does."""
        return tuple(RELAYS) if self.coded else ("pipelined",)

    def label(self, relay: str) -> str:
        """Its name, for tables, with the relay if that makes a difference."""
        return f"{self.name}, {relay}" if self.coded else self.name

    @property
    def family(self) -> str:
        """Name of its family: deliveries of one family are alternatives, and the fastest stands for all of them."""
        return "any coded delivery" if self.coded else self.name
