"""The choices that make up a way of shuffling, as one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from dshuffle.checks import as_integer, as_ratio
from dshuffle.errors import InvalidParameter
from dshuffle.planning.assignment import Assignment, Global, check_balance, parse_assignment
from dshuffle.planning.assignment.balance import Classes
from dshuffle.planning.assignment.initial import SHARDINGS, GivenSharding
from dshuffle.planning.caching import CACHINGS
from dshuffle.planning.delivery import DELIVERIES, SIMPLEST
from dshuffle.planning.delivery.auto import AUTO
from dshuffle.planning.delivery.relay import RELAYS
from dshuffle.planning.exchange_epochs import BETWEEN, ExchangeEpochs, Redraw
from dshuffle.planning.shares import EVEN, SharePolicy, parse_shares

WEIGHABLE = ("random", "contiguous")
"""Shardings that can have unequal shares."""


@dataclass(frozen=True, slots=True)
class Choices:
    """A way of shuffling: everything that a user chooses, apart from the dataset and the cluster.

    Parameters
    ----------
    assignment
        The rule for which worker trains on which sample; a name such as ``"partial:0.1"`` is parsed.
    delivery
        How a worker gets the samples that it does not hold: a name in :data:`DELIVERIES`, or ``"auto"``.
    caching
        What a worker keeps beyond its share: a name in :data:`CACHINGS`; None for the one that suits the assignment.
    cache_fraction
        Fraction of the samples that each worker holds, in (0, 1]; None for its share alone.
    relay
        How packets of several samples travel: a name in :data:`RELAYS`.
    sharding
        The first assignment: a name, or one that was given (not with ``chunks``).
    balance
        Classes that every epoch spreads evenly over the workers; a name stands for an array of labels of the dataset.
    every
        K: only every K-th epoch has an exchange. In the epochs between, every worker trains on the samples that it has.
    between
        Their order in the epochs between: ``"redraw"``, a new one, or ``"reverse"``, that of the epoch before,
        backwards.
    seed
        Any integer.
    shares
        How many samples each rank trains on: ``"even"``, positive numbers, one for each rank or by the name of workers,
        or ``"measured"``, in proportion to the measured speed of training.

    Raises
    ------
    InvalidParameter
        Naming the parameter, its value and what is allowed.

    Examples
    --------
    >>> choices = Choices("partial:0.1", "clique", relay="ring")
    >>> choices.assignment, choices.label
    (Partial(fraction=0.1, fixed_points=False), 'partial:0.1 + clique, ring')
    >>> Choices(cache_fraction=2)
    Traceback (most recent call last):
    dshuffle.errors.InvalidParameter: cache_fraction=2 is not allowed; it must be a number in [0, 1]
    """

    assignment: Assignment = field(default_factory=Global)
    delivery: str = "peer"
    caching: str | None = "uniform"
    cache_fraction: float | None = None
    relay: str = "pipelined"
    sharding: str | GivenSharding = "random"
    balance: Classes | None = None
    every: int = 1
    between: str = Redraw.name
    seed: int = 0
    shares: SharePolicy = EVEN

    def __post_init__(self) -> None:
        object.__setattr__(self, "assignment", parse_assignment(self.assignment))
        if self.caching is None:
            object.__setattr__(self, "caching", self.assignment.preferred_caching)
        allowed: dict[str, Collection[str]] = {
            "delivery": {*DELIVERIES, AUTO},
            "caching": CACHINGS,
            "relay": RELAYS,
            "between": BETWEEN,
        }
        for name, names in allowed.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in names:
                raise InvalidParameter.of(name, value, f"one of {sorted(names)}")
        if self.cache_fraction is not None and as_ratio("cache_fraction", self.cache_fraction, Fraction(0)) == 0:
            raise InvalidParameter.of("cache_fraction", self.cache_fraction, "above 0: a worker holds its share")
        if not isinstance(self.sharding, str | GivenSharding):
            raise InvalidParameter.because("sharding", "it must be a name or a GivenSharding", "Make one of an array.")
        object.__setattr__(self, "seed", as_integer("seed", self.seed))
        object.__setattr__(self, "every", as_integer("every", self.every, 1))
        self._check_epochs()
        if isinstance(self.sharding, GivenSharding) and self.assignment.in_chunks:
            hint = "The assignment 'chunks' gives out whole chunks from the first epoch on."
            raise InvalidParameter.of("sharding", str(self.sharding), f"one of {sorted(SHARDINGS)}", hint)
        balance: object = self.balance
        if isinstance(balance, str):
            object.__setattr__(self, "balance", Classes(balance))
        elif not (balance is None or isinstance(balance, Classes)):
            raise InvalidParameter.because("balance", "it must be None, the name of an array of labels, or Classes")
        if self.balance is not None:
            check_balance(self.balance, self.assignment)
        object.__setattr__(self, "shares", parse_shares(self.shares))
        if not self.shares.is_even:
            check_unequal(self)

    def _check_epochs(self) -> None:
        """Refuse epochs without an exchange if there are no exchanges, and their order if there are no such epochs."""
        if self.every > 1 and not self.assignment.moves:
            hint = f"The assignment {str(self.assignment)!r} has no exchange in any epoch."
            raise InvalidParameter.of("every", self.every, f"1 with assignment={str(self.assignment)!r}", hint)
        if self.every == 1 and self.between != Redraw.name:
            hint = "Every epoch has an exchange, so there is none between. Set every to 2 or more."
            raise InvalidParameter.of("between", self.between, f"{Redraw.name!r} with every=1", hint)

    @property
    def exchange_epochs(self) -> ExchangeEpochs:
        """Which epochs have an exchange, and the order of training."""
        return ExchangeEpochs(self.every, self.between)

    def has_exchange(self, epoch: int) -> bool:
        """Whether samples change workers for an epoch after the first of a session."""
        return self.assignment.moves and self.exchange_epochs.has_exchange(epoch)

    @property
    def reshuffles_all(self) -> bool:
        """Whether every epoch is a new draw over all samples, which other ways are compared with."""
        return self.assignment.redraws_all and self.every == 1

    def with_assignment(self, assignment: str | Assignment, **changes: Any) -> Choices:
        """The same choices with another assignment. Without exchanges, all epochs are alike."""
        rule = parse_assignment(assignment)
        epochs: dict[str, Any] = {} if rule.moves else {"every": 1, "between": Redraw.name}
        return dataclasses.replace(self, assignment=rule, **epochs, **changes)

    @property
    def is_auto(self) -> bool:
        """Whether the delivery is chosen anew for every epoch."""
        return self.delivery == AUTO

    @property
    def reads_store(self) -> bool:
        """Whether every epoch reads samples from the dataset again; False for ``"auto"``, which decides later."""
        return not self.is_auto and DELIVERIES[self.delivery].reads_store

    @property
    def has_relays(self) -> bool:
        """Whether the relay may make a difference."""
        return self.is_auto or len(DELIVERIES[self.delivery].relays) > 1

    def with_one_delivery(self) -> Choices:
        """The same choices with the simplest delivery in place of ``"auto"``, to check and estimate them."""
        return dataclasses.replace(self, delivery=SIMPLEST) if self.is_auto else self

    @property
    def label(self) -> str:
        """Assignment, delivery and relay, for tables."""
        if not self.assignment.moves:
            return str(self.assignment)
        return f"{self.assignment} + {self.delivery_label}{self.exchange_epochs.label}"

    @property
    def delivery_label(self) -> str:
        """Delivery and relay, for tables."""
        return self.delivery if self.is_auto else DELIVERIES[self.delivery].label(self.relay)

    def by_name(self) -> Choices:
        """The same choices, with a sharding and a balance that were given known by name alone."""
        return Choices.from_dict(self.to_dict())

    def keywords(self) -> dict[str, Any]:
        """The choices as keyword arguments of :class:`dshuffle.Shuffler`."""
        fields = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return {**fields, "balance": None if self.balance is None else self.balance.name}

    def to_dict(self) -> dict[str, Any]:
        """The choices by name, as JSON can hold them; ``balance`` is ``""`` without one."""
        return {
            "assignment": str(self.assignment),
            "delivery": self.delivery,
            "caching": self.caching,
            "cache_fraction": self.cache_fraction,
            "relay": self.relay,
            "sharding": str(self.sharding),
            "balance": "" if self.balance is None else self.balance.name,
            "every": self.every,
            "between": self.between,
            "seed": self.seed,
            "shares": str(self.shares),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Choices:
        """The choices that :meth:`to_dict` wrote; arrays are known by name alone."""
        return cls(**{**fields, "balance": fields["balance"] or None})


def check_unequal(choices: Choices) -> None:
    """Refuse a way of shuffling that cannot have unequal shares.

    Raises
    ------
    InvalidParameter
        If the assignment cannot draw them, or equal shares are given or needed.
    """
    shares, rule = str(choices.shares), choices.assignment
    if not rule.can_weigh:
        allowed = f"'even' with the assignment {str(rule)!r}, which draws equal shares"
        raise InvalidParameter.of("shares", shares, allowed, "Use another assignment, such as 'global'.")
    if choices.balance is not None:
        hint = "With it, every worker gets as many samples of each class. Leave one of the two out."
        raise InvalidParameter.of("shares", shares, f"'even' with balance={choices.balance.name!r}", hint)
    if choices.sharding not in WEIGHABLE:
        names = " or ".join(map(repr, WEIGHABLE))
        together = "If the training needs samples together, as fit_matrix_completion does, use the assignment 'chunks'."
        hint = f"Its shares are equal. Use sharding={names}. {together}"
        raise InvalidParameter.of("shares", shares, f"'even' with sharding={str(choices.sharding)!r}", hint)
