"""Policies for the sizes of shares: equal, given, or in proportion to the measured speed of training."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.planning.assignment.rule import Assignment
from dshuffle.planning.exchange_epochs import LARGEST_WEIGHT, Weights, as_weights

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


class SharePolicy(ABC):
    """A policy for the sizes of shares."""

    __slots__ = ()

    for_fixed_workers: ClassVar[bool] = False
    """Whether the policy is for one number of workers."""

    measures: ClassVar[bool] = False
    """Whether shares follow from the measured times of training."""

    may_change: ClassVar[bool] = False
    """Whether shares that are equal now may be unequal in a later epoch."""

    not_in_jobs: ClassVar[str] = ""
    """Why the ranks of a launcher's job cannot have such shares, if they cannot."""

    @abstractmethod
    def __str__(self) -> str:
        """The text from which :func:`parse_shares` makes the policy."""

    @property
    def is_even(self) -> bool:
        """Whether all shares are always equal."""
        return False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of workers that have a number of their own."""
        return ()

    @abstractmethod
    def first(self, n_workers: int, before: Weights, names: Names = ()) -> Weights:
        """The weights with which a number of workers begins."""

    def following(self, weights: Weights, epochs: Sequence[Sequence[float]], bounds: ShareBounds) -> Weights:
        """The weights of the epochs to come; the same weights if nothing is to change."""
        return weights


@dataclass(frozen=True, slots=True)
class EvenShares(SharePolicy):
    """Every rank trains on the same number of samples."""

    def __str__(self) -> str:
        return "even"

    @property
    def is_even(self) -> bool:
        """They are."""
        return True

    def first(self, n_workers: int, before: Weights, names: Names = ()) -> Weights:
        """None."""
        return ()


@dataclass(frozen=True, slots=True)
class GivenShares(SharePolicy):
    """Shares in proportion to given numbers, one for each rank."""

    for_fixed_workers: ClassVar[bool] = True

    numbers: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.numbers or not all(_is_positive(number) for number in self.numbers):
            raise InvalidParameter.of("shares", self.numbers, FORMS)

    def __str__(self) -> str:
        return ",".join(f"{number:g}" for number in self.numbers)

    def first(self, n_workers: int, before: Weights, names: Names = ()) -> Weights:
        """Those of the numbers."""
        if len(self.numbers) != n_workers:
            hint = "Give one number for each worker that trains, or use 'measured' or 'even'."
            raise InvalidParameter.of("shares", str(self), f"{n_workers} numbers, one for each rank", hint)
        return as_weights(self.numbers)


@dataclass(frozen=True, slots=True)
class NamedShares(SharePolicy):
    """Shares in proportion to numbers for workers by name or address. A worker without a number has 1."""

    may_change: ClassVar[bool] = True
    not_in_jobs: ClassVar[str] = "the ranks of a job have numbers, and no names"

    numbers: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        names = self.names
        unclear = any(not name or name != name.strip() or "," in name or "=" in name for name in names)
        if not names or unclear or len(set(names)) < len(names):
            hint = "Names must differ, and must not be empty or have commas, equals signs or spaces at an end."
            raise InvalidParameter.of("shares", str(self) or {}, FORMS, hint)
        if not all(_is_positive(number) for _, number in self.numbers):
            raise InvalidParameter.of("shares", str(self), FORMS)

    def __str__(self) -> str:
        return ",".join(
            f"{name}={number:g}" if _is_positive(number) else f"{name}={number}" for name, number in self.numbers
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the numbers."""
        return tuple(name for name, _ in self.numbers)

    def first(self, n_workers: int, before: Weights, names: Names = ()) -> Weights:
        """Those of the workers with these names; equal ones in a plan without workers."""
        if not names:
            return ()
        return as_weights([next((number for name, number in self.numbers if name in own), 1) for own in names])


