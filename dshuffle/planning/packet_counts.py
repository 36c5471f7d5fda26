"""Number of packets that each delivery needs for one shuffle, with bounds from the papers; no cluster needed.

References
----------
Chung et al. (2017), Theorem 2; see docs/papers.md.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dshuffle.checks import as_integer
from dshuffle.planning.bounds import MOST_WORKERS, average_lower_bound, coded_rate, lower_bound
from dshuffle.planning.delivery import check_delivery, plan_delivery
from dshuffle.planning.delivery.server import SERVER_ROWS
from dshuffle.planning.epoch_plan import missing_samples
from dshuffle.planning.shuffle_spec import Choices, ShuffleSpec


@dataclass(frozen=True, slots=True)
class DeliveryFigures:
    """Figures of one delivery for a shuffle.

    Parameters
    ----------
    name
        Name of the delivery.
    packets
        Number of packets of its plan.
    needed
        Number of samples missing from their worker's partition; an uncoded delivery sends this many packets.
    lower_bound
        Lower bound on the packets of any code for this shuffle; None if not computed or above 20 workers.
    average_bound
        Weaker lower bound for any number of workers: the mean over all orders of the workers.
    theorem2
        Rate of Chung et al. (2017), Theorem 2, for caches with uniformly random excess: the packets of ``coded`` in
        the limit of many samples. For new caches no code needs fewer on average.
    assignment_seconds, plan_seconds
        CPU seconds to draw the assignment and to make the plan, compiled and on one core.
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
        """Mean number of samples that a packet delivers."""
        return self.needed / self.packets if self.packets else 1.0


def survey(
    n_samples: int,
    n_workers: int,
    choices: Choices,
    *,
    deliveries: Sequence[str],
    epochs: int = 1,
    bounds: bool = True,
    progress: Callable[[int, str], None] = lambda *_: None,
) -> tuple[DeliveryFigures, ...]:
    """Plan one epoch with several deliveries, for the same caches and the same assignment.

    Parameters
    ----------
    n_samples, n_workers
        Numbers of samples and of workers.
    choices
        The way of shuffling; its delivery is ignored.
    deliveries
        Names of deliveries.
    epochs
        Number of shuffles; the figures are for the last one. With 1, caches are fresh, as in the papers' simulations.
    bounds
        Whether to compute the lower bound, which takes a second at 20 workers.
    progress
        Called as ``progress(steps done, text)``: one step for the assignment, and one for each delivery.

    Raises
    ------
    InvalidParameter
        If a parameter has a value that is not allowed.

    Examples
    --------
    >>> choices = Choices("global", cache_fraction=0.5)
    >>> for figures in survey(9000, 3, choices, deliveries=["server", "clique"]):
    ...     print(figures.name, figures.packets < 2400)
    server False
    clique True
    """
    epochs = as_integer("epochs", epochs, 1)
    spec = ShuffleSpec(n_samples, n_workers, dataclasses.replace(choices, delivery=SERVER_ROWS.name))
    seed = choices.seed
    for name in deliveries:
        check_delivery(name, n_workers, excess=spec.has_excess)
    progress(0, f"drawing {n_samples:,} samples")
    policy = spec.policy()
    draw = spec.draw_first()
    holders = policy.first(draw.ranks)
    for epoch in range(1, epochs + 1):
        if epoch > 1:
            holders = policy.evolve(holders, draw.ranks, epoch - 1)
        started = time.process_time()
        draw = spec.draw(draw, epoch, holders)
        drawing = time.process_time() - started
    ranks = draw.ranks
    needed = len(missing_samples(holders, ranks))
    exact = lower_bound(holders, ranks, n_workers) if bounds and n_workers <= MOST_WORKERS else None
    average = average_lower_bound(holders, ranks, n_workers)
    # With chunks, a cache without excess has the capacity of the largest share, which is not excess.
    rate = coded_rate(n_samples, n_workers, spec.capacity if spec.has_excess else -(-n_samples // n_workers))
    figures = []
    for step, name in enumerate(deliveries, 1):
        progress(step, f"planning {name}")
        started = time.process_time()
        plan = plan_delivery(name, holders, ranks, n_workers, seed=seed, start=draw.packets)
        seconds = time.process_time() - started
        figures.append(DeliveryFigures(name, plan.n_packets, needed, exact, average, rate, drawing, seconds))
    return tuple(figures)
