"""Deliveries: how workers get the samples that they lack."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from dshuffle.errors import InvalidParameter
from dshuffle.planning.delivery.coded import (
    CLIQUE,
    CODED,
    LEFTOVER,
    UBERSHUFFLE,
    coded_rate,
)
from dshuffle.planning.delivery.definition import PEER, SERVER_ROWS, STORAGE, Delivery, PlanInput

__all__ = [
    "DELIVERIES",
    "Delivery",
    "PlanInput",
    "SIMPLEST",
    "check_delivery",
    "coded_rate",
    "get_delivery",
    "suitable_deliveries",
]

DELIVERIES = {each.name: each for each in (PEER, SERVER_ROWS, STORAGE, CLIQUE, UBERSHUFFLE, CODED, LEFTOVER)}
"""Every delivery by name. Where several are equally fast, the first one here is taken."""

SIMPLEST = PEER.name
"""The delivery of users who choose none. It stands for ``auto`` where a single one must be named."""


def get_delivery(name: str) -> Delivery:
    """The delivery of a name."""
    if name not in DELIVERIES:
        raise InvalidParameter.of("delivery", name, f"one of {sorted(DELIVERIES)}")
    return DELIVERIES[name]


def suitable_deliveries(
    n_workers: int, *, excess: bool, has_server: bool, has_storage: bool, server_holds_all: bool = True
) -> list[Delivery]:
    """The deliveries that are worth considering on a cluster, simpler ones first."""
    return [
        delivery
        for delivery in DELIVERIES.values()
        if delivery.supports(n_workers, excess=excess)
        and (not delivery.coded or (server_holds_all and excess != delivery.refuses_excess))
        and (has_server or not delivery.needs_server)
        and (has_storage or not delivery.reads_store)
    ]


def check_delivery(name: str, n_workers: int, *, excess: bool = False) -> None:
    """Raise an error if a delivery is unknown or does not support these workers or caches."""
    delivery = get_delivery(name)
    if delivery.supports(n_workers, excess=excess):
        return
    names = [other.name for other in DELIVERIES.values() if other.supports(n_workers, excess=excess)]
    hint = f"Use one of {', '.join(map(repr, names))}."
    if excess and delivery.refuses_excess:
        raise InvalidParameter.of("delivery", name, "a delivery that supports caches with excess", hint)
    allowed = f"at most {delivery.most_workers} for the delivery {name!r}"
    raise InvalidParameter.of("n_workers", n_workers, allowed, hint)


AUTO = "auto"
"""Name for choosing a delivery in every epoch; it is not a delivery itself."""

_REMEMBERED = 3
_CLEARLY = 0.9


class AutoDelivery:
    """Choose the delivery of the next epoch from predicted and measured times."""

    # The times of a delivery are its prediction, followed by the measured times of its exchanges. Its expected time is
    # the median of the last three, or the lower one of two. A single slow exchange therefore does not count, but two
    # do. A delivery that is predicted to beat the expected time of the current one is tried, and kept if it is as fast
    # as predicted. The choice does not affect the assignment.
    # predicted: delivery -> predicted seconds of an exchange; at least one delivery. The first wins a tie.

    def __init__(self, predicted: Mapping[str, float]) -> None:
        self._seconds = {name: deque([seconds], maxlen=_REMEMBERED) for name, seconds in predicted.items()}
        self._last: str | None = None

    @property
    def expected(self) -> dict[str, float]:
        """Delivery -> seconds that its next exchange is expected to take."""
        return {name: statistics.median_low(seconds) for name, seconds in self._seconds.items()}

    def choose(self) -> str:
        """Return the delivery of the next epoch."""
        # It changes only if another delivery is expected to be at least a tenth faster.
        expected = self.expected
        best = min(expected, key=expected.__getitem__)
        if self._last is not None and expected[best] > _CLEARLY * expected[self._last]:
            best = self._last
        self._last = best
        return best

    def observe(self, delivery: str, seconds: float) -> None:
        """Record how many seconds an exchange with this delivery took."""
        self._seconds[delivery].append(seconds)