@dataclass(frozen=True, slots=True)
class MeasuredShares(SharePolicy):
    """Shares in proportion to the samples per second with which each rank has trained."""

    measures: ClassVar[bool] = True
    may_change: ClassVar[bool] = True
    not_in_jobs: ClassVar[str] = "dshuffle does not see how long a step of the script waits for other ranks"

    def __str__(self) -> str:
        return "measured"

    def first(self, n_workers: int, before: Weights, names: Names = ()) -> Weights:
        """Those before, if they are for as many workers; otherwise none."""
        return as_weights(before) if before and len(before) == n_workers else ()

    def following(self, weights: Weights, epochs: Sequence[Sequence[float]], bounds: ShareBounds) -> Weights:
        """In proportion to the speeds of the last epochs, if that saves enough."""
        # A rank without a time had no task, or its worker was lost.
        complete = [seconds for seconds in epochs[1:] if min(seconds) > 0]
        if len(complete) < MEASURED_EPOCHS - 1:
            return weights
        seconds = np.median(np.array(complete[-MEASURED_EPOCHS:], float), axis=0)
        now = fractions_of(weights, len(seconds))
        speeds = now / seconds
        proposed = bounded_weights(speeds, bounds)
        lasts, would_last = float(seconds.max()), float((fractions_of(proposed, len(seconds)) / speeds).max())
        enough = would_last <= (1 - LEAST_GAIN) * lasts and lasts - would_last >= LEAST_SAVING
        return proposed if enough else weights


def fractions_of(weights: Weights, n_workers: int) -> NDArray[np.float64]:
    """``(n,)``, the fraction of all samples that each rank has."""
    numbers = np.array(weights or (1,) * n_workers, float)
    fractions: NDArray[np.float64] = numbers / numbers.sum()
    return fractions


def bounded(speeds: NDArray[np.float64], bounds: ShareBounds) -> NDArray[np.float64]:
    """``(n,)`` fractions in proportion to speeds, within bounds."""
    # Ranks beyond a bound get the bound, and the others share the rest in proportion to their speeds. The bounds must
    # allow equal shares.
    # The sum of clipped shares grows with their scale, so the scale can be bisected.
    low, high = 0.0, 1 / float(speeds.min())
    for _ in range(100):
        scale = (low + high) / 2
        if np.clip(scale * speeds, bounds.least, bounds.most).sum() < 1:
            low = scale
        else:
            high = scale
    fractions: NDArray[np.float64] = np.clip(high * speeds, bounds.least, bounds.most)
    return fractions


def bounded_weights(speeds: NDArray[np.float64], bounds: ShareBounds) -> Weights:
    """Weights in proportion to speeds, whose fractions are within bounds although weights are rounded."""
    weights = np.array(as_weights(bounded(speeds, bounds).tolist()) or (LARGEST_WEIGHT,) * len(speeds))
    # This ends, because equal shares are within the bounds.
    while weights.min() / weights.sum() < bounds.least or weights.max() / weights.sum() > bounds.most:
        weights[weights.argmin()] += 1
    return as_weights(weights.tolist())


Shares = str | Sequence[float] | Mapping[str, float] | SharePolicy
"""All forms of shares that users give."""

EVEN, MEASURED = EvenShares(), MeasuredShares()
SHARES: dict[str, SharePolicy] = {str(policy): policy for policy in (EVEN, MEASURED)}
"""The policies without numbers, by name."""


def parse_shares(shares: Shares) -> SharePolicy:
    """Make a policy of its name, of numbers, of numbers by the names of workers, or of a text with commas."""
    if isinstance(shares, SharePolicy):
        return shares
    if isinstance(shares, str):
        if shares in SHARES:
            return SHARES[shares]
        parts = shares.split(",")
        try:
            if "=" in shares:
                pairs = [part.rpartition("=") for part in parts]
                numbers = [(name.strip(), float(number)) for name, _, number in pairs]
            else:
                return GivenShares(tuple(map(float, parts)))
        except ValueError:  # InvalidParameter is a ValueError too; show the whole text that the user typed
            raise InvalidParameter.of("shares", shares, FORMS) from None
        return NamedShares(tuple(numbers))
    if isinstance(shares, Mapping):
        return NamedShares(tuple((str(name), number) for name, number in shares.items()))
    try:
        by_rank = tuple(shares)
    except TypeError:
        raise InvalidParameter.of("shares", shares, FORMS) from None
    return GivenShares(by_rank)


def _is_positive(number: object) -> bool:
    if isinstance(number, bool) or not isinstance(number, Real):
        return False
    return 0 < float(number) < math.inf
