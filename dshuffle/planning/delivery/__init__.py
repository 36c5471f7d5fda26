"""How a worker gets the samples that it lacks: one file a scheme, all in one registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import ArrayLike

from dshuffle.checks import as_integer, as_ranks
from dshuffle.errors import InvalidParameter
from dshuffle.planning.delivery.clique import plan_clique
from dshuffle.planning.delivery.coded import plan_coded
from dshuffle.planning.delivery.leftover import plan_leftover
from dshuffle.planning.delivery.ubershuffle import plan_ubershuffle
from dshuffle.planning.delivery.uncoded import plan_peer, plan_server, plan_storage
from dshuffle.planning.holders import as_holders
from dshuffle.planning.plan import Plan

DeliveryPlanner = Callable[..., Plan]
"""``planner(holders, destinations, n_workers, *, seed, **options) -> Plan``, on checked arrays: ``(q,
words)``
uint64 holders and ``(q,)`` int32 destinations. The plan must pass :func:`~dshuffle.planning.check_plan` and
be a function of the arguments alone."""

DELIVERIES: dict[str, DeliveryPlanner] = {
    "storage": plan_storage,
    "peer": plan_peer,
    "server": plan_server,
    "coded": plan_coded,
    "ubershuffle": plan_ubershuffle,
    "leftover": plan_leftover,
    "clique": plan_clique,
}
"""Deliveries: name -> planner."""

UNCODED = frozenset({"storage", "peer", "server"})
"""Deliveries whose packets are single rows."""

MOST_FOR_TABLES = 64
"""Workers that ``coded`` and ``ubershuffle`` serve, at most."""

_GOES_ON = frozenset({"clique"})
"""Deliveries that can go on from packets that they are given."""


def check_delivery(name: str, n_workers: int, *, excess: bool = False) -> None:
    """Refuse a delivery that is unknown, or that cannot serve so many workers or such caches.

    Parameters
    ----------
    excess
        Whether workers hold more than their shares.

    Raises
    ------
    InvalidParameter
        Saying what to use instead.
    """
    if name not in DELIVERIES:
        raise InvalidParameter.of("delivery", name, f"one of {sorted(DELIVERIES)}")
    if name in ("coded", "ubershuffle") and n_workers > MOST_FOR_TABLES:
        hint = "The sets of holders of more workers hardly ever repeat. Use 'clique', or 'peer' or 'server'."
        raise InvalidParameter.of("n_workers", n_workers, f"at most {MOST_FOR_TABLES} for the delivery {name!r}", hint)
    if name == "leftover" and excess:
        hint = "With a cache fraction above 1/n use 'clique' or 'ubershuffle'."
        raise InvalidParameter.of("delivery", name, "one for caches with excess", hint)


def plan_delivery(
    name: str,
    holders: ArrayLike,
    destinations: ArrayLike,
    n_workers: int,
    *,
    seed: int = 0,
    start: Plan | None = None,
    **options: Any,
) -> Plan:
    """Plan how every worker gets the samples that it is to train on and does not hold.

    Parameters
    ----------
    name
        A key of :data:`DELIVERIES`.
    holders
        ``(q, words)`` integer masks of the workers that hold each sample, or ``(q,)`` for up to 64 workers.
    destinations
        ``(q,)`` integers, the worker that is to train on each sample.
    n_workers
        Number of workers.
    seed
        Breaks ties, where the delivery has any.
    start
        Good packets that are known beforehand, such as those of an ``aligned`` assignment. A delivery may go on from
        them, as ``clique`` does, or make its own plan.
    options
        Those of the delivery.

    Raises
    ------
    InvalidParameter
        If the delivery is unknown (the message lists the known ones), an array has a wrong shape or range,
        or a sample cannot be delivered in this way.

    Examples
    --------
    >>> plan = plan_delivery("peer", holders=[0b01, 0b10, 0b10], destinations=[1, 1, 0], n_workers=2)
    >>> plan.samples, plan.destinations, plan.senders
    (array([0, 2]), array([1, 0], dtype=int32), array([0, 1], dtype=int32))
    """
    n_workers = as_integer("n_workers", n_workers, 1)
    check_delivery(name, n_workers)
    masks = as_holders(holders, n_workers)
    ranks = as_ranks("destinations", destinations, n_workers)
    if len(masks) != len(ranks):
        raise InvalidParameter.of("destinations.shape", ranks.shape, f"({len(masks)},), as holders has")
    if start is not None and name in _GOES_ON:
        options["start"] = start
    return DELIVERIES[name](masks, ranks, n_workers, seed=seed, **options)
