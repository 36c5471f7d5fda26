"""What a call does one after the other, and how long each step takes: a line of the log at debug level."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)


class Timeline:
    """Steps of a call, and the seconds of each.

    Parameters
    ----------
    call
        What the steps belong to.

    Examples
    --------
    >>> timeline = Timeline("a session opens")
    >>> timeline.end_step("its members are chosen")
    >>> [step for step, seconds in timeline.steps]
    ['its members are chosen']
    """

    def __init__(self, call: str) -> None:
        self.call = call
        self.steps: list[tuple[str, float]] = []
        self._began = time.perf_counter()

    def end_step(self, step: str) -> None:
        """Note that a step has ended, which began with the end of the one before."""
        now = time.perf_counter()
        self.steps.append((step, now - self._began))
        self._began = now

    def log(self) -> None:
        """Log all steps in a line."""
        text = ", ".join(f"{step} {seconds:.3f} s" for step, seconds in self.steps)
        logger.debug("dshuffle: %s: %s; %.3f s in all", self.call, text, sum(seconds for _, seconds in self.steps))
