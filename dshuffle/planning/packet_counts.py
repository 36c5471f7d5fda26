"""How many packets each delivery needs for one shuffle, beside what the papers prove; no cluster needed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from dshuffle.checks import as_integer
from dshuffle.planning.assignment import Assignment, draw_assignment
from dshuffle.planning.bounds import MOST_WORKERS, average_lower_bound, coded_rate, lower_bound
from dshuffle.planning.delivery import check_delivery, plan_delivery
from dshuffle.planning.plan import missing_samples
from dshuffle.planning.planner import ShufflePlanSpec


@dataclass(frozen=True, slots=True)
class DeliveryFigures:
    """What one delivery makes of a shuffle.

    Parameters
    ----------
    name
        The delivery.
    packets
        Packets of its plan.
    needed
        Samples that some worker has to get: the packets of an uncoded delivery.
    lower_bound
        Fewest packets that any code needs for this very shuffle; None beyond 20 workers.
    average_bound
        A weaker bound for any number of workers: the mean over the orders of the workers.
    theorem2
        Paper 000, Theorem 2, for caches with a uniformly random excess: the packets of ``coded`` in the limit of many
        samples, and on average no code's fewer.
    assignment_seconds, plan_seconds
        CPU seconds that the draw of the assignment and the plan took, compiled and on one core.
    """

    name: str
    packets: int
    needed: int
    lower_bound: int | None
    average_bound: float
    theorem2: float
    assignment_seconds: float
    plan_seconds: float

    @property
    def gain(self) -> float:
        """How many samples a packet delivers on average."""
        return self.needed / self.packets if self.packets else 1.0


def survey(
    n_samples: int,
    n_workers: int,
    *,
    cache_fraction: float | None,
    assignment: Assignment,
    deliveries: Sequence[str],
    caching: str = "uniform",
    epochs: int = 1,
    seed: int = 0,
    bounds: bool = True,
) -> tuple[DeliveryFigures, ...]:
    """Plan the last of some epochs by several deliveries, on the same caches and the same assignment.

    Parameters
    ----------
    n_samples, n_workers, cache_fraction, assignment, caching, seed
        As of :class:`~dshuffle.planning.ShufflePlanSpec`.
    deliveries
        Names of deliveries.
    epochs
        Shuffles; the figures are those of the last. With one, caches are fresh as in the papers' simulations.
    bounds
        Whether to compute the lower bound, which takes a second at 20 workers.

    Raises
    ------
    InvalidParameter
        Naming the parameter, its value and what is allowed.

    Examples
    --------
    >>> from dshuffle.planning import Global
    >>> for figures in survey(9000, 3, cache_fraction=0.5, assignment=Global(), deliveries=["server", "clique"]):
    ...     print(figures.name, figures.packets < 2400)
    server False
    clique True
    """
    epochs = as_integer("epochs", epochs, 1)
    spec = ShufflePlanSpec(
        n_samples, n_workers, seed, assignment, "server", "random", caching=caching, cache_fraction=cache_fraction
    )
    for name in deliveries:
        check_delivery(name, n_workers, excess=spec.has_excess)
    policy = spec.policy()
    ranks = spec.first_assignment()
    holders = policy.first(ranks)
    for epoch in range(1, epochs + 1):
        if epoch > 1:
            holders = policy.evolve(holders, ranks, epoch - 1)
        started = time.process_time()
        ranks, packets = draw_assignment(assignment, ranks, n_workers, seed=seed, epoch=epoch, holders=holders)
        drawing = time.process_time() - started
    needed = len(missing_samples(holders, ranks))
    exact = lower_bound(holders, ranks, n_workers) if bounds and n_workers <= MOST_WORKERS else None
    average = average_lower_bound(holders, ranks, n_workers)
    # With chunks a cache without excess has room for the largest share, which is none for more.
    rate = coded_rate(n_samples, n_workers, spec.capacity if spec.has_excess else -(-n_samples // n_workers))
    figures = []
    for name in deliveries:
        started = time.process_time()
        plan = plan_delivery(name, holders, ranks, n_workers, seed=seed, start=packets)
        seconds = time.process_time() - started
        figures.append(DeliveryFigures(name, plan.n_packets, needed, exact, average, rate, drawing, seconds))
    return tuple(figures)
