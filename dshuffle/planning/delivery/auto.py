"""The delivery ``auto``: of several deliveries the one that is expected to be the fastest, epoch by epoch."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from dshuffle.errors import InvalidParameter

AUTO = "auto"
"""Not a delivery of its own: another one is chosen for every epoch."""

_REMEMBERED = 3
_CLEARLY = 0.9


class AutoDelivery:
    """Chooses the next epoch's delivery by predictions, which measurements replace.

    What a delivery is expected to take is the median of its prediction and what its exchanges took, the last three of
    these numbers, and of two the lower one. So a single exchange that something held up does not count, two do; and
    whatever is predicted to beat what the present one takes is tried, and stays if it is as good as predicted. Which
    samples go where does not depend on any of this.

    Parameters
    ----------
    predicted
        Delivery -> seconds of an exchange; at least one. Of equal ones the first is taken.

    Examples
    --------
    >>> auto = AutoDelivery({"peer": 1.0, "storage": 1.5})
    >>> auto.choose()
    'peer'
    >>> auto.observe("peer", 4.0)
    >>> auto.choose()
    'peer'
    >>> auto.observe("peer", 3.9)
    >>> auto.choose()
    'storage'
    """

    def __init__(self, predicted: Mapping[str, float]) -> None:
        if not predicted:
            raise InvalidParameter.of("predicted", dict(predicted), "at least one delivery")
        self._seconds = {name: deque([seconds], maxlen=_REMEMBERED) for name, seconds in predicted.items()}
        self._last: str | None = None

    @property
    def expected(self) -> dict[str, float]:
        """Seconds that an exchange is expected to take now, by delivery."""
        return {name: statistics.median_low(seconds) for name, seconds in self._seconds.items()}

    def choose(self) -> str:
        """The delivery of the next epoch: another than the last only if it is expected to be a tenth faster."""
        expected = self.expected
        best = min(expected, key=expected.__getitem__)
        if self._last is not None and expected[best] > _CLEARLY * expected[self._last]:
            best = self._last
        self._last = best
        return best

    def observe(self, delivery: str, seconds: float) -> None:
        """What an exchange by this delivery has taken."""
        self._seconds[delivery].append(seconds)
