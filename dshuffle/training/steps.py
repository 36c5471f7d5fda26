"""Steps of SGD: which are allowed, and what is said of one that was too large."""

from __future__ import annotations

import math

from dshuffle.errors import InvalidParameter


def check_step(step: float) -> float:
    """The step, if it is one.

    Raises
    ------
    InvalidParameter
        If it is not a finite number above 0.
    """
    if not (math.isfinite(step) and step > 0):
        raise InvalidParameter.of("step", step, "a finite number > 0")
    return step


def diverged(
    step: float,
    epoch: int,
    *,
    what: str = "parameters",
    remedy: str = "take a smaller step, or scale the features",
) -> InvalidParameter:
    """The error of a fit of which something is not finite any more, to be raised.

    Examples
    --------
    >>> raise diverged(9.0, 2, what="weights", remedy="take a smaller step")
    Traceback (most recent call last):
    dshuffle.errors.InvalidParameter: step=9.0 is not allowed; it must be small enough for the weights to stay finite. \
They diverged in epoch 2: take a smaller step.
    """
    return InvalidParameter.of(
        "step", step, f"small enough for the {what} to stay finite", f"They diverged in epoch {epoch}: {remedy}."
    )
