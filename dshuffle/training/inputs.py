"""Steps of SGD: which are allowed, and what is said of one that was too large.

Which arrays of a dataset a trainer is given, and whether it can be trained on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


EVALUATION_ROWS = 1024
"""Rows that an evaluation looks at in one go: no result depends on it, and a network's activations have to fit."""


def check_names(names: Iterable[str], /, *, hint: str = "", **wanted: str) -> None:
    """Refuse names of arrays that are not there.

    Parameters
    ----------
    names
        The dataset's arrays.
    hint
        What to do about it.
    wanted
        Parameter -> the name that was given for it.

    Raises
    ------
    InvalidParameter
        Naming the parameter, and the arrays that there are.

    Examples
    --------
    >>> check_names(["x", "label"], features="x", target="y")
    Traceback (most recent call last):
    dshuffle.errors.InvalidParameter: target='y' is not allowed; it must be one of the dataset's arrays: label, x
    """
    known = sorted(names)
    for parameter, name in wanted.items():
        if name not in known:
            raise InvalidParameter.of(parameter, name, f"one of the dataset's arrays: {', '.join(known)}", hint)


def check_finite(parameter: str, name: str, values: NDArray[Any], sample_ids: NDArray[np.integer]) -> None:
    """Refuse values that are not finite.

    Parameters
    ----------
    parameter, name
        Which array these values are from, and the parameter that says so.
    values
        ``(n, ...)`` numbers.
    sample_ids
        Of the samples; there may be more.

    Raises
    ------
    InvalidParameter
        Naming the first sample that is not finite.

    Examples
    --------
    >>> check_finite("target", "y", np.array([1.0, np.inf]), np.array([70, 50]))
    Traceback (most recent call last):
    dshuffle.errors.InvalidParameter: target='y' is not allowed; it must be finite everywhere; sample 50 is not
    """
    finite = np.isfinite(values).reshape(len(values), math.prod(values.shape[1:])).all(axis=1)
    if not finite.all():
        sample = sample_ids[int(np.argmin(finite))]
        raise InvalidParameter.of(parameter, name, f"finite everywhere; sample {sample} is not")


def checked_width(
    arrays: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], n_classes: int | None, *, features: str, target: str
) -> int:
    """Numbers in a sample, if a model can be trained on arrays of such shapes and dtypes.

    Parameters
    ----------
    arrays
        Name -> dtype and shape of one sample.
    n_classes
        The model's; None if its targets are any numbers.
    features, target
        The names chosen.

    Raises
    ------
    InvalidParameter
        Naming the parameter.
    """
    check_names(arrays, features=features, target=target)
    dtype, shape = arrays[features]
    if not shape or dtype.kind not in "biuf":
        allowed = f"an array of rows of numbers (it is {len(shape) + 1}-D, {dtype})"
        raise InvalidParameter.of("features", features, allowed)
    dtype, target_shape = arrays[target]
    if target_shape or dtype.kind not in ("biuf" if n_classes is None else "biu"):
        wanted = "numbers" if n_classes is None else "integers or booleans"
        allowed = f"a 1-D array of {wanted} (it is {len(target_shape) + 1}-D, {dtype})"
        raise InvalidParameter.of("target", target, allowed)
    return math.prod(shape)
