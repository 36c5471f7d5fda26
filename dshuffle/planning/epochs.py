"""From a specification to the plan of every epoch, and to each worker's part of it.

The scheduler and every worker can run the same planner and come to the same plans: nothing but the
specification goes in.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

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
from dshuffle.planning.bits import group_by
from dshuffle.planning.caching import CACHINGS, CachingPolicy, Shares
from dshuffle.planning.check import check_plan
from dshuffle.planning.chunked import largest_share
from dshuffle.planning.classes import Classes, draw_classes
from dshuffle.planning.delivery import check_delivery, plan_delivery
from dshuffle.planning.holders import cache_capacity, held_by
from dshuffle.planning.order import epoch_permutation
from dshuffle.planning.plan import SERVER, STORE, Plan, missing_samples
from dshuffle.planning.randomness import random_words
from dshuffle.planning.relay import RELAYS
from dshuffle.planning.sharding import SHARDINGS, GivenSharding, first_assignment
from dshuffle.planning.values import Holders, Ranks, Samples, as_integer


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
        A name in :data:`SHARDINGS`, or a first assignment that is given (not with ``chunks``).
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
    def chunk_rows(self) -> int:
        """Samples that always have the same worker: those of a chunk with ``chunks``, else 1."""
        if isinstance(self.assignment, Chunks):
            return self.assignment.rows_for(self.n_samples, self.n_workers)
        return 1

    @property
    def most_workers(self) -> int:
        """Workers that can get a share, at most."""
        return -(-self.n_samples // self.chunk_rows)

    @property
    def largest_share(self) -> int:
        """Samples that a worker trains on in an epoch, at most."""
        return largest_share(self.n_samples, self.n_workers, self.chunk_rows)

    @property
    def capacity(self) -> int:
        """Rows that a worker holds between epochs, at most."""
        return cache_capacity(self.cache_fraction, self.n_samples, self.n_workers, chunk_rows=self.chunk_rows)

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
                return self.assignment.n_exchanged(self.n_samples, self.n_workers)
            case Global() | Chunks():
                return self.largest_share
            case Aligned():
                return self.assignment.most_drawn(self.n_samples, self.n_workers)


@dataclass(frozen=True, slots=True, eq=False)
class WorkerPlan:
    """One worker's part of an epoch.

    Parameters
    ----------
    rank
        The worker, or :data:`SERVER`.
    epoch
        The epoch that the exchange leads to.
    own
        Ascending int64, the samples that it trains on.
    permutation
        ``(own,)`` int64, positions in ``own`` in the order of training.
    held
        Ascending int64, the samples that it holds once the exchange is committed, its own included.
    receives
        Source (a rank, :data:`SERVER` or :data:`STORE`) -> int64 samples in the order of the plan. Empty if the plan
        is coded: how packets travel is for :func:`~dshuffle.planning.route` to say.
    sends
        Destination rank -> int64 samples in the order of the plan: the same array as that worker's
        ``receives``.
    """

    rank: int
    epoch: int
    own: Samples
    permutation: Samples
    held: Samples
    receives: dict[int, Samples]
    sends: dict[int, Samples]

    @property
    def order(self) -> Samples:
        """``(own,)`` int64, the samples that it trains on, in training order."""
        return self.own[self.permutation]


@dataclass(frozen=True, slots=True, eq=False)
class EpochPlan:
    """The exchange that leads to an epoch.

    Parameters
    ----------
    epoch
        From 0, whose exchange is the loading from the store.
    seed, n_workers
        The specification's.
    assignment
        ``(q,)`` int32, the worker that trains on each sample.
    holders
        ``(q, words)`` uint64, once the exchange is committed.
    plan
        The packets.
    n_needed
        Samples that some worker is to train on and did not hold.
    """

    epoch: int
    seed: int
    n_workers: int
    assignment: Ranks
    holders: Holders
    plan: Plan
    n_needed: int

    @property
    def shares(self) -> tuple[int, int]:
        """Samples of the workers with the fewest and the most."""
        counts = np.bincount(self.assignment, minlength=self.n_workers)
        return int(counts.min()), int(counts.max())

    def digest(self) -> int:
        """A checksum of all that was decided, by which members can tell that they made the same plan."""
        value = 0
        plan = self.plan
        for array in (self.assignment, plan.offsets, plan.samples, plan.destinations, plan.senders):
            value = zlib.crc32(array.data, value)
        return value

    def for_worker(self, rank: int) -> WorkerPlan:
        """What one worker, or the server, has to know."""
        plan = self.plan
        # Rows of their own; of a coded plan none.
        rows = np.arange(0 if plan.coded else plan.n_packets)
        outgoing = rows[plan.senders[rows] == rank]
        sends = _split(plan.samples[outgoing], plan.destinations[outgoing], self.n_workers)
        if rank == SERVER:
            nothing = np.empty(0, dtype=np.int64)
            return WorkerPlan(rank, self.epoch, nothing, nothing, nothing, {}, sends)
        incoming = rows[plan.destinations[rows] == rank]
        own = np.flatnonzero(self.assignment == rank)
        return WorkerPlan(
            rank=rank,
            epoch=self.epoch,
            own=own,
            permutation=epoch_permutation(len(own), seed=self.seed, epoch=self.epoch, rank=rank),
            held=np.flatnonzero(held_by(self.holders, rank)),
            receives=_split(plan.samples[incoming], plan.senders[incoming], self.n_workers),
            sends=sends,
        )


def _split(samples: Samples, keys: Ranks, n_workers: int) -> dict[int, Samples]:
    """Samples by key (a rank, SERVER or STORE), in the order given."""
    order, offsets = group_by(keys - STORE, n_workers - STORE)
    grouped = samples[order]
    return {key + STORE: grouped[offsets[key] : offsets[key + 1]] for key in np.flatnonzero(np.diff(offsets)).tolist()}


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
        self._policy = spec.policy()

    def load(self) -> EpochPlan:
        """Epoch 0: every worker reads its share and its excess from the store, in ascending order."""
        spec = self.spec
        assignment = spec.first_assignment()
        holders = self._policy.first(assignment)
        held = [np.flatnonzero(held_by(holders, worker)) for worker in range(spec.n_workers)]
        samples = np.concatenate(held)
        destinations = np.repeat(np.arange(spec.n_workers), [len(ids) for ids in held])
        plan = Plan.uncoded(samples, destinations, np.full(len(samples), STORE))
        self.current = EpochPlan(0, spec.seed, spec.n_workers, assignment, holders, plan, spec.n_samples)
        return self.current

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
        spec, last = self.spec, self.current
        if last is None:
            raise PlanError("advance() was called before load(): there is no epoch to go on from")
        n, epoch = spec.n_workers, last.epoch + 1
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
        self.current = EpochPlan(epoch, spec.seed, n, assignment, holders, plan, n_needed)
        return self.current
