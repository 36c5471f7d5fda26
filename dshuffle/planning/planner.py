"""From a specification to the plan of every epoch.

The scheduler and every worker can run the same planner and come to the same plans: nothing but the
specification goes in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter, PlanError
from dshuffle.planning.assignment import (
    KNOWN_ASSIGNMENTS,
    Aligned,
    Assignment,
    Chunks,
    Global,
    Local,
    Partial,
    check_balance,
    draw_assignment,
)
from dshuffle.planning.assignment.balance import Classes, draw_classes
from dshuffle.planning.assignment.initial import SHARDINGS, GivenSharding, first_assignment
from dshuffle.planning.caching import CACHINGS, CachingPolicy, Shares
from dshuffle.planning.check_plan import check_plan
from dshuffle.planning.delivery import check_delivery, plan_delivery
from dshuffle.planning.delivery.relay import RELAYS
from dshuffle.planning.epoch_plan import EpochPlan, loading
from dshuffle.planning.holders import cache_capacity, largest_share
from dshuffle.planning.plan import Plan, missing_samples
from dshuffle.planning.randomness import random_words
from dshuffle.planning.types import Ranks


@dataclass(frozen=True, slots=True)
class ShufflePlanSpec:
    """All that the plans of a shuffle depend on.

    Parameters
    ----------
    n_samples, n_workers
        The shape of the job; no fewer samples than workers.
    seed
        Any integer.
    assignment
        Which worker trains on which sample.
    delivery, caching
        Names in :data:`DELIVERIES` and :data:`CACHINGS`.
    sharding
        A name in :data:`SHARDINGS`, or a first assignment that is given (not with ``chunks``). Samples that it
        broadcasts are with every worker in every epoch; all else that is said here is of the other samples.
    cache_fraction
        Fraction of the samples that each worker holds, in [1/n, 1]; None is 1/n, its share alone.
    relay
        How packets of several samples travel: a name in :data:`RELAYS`.
    balance
        Classes of which in every epoch, the first included, each worker trains on equally many samples or one more
        (with ``local``, ``partial`` and ``global``).

    Raises
    ------
    InvalidParameter
        Naming the parameter, its value and what is allowed.

    Examples
    --------
    >>> spec = ShufflePlanSpec(10, 4, seed=0, assignment=Global(), delivery="peer", sharding="random")
    >>> spec.capacity, spec.max_incoming
    (3, 3)
    """

    n_samples: int
    n_workers: int
    seed: int
    assignment: Assignment
    delivery: str
    sharding: str | GivenSharding
    caching: str = "uniform"
    cache_fraction: float | None = None
    relay: str = "pipelined"
    balance: Classes | None = None

    def __post_init__(self) -> None:
        as_integer("n_workers", self.n_workers, 1)
        as_integer("n_samples", self.n_samples, self.n_workers, "There are fewer samples than workers.")
        as_integer("seed", self.seed)
        if not isinstance(self.assignment, Assignment):
            raise InvalidParameter.of("assignment", self.assignment, KNOWN_ASSIGNMENTS)
        known: dict[str, Collection[str]] = {"sharding": SHARDINGS, "caching": CACHINGS, "relay": RELAYS}
        if isinstance(self.sharding, GivenSharding):
            del known["sharding"]
            self.sharding.check(self.n_samples, self.n_workers)
            if isinstance(self.assignment, Chunks):
                hint = "With the assignment 'chunks' whole chunks are dealt out, from the first epoch on."
                raise InvalidParameter.of("sharding", str(self.sharding), f"one of {sorted(SHARDINGS)}", hint)
        for name, names in known.items():
            if getattr(self, name) not in names:
                raise InvalidParameter.of(name, getattr(self, name), f"one of {sorted(names)}")
        if self.balance is not None:
            check_balance(self.balance, self.assignment, self.n_samples)
        check_delivery(self.delivery, self.n_workers, excess=self.has_excess)

    @property
    def n_broadcast(self) -> int:
        """Samples that every worker trains on and holds."""
        return self.sharding.n_broadcast if isinstance(self.sharding, GivenSharding) else 0

    @property
    def n_dealt(self) -> int:
        """Samples that one worker trains on in each epoch: the others."""
        return self.n_samples - self.n_broadcast

    def of_dealt(self) -> ShufflePlanSpec:
        """The specification for these alone, numbered anew."""
        if not self.n_broadcast:
            return self
        assert isinstance(self.sharding, GivenSharding)
        others = self.sharding.others()
        balance = None if self.balance is None else self.balance.only(others)
        sharding = self.sharding.of_others()
        return dataclasses.replace(self, n_samples=len(others), sharding=sharding, balance=balance)

    @property
    def chunk_rows(self) -> int:
        """Samples that always have the same worker: those of a chunk with ``chunks``, else 1."""
        if isinstance(self.assignment, Chunks):
            return self.assignment.rows_for(self.n_samples, self.n_workers)
        return 1

    @property
    def most_workers(self) -> int:
        """Workers that can get a share, at most."""
        return -(-self.n_dealt // self.chunk_rows)

    @property
    def largest_share(self) -> int:
        """Samples that a worker trains on in an epoch, at most."""
        return largest_share(self.n_dealt, self.n_workers, self.chunk_rows) + self.n_broadcast

    @property
    def capacity(self) -> int:
        """Rows that a worker holds between epochs, at most."""
        dealt = cache_capacity(self.cache_fraction, self.n_dealt, self.n_workers, chunk_rows=self.chunk_rows)
        return dealt + self.n_broadcast

    @property
    def has_excess(self) -> bool:
        """Whether workers hold more than their shares."""
        return self.capacity > self.largest_share

    def policy(self) -> CachingPolicy:
        """The caching policy of one shuffle, from its first epoch on."""
        if not self.has_excess:
            return Shares(self.n_workers)
        return CACHINGS[self.caching](self.n_workers, self.capacity, self.seed)

    def first_assignment(self) -> Ranks:
        """``(q,)`` int32, the assignment of epoch 0.

        Raises
        ------
        InvalidParameter
            If a balance is wanted, and the sharding has none.
        """
        n, seed = self.n_workers, self.seed
        if self.balance is not None and self.sharding == "random":
            return draw_classes(self.balance, n, "sharding", seed)
        if isinstance(self.sharding, GivenSharding):
            ranks = self.sharding.assignment()
        else:
            chunk_rows = self.chunk_rows if isinstance(self.assignment, Chunks) else None
            ranks = first_assignment(self.sharding, self.n_samples, n, seed=seed, chunk_rows=chunk_rows)
        if self.balance is not None:
            self.balance.check_balanced("sharding", str(self.sharding), ranks, n)
        return ranks

    @property
    def max_incoming(self) -> int:
        """Rows that a worker can receive in the exchange for one epoch, at most."""
        match self.assignment:
            case Local():
                return 0
            case Partial():
                return self.assignment.n_exchanged(self.n_dealt, self.n_workers)
            case Global() | Chunks():
                return self.largest_share - self.n_broadcast
            case Aligned():
                return self.assignment.most_drawn(self.n_dealt, self.n_workers)


class EpochPlanner:
    """The plans of a shuffle, epoch after epoch; two planners of one specification make the same plans.

    Parameters
    ----------
    spec
        What the plans depend on.
    checks
        Whether to check every plan; of many that make the same plan (see :meth:`EpochPlan.digest`) one is enough.

    Examples
    --------
    >>> spec = ShufflePlanSpec(8, 2, seed=0, assignment=Partial(0.5), delivery="peer", sharding="contiguous")
    >>> planner = EpochPlanner(spec)
    >>> planner.load().for_worker(0).receives
    {-2: array([0, 1, 2, 3])}
    >>> worker = planner.advance().for_worker(0)
    >>> worker.receives, worker.sends
    ({1: array([4, 6])}, {1: array([2, 3])})
    """

    def __init__(self, spec: ShufflePlanSpec, *, checks: bool = True) -> None:
        self.spec = spec
        self.checks = checks
        self.current: EpochPlan | None = None
        # Samples that are broadcast have no part in it: the others are planned for by themselves.
        self._dealt = spec.of_dealt()
        self._last: EpochPlan | None = None
        self._policy = self._dealt.policy()

    def load(self) -> EpochPlan:
        """Epoch 0: every worker reads its share and its excess from the store, in ascending order."""
        spec = self._dealt
        assignment = spec.first_assignment()
        holders = self._policy.first(assignment)
        plan = loading(holders, spec.n_workers)
        return self._found(EpochPlan(0, spec.seed, spec.n_workers, assignment, holders, plan, spec.n_samples))

    def advance(self, delivery: str | None = None) -> EpochPlan:
        """The next epoch: from what the workers hold now to the next assignment.

        Parameters
        ----------
        delivery
            Another one than the specification's, for this epoch alone.

        Raises
        ------
        PlanError
            If :meth:`load` was not called before, or the delivery's plan is wrong.
        """
        spec, last = self._dealt, self._last
        if last is None:
            raise PlanError("advance() was called before load(): there is no epoch to go on from")
        n, epoch = spec.n_workers, last.epoch + 1
        if isinstance(spec.assignment, Local) and not spec.has_excess:
            # Only the order changes, and planning would take cores from the training that it goes on beside.
            return self._found(dataclasses.replace(last, epoch=epoch, plan=Plan.uncoded([], [], []), n_needed=0))
        assignment, packets = draw_assignment(
            spec.assignment,
            last.assignment,
            n,
            seed=spec.seed,
            epoch=epoch,
            holders=last.holders,
            classes=spec.balance,
        )
        seed = int(random_words(1, "delivery", spec.seed, epoch)[0])
        plan = plan_delivery(delivery or spec.delivery, last.holders, assignment, n, seed=seed, start=packets)
        if self.checks:
            check_plan(plan, last.holders, assignment, n, capacity=spec.capacity)
        holders = self._policy.evolve(last.holders, assignment, epoch)
        n_needed = len(missing_samples(last.holders, assignment))
        return self._found(EpochPlan(epoch, spec.seed, n, assignment, holders, plan, n_needed))

    def _found(self, plan: EpochPlan) -> EpochPlan:
        self._last = self.current = plan
        sharding = self.spec.sharding
        if isinstance(sharding, GivenSharding) and sharding.broadcast is not None and len(sharding.broadcast):
            self.current = plan.with_broadcast(sharding.broadcast, sharding.others())
        return self.current
