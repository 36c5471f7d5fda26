"""What deliveries plan from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dshuffle.planning.packets import Packets, missing_samples
from dshuffle.planning.share_sizes import Weights
from dshuffle.planning.types import Holders, Ranks, Samples


@dataclass(frozen=True, slots=True, eq=False)
class PlanInput:
    """Where samples are, where they must go, and what else a plan may depend on.

    :func:`~dshuffle.planning.delivery.plan_delivery` checks all of it. Deliveries use the parts that they need.

    Parameters
    ----------
    holders
        ``(q, words)`` uint64 masks of the workers that hold each sample.
    destinations
        ``(q,)`` int32, the worker that will train on each sample.
    n_workers
        Number of workers.
    seed
        Seed for breaking ties.
    start
        Good packets that are known beforehand.
    hosts
        Host of each worker, numbered; empty if every worker has its own.
    weights
        Relative share of each worker; empty if shares are equal.
    """

    holders: Holders
    destinations: Ranks
    n_workers: int
    seed: int
    start: Packets | None = None
    hosts: Sequence[int] = ()
    weights: Weights = ()

    def missing_samples(self) -> Samples:
        """The samples whose workers do not hold them, ascending."""
        return missing_samples(self.holders, self.destinations)
