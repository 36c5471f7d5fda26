"""Policies for the sizes of shares: equal, given, or in proportion to the measured speed of training."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Self

import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.planning.assignment.rules import Assignment
from dshuffle.planning.exchange_epochs import LARGEST_WEIGHT, Weights, as_weights
from dshuffle.planning.types import Amounts

MEASURED_EPOCHS = 3
"""Epochs with the same shares that are measured before shares change. The first of them does not count: its tasks load
code, or train while the rows of another session are moved."""

LEAST_GAIN = 0.1
"""Fraction of the time of an epoch that other shares must save. Times of the same work differ by some per cent."""

LEAST_SAVING = 0.1
"""Seconds of an epoch that other shares must save: to open a session with other shares takes about 0.3 s."""

LEAST_SHARE = 0.1
"""Smallest measured share, as a fraction of an equal one. A rank needs samples to show that it is fast again."""

FORMS = "'even', 'measured', positive numbers, one for each rank, or a number for each worker by name"

Names = Sequence[Collection[str]]
"""What names each worker, by rank: its name and its addresses. Empty if a plan is made without workers."""


@dataclass(frozen=True, slots=True)
class ShareBounds:
    """Bounds on the shares of ranks, as fractions of all samples."""

    least: float  # least, most: Smallest and largest fraction that a rank may have.
    most: float

    @classmethod
    def of(cls, rule: Assignment, cache_fraction: float | None, n_samples: int, n_workers: int) -> Self:
        """The bounds of a way of shuffling: its assignment may need samples of every rank, and caches limit shares."""
        equal = 1 / n_workers
        # Sizes are rounded by up to a unit, and a short chunk may come on top.
        rounding = 2 * rule.unit_for(n_samples, n_workers) / n_samples
        least = max(LEAST_SHARE * equal, rule.least_share(n_samples, n_workers) / n_samples + rounding)
        most = 1.0 if cache_fraction is None else cache_fraction - rounding
        return cls(min(equal, least), max(equal, most))


@dataclass(frozen=True, slots=True)
class SharePolicy:
    """A policy for the sizes of shares: equal, in proportion to numbers, or to the measured speed of each rank."""

    numbers: tuple[float, ...] = ()  # Of the ranks, or of the workers with these names; others have 1.
    names: tuple[str, ...] = ()  # Names or addresses of workers that have a number of their own.
    measures: bool = False  # Whether shares are in proportion to the samples per second of each rank.

    def __str__(self) -> str:
        names = [f"{name}=" for name in self.names] or [""] * len(self.numbers)
        texts = [f"{name}{number:g}" for name, number in zip(names, self.numbers, strict=True)]
        return ",".join(texts) or ("measured" if self.measures else "even")

    @property
    def is_even(self) -> bool:
        """Whether all shares are always equal."""
        return not self.numbers and not self.measures

    @property
    def for_fixed_workers(self) -> bool:
        """Whether the policy is for one number of workers."""
        return bool(self.numbers) and not self.names

    @property
    def may_change(self) -> bool:
        """Whether shares that are equal now may be unequal in a later epoch."""
        return self.measures or bool(self.names)

    def first(self, n_workers: int, before: Weights, names: Names = ()) -> Weights:
        """The weights with which a number of workers begins."""
        numbers: Sequence[float] = self.numbers
        if self.measures:
            numbers = before if len(before) == n_workers else ()
        elif self.names:  # equal shares in a plan without workers
            by_name = dict(zip(self.names, numbers, strict=True))
            numbers = [next((by_name[name] for name in self.names if name in own), 1) for own in names]
        elif numbers and len(numbers) != n_workers:
            hint = "Give one number for each worker that trains, or use 'measured' or 'even'."
            raise InvalidParameter.of("shares", str(self), f"{n_workers} numbers, one for each rank", hint)
        return as_weights(numbers) if numbers else ()

    def following(self, weights: Weights, epochs: Sequence[Sequence[float]], bounds: ShareBounds) -> Weights:
        """The weights of the epochs to come: others if shares are measured, and that saves enough."""
        # A rank without a time had no task, or its worker was lost.
        complete = [seconds for seconds in epochs[1:] if min(seconds) > 0]
        if not self.measures or len(complete) < MEASURED_EPOCHS - 1:
            return weights
        seconds = np.median(np.array(complete[-MEASURED_EPOCHS:], float), axis=0)
        speeds = fractions_of(weights, len(seconds)) / seconds
        proposed = bounded_weights(speeds, bounds)
        lasts, would_last = float(seconds.max()), float((fractions_of(proposed, len(seconds)) / speeds).max())
        enough = would_last <= (1 - LEAST_GAIN) * lasts and lasts - would_last >= LEAST_SAVING
        return proposed if enough else weights


def fractions_of(weights: Weights, n_workers: int) -> Amounts:
    """``(n,)``, the fraction of all samples that each rank has."""
    numbers = np.array(weights or (1,) * n_workers, float)
    return np.asarray(numbers / numbers.sum())


def bounded_weights(speeds: Amounts, bounds: ShareBounds) -> Weights:
    """Weights in proportion to speeds, whose fractions are within bounds that allow equal shares."""
    # Ranks beyond a bound get the bound, and the others share the rest. The sum of clipped shares grows with their
    # scale, so the scale can be bisected.
    low, high = 0.0, 1 / float(speeds.min())
    for _ in range(100):
        scale = (low + high) / 2
        if np.clip(scale * speeds, bounds.least, bounds.most).sum() < 1:
            low = scale
        else:
            high = scale
    fractions = np.clip(high * speeds, bounds.least, bounds.most)
    weights = np.array(as_weights(fractions.tolist()) or (LARGEST_WEIGHT,) * len(speeds))
    # Weights are rounded. This ends, because equal shares are within the bounds.
    while weights.min() / weights.sum() < bounds.least or weights.max() / weights.sum() > bounds.most:
        weights[weights.argmin()] += 1
    return as_weights(weights.tolist())


Shares = str | Sequence[float] | Mapping[str, float] | SharePolicy
"""All forms of shares that users give."""

EVEN = SharePolicy()


def parse_shares(shares: Shares) -> SharePolicy:
    """Make a policy of its name, of numbers, of numbers by the names of workers, or of a text with commas."""
    if isinstance(shares, SharePolicy):
        return shares
    if isinstance(shares, str) and shares in ("even", "measured"):
        return SharePolicy(measures=shares == "measured")
    names: tuple[str, ...] = ()
    try:
        if isinstance(shares, Mapping):
            names, numbers = tuple(map(str, shares)), tuple(shares.values())
        elif isinstance(shares, str):
            pairs = [part.rpartition("=") for part in shares.split(",")]
            names = tuple(name.strip() for name, sign, _ in pairs if sign)
            numbers = tuple(float(number) for *_, number in pairs)
        else:
            numbers = tuple(shares)
    except (TypeError, ValueError):
        raise InvalidParameter.of("shares", shares, FORMS) from None
    unclear = any(not name or name != name.strip() or "," in name or "=" in name for name in names)
    unclear |= len(names) not in (0, len(numbers))
    hint = "Names must differ, and must not be empty or have commas, equals signs or spaces at an end."
    if unclear or len(set(names)) < len(names) or not numbers or not all(map(_is_positive, numbers)):
        raise InvalidParameter.of("shares", shares, FORMS, hint if names else "")
    return SharePolicy(numbers, names)


def _is_positive(number: object) -> bool:
    return not isinstance(number, bool) and isinstance(number, Real) and 0 < float(number) < math.inf
