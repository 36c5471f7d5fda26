"""Deliveries: how workers get the samples that they lack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import ArrayLike

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning.delivery.clique import CLIQUE
from dshuffle.planning.delivery.definition import Circumstances, Delivery, Excess, PlanInput
from dshuffle.planning.delivery.leftover import LEFTOVER, shuffle_matrix
from dshuffle.planning.delivery.packets import CODED, UBERSHUFFLE
from dshuffle.planning.delivery.rows import PEER, SERVER_ROWS, STORAGE
from dshuffle.planning.epoch_plan import Packets
from dshuffle.planning.exchange_epochs import Weights
from dshuffle.planning.types import as_instance

__all__ = [
    "Circumstances",
    "DELIVERIES",
    "Delivery",
    "Excess",
    "SIMPLEST",
    "check_delivery",
    "get_delivery",
    "plan_delivery",
    "shuffle_matrix",
    "suitable_deliveries",
]


def by_name(deliveries: Iterable[Delivery]) -> dict[str, Delivery]:
    """Deliveries by name, in this order."""
    named: dict[str, Delivery] = {}
    for delivery in deliveries:
        if delivery.name in named:
            other = type(named[delivery.name]).__name__
            raise ValueError(
                f"the deliveries {other} and {type(delivery).__name__} have the same name: {delivery.name!r}"
            )
        named[delivery.name] = delivery
    return named


DELIVERIES = by_name((PEER, SERVER_ROWS, STORAGE, CLIQUE, UBERSHUFFLE, CODED, LEFTOVER))
"""Every delivery by name. Where several are equally fast, the first one here is taken."""

SIMPLEST = PEER.name
"""The delivery of users who choose none. It stands for ``auto`` where a single one must be named."""


def get_delivery(name: str) -> Delivery:
    """The delivery of a name."""
    if name not in DELIVERIES:
        raise InvalidParameter.of("delivery", name, f"one of {sorted(DELIVERIES)}")
    return DELIVERIES[name]


def suitable_deliveries(circumstances: Circumstances) -> list[Delivery]:
    """The deliveries that are worth considering on a cluster, simpler ones first."""
    return [delivery for delivery in DELIVERIES.values() if delivery.suits(circumstances)]


def check_delivery(name: str, n_workers: int, *, excess: bool = False) -> None:
    """Raise an error if a delivery is unknown or does not support these workers or caches."""
    delivery = get_delivery(name)
    if delivery.supports(n_workers, excess=excess):
        return
    names = [other.name for other in DELIVERIES.values() if other.supports(n_workers, excess=excess)]
    hint = f"Use one of {', '.join(map(repr, names))}."
    if excess and delivery.excess is Excess.REFUSED:
        raise InvalidParameter.of("delivery", name, "a delivery that supports caches with excess", hint)
    allowed = f"at most {delivery.most_workers} for the delivery {name!r}"
    raise InvalidParameter.of("n_workers", n_workers, allowed, hint)


def plan_delivery(
    name: str,
    holders: ArrayLike,
    destinations: ArrayLike,
    n_workers: int,
    *,
    seed: int = 0,
    start: Packets | None = None,
    hosts: Sequence[int] = (),
    weights: Weights = (),
    **options: Any,
) -> Packets:
    """Plan how every worker gets the samples that it will train on but does not hold."""
    # holders: ``(q, words)`` integer masks of the workers that hold each sample; ``(q,)`` also for up to 64 workers.
    # destinations: ``(q,)`` integers, the worker that will train on each sample.
    n_workers = as_integer("n_workers", n_workers, 1)
    check_delivery(name, n_workers)
    masks, ranks = as_instance(holders, destinations, n_workers)
    return DELIVERIES[name].plan(PlanInput(masks, ranks, n_workers, seed, start, hosts, weights), **options)
