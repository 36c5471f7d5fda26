"""The delivery ``auto``: choose the delivery that is expected to be fastest, epoch by epoch."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

from dshuffle.errors import InvalidParameter

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
        if not predicted:
            raise InvalidParameter.of("predicted", dict(predicted), "at least one delivery")
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
