"""What a user chooses, what the plans of a shuffle depend on, and plans: for one worker alone, or for all workers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Self

import numpy as np

from dshuffle.checks import as_integer, as_ratio
from dshuffle.errors import InvalidParameter, PlanError
from dshuffle.planning.assignment import Assignment, Draw, EpochDraw, Global, parse_assignment
from dshuffle.planning.assignment.balance import Classes, draw_classes
from dshuffle.planning.assignment.rules import SHARDINGS, GivenSharding, first_blocks, first_ranks
from dshuffle.planning.assignment.slots import Blocks, Slots, WorkerChange, WorkerHistory
from dshuffle.planning.caching import CACHINGS, Shares
from dshuffle.planning.delivery import AUTO, DELIVERIES, SIMPLEST, PlanInput, check_delivery, get_delivery
from dshuffle.planning.delivery.relay import RELAYS
from dshuffle.planning.epoch_plan import (
    STORE,
    EpochPlan,
    Moves,
    Packets,
    WorkerPart,
    loading,
    split_by_worker,
)
from dshuffle.planning.exchange_epochs import (
    BETWEEN,
    ExchangeEpochs,
    Weights,
    cache_capacity,
    largest_share,
    share_sizes,
)
from dshuffle.planning.randomness import DRAW_VERSION, random_words
from dshuffle.planning.shares import EVEN, SharePolicy, parse_shares
from dshuffle.planning.types import Holders, Ranks, Samples, missing_samples

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
        The sharding is then ``"random"``, or stratified by these labels.
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
    (Partial(fraction=0.1), 'partial:0.1 + clique, ring')
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
    between: str = "redraw"
    seed: int = 0
    shares: SharePolicy = EVEN

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        put("assignment", parse_assignment(self.assignment))
        if self.caching is None:
            put("caching", self.assignment.preferred_caching)
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
        put("seed", as_integer("seed", self.seed))
        put("every", as_integer("every", self.every, 1))
        name = str(self.assignment)
        if self.every > 1 and not self.assignment.moves:
            hint = f"The assignment {name!r} has no exchange in any epoch."
            raise InvalidParameter.of("every", self.every, f"1 with assignment={name!r}", hint)
        if self.every == 1 and self.between != "redraw":
            hint = "Every epoch has an exchange, so there is none between. Set every to 2 or more."
            raise InvalidParameter.of("between", self.between, "'redraw' with every=1", hint)
        if isinstance(self.sharding, GivenSharding) and self.assignment.in_chunks:
            hint = "The assignment 'chunks' gives out whole chunks from the first epoch on."
            raise InvalidParameter.of("sharding", str(self.sharding), f"one of {sorted(SHARDINGS)}", hint)
        balance: object = self.balance
        if isinstance(balance, str):
            put("balance", Classes(balance))
        elif not (balance is None or isinstance(balance, Classes)):
            raise InvalidParameter.because("balance", "it must be None, the name of an array of labels, or Classes")
        if self.balance is not None:
            label = self.balance.name
            if not self.assignment.can_balance:
                hint = f"{self.assignment.name!r} cannot preserve class balance. Use 'global' or 'local'."
                raise InvalidParameter.of("balance", label, f"None with the assignment {name!r}", hint)
            if str(self.sharding) not in ("random", f"stratified:{label}"):
                hint = "Others may spread the classes unevenly. Leave one of the two out."
                balanced = f"'random' or 'stratified:{label}' with balance={label!r}"
                raise InvalidParameter.of("sharding", str(self.sharding), balanced, hint)
        put("shares", parse_shares(self.shares))
        if not self.shares.is_even:
            self._check_unequal()

    def _check_unequal(self) -> None:
        """Refuse a way of shuffling that cannot have unequal shares."""
        shares, name = str(self.shares), str(self.assignment)
        if not self.assignment.can_weigh:
            allowed = f"'even' with the assignment {name!r}, which draws equal shares"
            raise InvalidParameter.of("shares", shares, allowed, "Use another assignment, such as 'global'.")
        if self.balance is not None:
            hint = "With it, every worker gets as many samples of each class. Leave one of the two out."
            raise InvalidParameter.of("shares", shares, f"'even' with balance={self.balance.name!r}", hint)
        if self.sharding not in WEIGHABLE:
            hint = (
                f"Its shares are equal. Use sharding={' or '.join(map(repr, WEIGHABLE))}. If the training needs "
                "samples together, as fit_matrix_completion does, use the assignment 'chunks'."
            )
            raise InvalidParameter.of("shares", shares, f"'even' with sharding={str(self.sharding)!r}", hint)

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
        epochs: dict[str, Any] = {} if rule.moves else {"every": 1, "between": "redraw"}
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
        return self.is_auto or DELIVERIES[self.delivery].coded

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
        texts = {name: str(getattr(self, name)) for name in ("assignment", "sharding", "shares")}
        return {**self.keywords(), **texts, "balance": "" if self.balance is None else self.balance.name}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Choices:
        """The choices that :meth:`to_dict` wrote; arrays are known by name alone."""
        return cls(**{**fields, "balance": fields["balance"] or None})


MOST_REPLAYED = 10**5
"""Largest epoch of an assignment that depends on the epochs before."""


@dataclass(frozen=True, slots=True)
class ShuffleSpec:
    """Everything that the plans of a shuffle depend on."""

    n_samples: int  # n_samples, n_workers: Number of samples and number of workers; at least one sample per worker.
    n_workers: int
    # The way of shuffling, with a delivery of :data:`DELIVERIES`. Samples that its sharding broadcasts are held by
    # every worker in every epoch; only the other samples are drawn and exchanged.
    choices: Choices
    draw_version: int = DRAW_VERSION  # Version of the random draws, so that no release reorders samples silently.
    first_epoch: int = 0  # Epoch with which the shuffle begins: workers read their shares of it from the store.
    # How the workers changed before, for assignments with which workers that stay keep their samples.
    changes: tuple[WorkerChange, ...] = ()
    # Host of each rank, numbered; empty if it does not matter. Peers on the same host are preferred as senders.
    hosts: tuple[int, ...] = ()
    # Relative share of each rank in epoch 0, until the first change; none for equal shares.
    first_weights: Weights = ()

    def __post_init__(self) -> None:
        if self.draw_version != DRAW_VERSION:
            hint = "Other releases of dshuffle draw other samples from the same seed. Use the release that wrote this."
            raise InvalidParameter.of("draw_version", self.draw_version, f"{DRAW_VERSION} in this release", hint)
        as_integer("n_workers", self.n_workers, 1)
        as_integer("n_samples", self.n_samples, self.n_workers, "There are fewer samples than workers.")
        if self.n_samples >= 2**63:
            raise InvalidParameter.of("n_samples", self.n_samples, "below 2**63: sample numbers have 64 bits")
        self.check_epoch("first_epoch", self.first_epoch)
        last = self.history.epoch
        as_integer("first_epoch", self.first_epoch, last, f"The last change of workers is in epoch {last}.")
        choices, rule, weights = self.choices, self.choices.assignment, self.weights
        if isinstance(choices.sharding, GivenSharding):
            choices.sharding.check(self.n_samples, self.n_workers)
        elif choices.sharding not in SHARDINGS:
            raise InvalidParameter.of("sharding", choices.sharding, f"one of {sorted(SHARDINGS)}")
        order = None if choices.balance is None else choices.balance.order
        if order is not None and len(order) != self.n_samples:
            raise InvalidParameter.of(f"len(balance {str(choices.balance)!r})", len(order), str(self.n_samples))
        if weights:
            least, n_units = rule.least_share(self.n_samples, self.n_workers), self.n_samples // self.chunk_rows
            as_integer("n_samples", n_units, self.n_workers, "Unequal shares need a whole chunk for each worker.")
            smallest = int(share_sizes(n_units, weights).min()) * self.chunk_rows
            if smallest < least:
                reason = f"the smallest share has {smallest} samples, and {str(rule)!r} exchanges {least} of each rank"
                hint = "Use more equal shares, a smaller Q, or the assignment 'global'."
                raise InvalidParameter.because("shares", reason, hint)
            largest, fraction = self.largest_share, choices.cache_fraction
            if fraction is not None and largest > fraction * self.n_samples:
                reason = f"the largest share has {largest} of {self.n_samples} samples, and cache_fraction={fraction}"
                hint = "Use a larger cache_fraction, or more equal shares."
                raise InvalidParameter.because("shares", reason, hint)
        check_delivery(choices.delivery, self.n_workers, excess=self.has_excess)

    @classmethod
    def at_first(cls, n_samples: int, n_workers: int, choices: Choices) -> Self:
        """The specification of a session that begins with epoch 0, with the shares that the choices begin with."""
        return cls(n_samples, n_workers, choices, first_weights=choices.shares.first(n_workers, ()))

    def check_epoch(self, name: str, epoch: int) -> None:
        """Refuse an epoch that does not exist, or one for which too many earlier epochs would have to be replayed."""
        rule = self.choices.assignment
        most = 2**63 - 1 if rule.forgets or not rule.moves else MOST_REPLAYED
        if as_integer(name, epoch, 0) > most:
            hint = f"{str(rule)!r} depends on all epochs before." if most == MOST_REPLAYED else ""
            raise InvalidParameter.of(name, epoch, f"an integer in [0, {most}]", hint)

    def with_choices(self, **changes: Any) -> ShuffleSpec:
        """The same job with other choices."""
        return dataclasses.replace(self, choices=dataclasses.replace(self.choices, **changes))

    def with_workers(self, n_workers: int) -> ShuffleSpec:
        """The same job with another number of workers."""
        return dataclasses.replace(self, n_workers=n_workers, hosts=(), first_weights=())

    @property
    def weights(self) -> Weights:
        """Relative share of each rank now; none for equal shares."""
        return self.history.weights

    @property
    def history(self) -> WorkerHistory:
        """How many workers there are, and how they have changed."""
        return WorkerHistory(self.n_workers, self.changes, self.first_weights)

    def with_history(self, history: WorkerHistory, first_epoch: int) -> ShuffleSpec:
        """The same job from an epoch on, with other workers."""
        members = {entry.name: getattr(history, entry.name) for entry in dataclasses.fields(history)}
        return dataclasses.replace(self, **members, first_epoch=first_epoch, hosts=())

    @property
    def keeps_samples(self) -> bool:
        """Whether workers that stay keep their samples when others join or leave."""
        # Otherwise ranks do not depend on the workers of earlier epochs, or they are drawn for all samples at once.
        # Then they are what they would be if there had always been as many workers as now.
        return self.slots() is not None

    @property
    def n_broadcast(self) -> int:
        """Samples that every worker trains on and holds."""
        sharding = self.choices.sharding
        return sharding.n_broadcast if isinstance(sharding, GivenSharding) else 0

    @property
    def n_dealt(self) -> int:
        """Number of samples that are not broadcast: one worker trains on each in an epoch."""
        return self.n_samples - self.n_broadcast

    def of_dealt(self) -> ShuffleSpec:
        """Return the specification for the samples that are not broadcast, renumbered from 0."""
        if not self.n_broadcast:
            return self
        assert isinstance(self.choices.sharding, GivenSharding)
        choices = dataclasses.replace(self.choices, sharding=self.choices.sharding.of_others())
        return ShuffleSpec(self.n_dealt, self.n_workers, choices, first_epoch=self.first_epoch, hosts=self.hosts)

    @property
    def chunk_rows(self) -> int:
        """Samples that always have the same worker: those of a chunk with ``chunks``, else 1."""
        return self.choices.assignment.unit_for(self.n_samples, self.n_workers)

    @property
    def most_workers(self) -> int:
        """Maximum number of workers that can get a share."""
        return -(-self.n_dealt // self.chunk_rows)

    @property
    def largest_share(self) -> int:
        """Maximum number of samples that a worker trains on in an epoch."""
        return largest_share(self.n_dealt, self.n_workers, self.chunk_rows, self.weights) + self.n_broadcast

    @property
    def capacity(self) -> int:
        """Rows that a worker holds between epochs, at most."""
        dealt = cache_capacity(self.choices.cache_fraction, self.n_dealt, self.n_workers, chunk_rows=self.chunk_rows)
        return max(dealt + self.n_broadcast, self.largest_share)

    def room(self, rank: int | None = None) -> tuple[int, int]:
        """Rows that a rank holds between epochs, and rows that it receives in one exchange, at most."""
        # Without a rank, those of the one with the largest share.
        if rank is None or not self.weights or self.choices.cache_fraction is not None:
            return self.capacity, self.max_incoming
        n_units, short = divmod(self.n_dealt, self.chunk_rows)  # any rank may get a short chunk at the end
        share = int(share_sizes(n_units, self.weights)[rank]) * self.chunk_rows + short
        return share + self.n_broadcast, self.choices.assignment.most_incoming(self.n_dealt, self.n_workers, share)

    @property
    def has_excess(self) -> bool:
        """Whether workers hold more than their shares."""
        return self.capacity > self.largest_share

    def policy(self) -> Shares:
        """Return a new caching policy for one shuffle."""
        policy = CACHINGS[str(self.choices.caching)] if self.has_excess else Shares
        return policy(self.n_workers, self.capacity, self.choices.seed)

    def first_ranks(self) -> Ranks:
        """Return the assignment of epoch 0, ``(q,)`` int32."""
        if (blocks := self.blocks(0)) is not None:
            return blocks.all_ranks()
        n, seed = self.n_workers, self.choices.seed
        if isinstance(sharding := self.choices.sharding, GivenSharding):
            return sharding.assignment()
        if self.choices.balance is not None:
            return draw_classes(self.choices.balance, n, "sharding", seed)
        return first_ranks(sharding, self.n_samples, n, seed=seed, chunk_rows=self.chunk_rows)

    def blocks(self, epoch: int) -> Blocks | None:
        """The ranks of an epoch as a function; None if they depend on the epochs before, on labels, or are given."""
        if self.changes:
            return None
        epoch = self.choices.exchange_epochs.last(epoch)
        if epoch == 0 or not self.choices.assignment.moves:
            return self._first_blocks()
        if self.choices.balance is not None or self.n_broadcast:
            return None
        choices, n_samples, n = self.choices, self.n_samples, self.n_workers
        return choices.assignment.blocks(Draw(n_samples, n, choices.seed, epoch, weights=self.weights))

    def slots(self) -> Slots | None:
        """The samples in all slots as a function; None without slots, or if the first ranks are not a function."""
        first, choices = self._first_blocks(), self.choices
        slots = None if first is None else choices.assignment.slots(first, choices.seed, self.changes)
        return slots and dataclasses.replace(slots, epochs=choices.exchange_epochs)

    def ranks_at(self, epoch: int) -> Callable[[Samples], Ranks] | None:
        """What returns the workers of ``(k,)`` samples in an epoch; None if all samples have to be drawn for that."""
        if (blocks := self.blocks(epoch)) is not None:
            return blocks.ranks_of
        slots = self.slots()
        return None if slots is None else functools.partial(slots.ranks_of, epoch=epoch)

    def draw_first(self) -> EpochDraw:
        """Draw the ranks of all samples in epoch 0, or in the first epoch of the present workers."""
        slots = self.slots() if self.choices.assignment.moves or self.changes else None
        if slots is None:
            return EpochDraw(self.first_ranks())
        samples = slots.all_samples(self.history.epoch)
        ranks = np.empty(self.n_samples, np.int32)
        ranks[samples] = np.repeat(np.arange(self.n_workers, dtype=np.int32), slots.last.sizes)
        return EpochDraw(ranks, slots=samples)

    def _first_blocks(self) -> Blocks | None:
        """The ranks of epoch 0 as a function; None if they depend on labels, or are given."""
        choices, n = self.choices, self.history.first_n_workers
        if choices.balance is not None or self.n_broadcast:
            return None
        unit = choices.assignment.unit_for(self.n_samples, n)
        return first_blocks(choices.sharding, self.n_samples, n, choices.seed, unit, self.first_weights)

    def draw(self, before: EpochDraw, epoch: int, holders: Holders | None = None) -> EpochDraw:
        """Draw the ranks of all samples for an epoch with an exchange, given what was drawn for the previous one."""
        rule, seed, classes = self.choices.assignment, self.choices.seed, self.choices.balance
        ranks, slots = (None, None) if rule.forgets else (before.ranks, before.slots)
        n_samples = len(before.ranks)
        return rule.draw(Draw(n_samples, self.n_workers, seed, epoch, ranks, holders, classes, slots, self.weights))

    @property
    def max_incoming(self) -> int:
        """Rows that a worker can receive in the exchange for one epoch, at most."""
        share = self.largest_share - self.n_broadcast
        return self.choices.assignment.most_incoming(self.n_dealt, self.n_workers, share)


def plans_own_parts(spec: ShuffleSpec, delivery: str) -> bool:
    """Whether every worker can plan its own part of each epoch."""
    if spec.has_excess or not get_delivery(delivery).plans_own_parts:
        return False
    first_exchange = spec.choices.every
    return spec.slots() is not None or (spec.blocks(0) is not None and spec.blocks(first_exchange) is not None)


class OwnPlanner:
    """Plan the parts of one worker, for any epochs; :func:`plans_own_parts` says whether that is possible."""

    # With ``partial``, the epoch after the last one takes less time than others.
    # spec, rank: specification of the shuffle, and the worker.

    def __init__(self, spec: ShuffleSpec, rank: int) -> None:
        self.spec, self.rank = spec, rank
        self._slots = spec.slots()
        self._known: dict[int, Samples] = {}  # epoch with an exchange -> samples by slot

    def plan(self, epoch: int, delivery: str) -> WorkerPart:
        """Plan an epoch."""
        spec, rank, moves = self.spec, self.rank, self.moves(epoch)
        receives, sends = ({STORE: moves.arriving} if len(moves.arriving) else {}), dict[int, Samples]()
        if epoch != spec.first_epoch and not get_delivery(delivery).reads_store:
            receives = split_by_worker(moves.arriving, moves.senders, spec.n_workers)
            sends = split_by_worker(moves.leaving, moves.receivers, spec.n_workers)
        order = spec.choices.exchange_epochs.permutation(moves.own, seed=spec.choices.seed, epoch=epoch, rank=rank)
        return WorkerPart(rank, epoch, moves.own, order, moves.own, receives, sends)

    def shares(self, epoch: int) -> tuple[int, int]:
        """Smallest and largest number of samples that a worker trains on."""
        return self._blocks(epoch).shares if self._slots is None else self._slots.shares

    def moves(self, epoch: int) -> Moves:
        """What comes and goes for an epoch; in the first one everything comes from the store."""
        begins, slots, rank = epoch == self.spec.first_epoch, self._slots, self.rank
        if begins or not self.spec.choices.has_exchange(epoch):
            own = self._blocks(epoch).samples_of(rank) if slots is None else np.sort(self._in_slots(slots, epoch)[1])
            return Moves.loading(own) if begins else Moves.none(own)
        if slots is not None:
            return self._moves_of_slots(slots, epoch)
        before, after = self._blocks(epoch - 1), self._blocks(epoch)
        own, held = after.samples_of(rank), before.samples_of(rank)
        return Moves.of(rank, own, before.ranks_of(own), held, after.ranks_of(held))

    def _blocks(self, epoch: int) -> Blocks:
        blocks = self.spec.blocks(epoch)
        assert blocks is not None
        return blocks

    def _moves_of_slots(self, slots: Slots, epoch: int) -> Moves:
        rank, (last, before) = self.rank, self._in_slots(slots, epoch - 1)
        exchange, rounds = slots.exchange(slots.last, epoch), np.arange(slots.last.count)
        own_ranks = np.full(len(rounds), rank)
        emptied = exchange.emptied(own_ranks, rounds)
        sources, destinations = (exchange.shifted(own_ranks, rounds, sign) for sign in (-1, 1))
        arriving = slots.samples_at(sources, exchange.emptied(sources, rounds), epoch - 1)
        leaving, after = before[emptied], before.copy()
        after[emptied] = arriving
        self._known = {last: before, epoch: after}
        # A round never leads back to the worker itself.
        received, sent = np.argsort(arriving), np.argsort(leaving)
        senders, receivers = sources[received].astype(np.int32), destinations[sent].astype(np.int32)
        return Moves(np.sort(after), arriving[received], senders, leaving[sent], receivers)

    def _in_slots(self, slots: Slots, epoch: int) -> tuple[int, Samples]:
        """The last epoch up to this one in which samples changed slots, and the worker's samples by slot in it."""
        epoch = max(slots.last.epoch, self.spec.choices.exchange_epochs.last(epoch))
        if epoch not in self._known:
            self._known = {epoch: slots.samples_of(self.rank, epoch)}
        return epoch, self._known[epoch]


OWN_NBYTES = 90
"""Bytes for each sample of a share that a worker plans alone."""

ALL_NBYTES = 110
"""Bytes for each sample of a plan for all workers, measured as a peak."""

HELD_NBYTES = 25
"""Bytes for each copy of a sample that such a plan loads first if workers hold excess, measured as a peak."""


def plan_nbytes(spec: ShuffleSpec) -> int:
    """Bytes that planning takes at most on every worker, and on the server."""
    if plans_own_parts(spec, spec.choices.delivery):
        return OWN_NBYTES * spec.largest_share
    held = spec.capacity * spec.n_workers if spec.has_excess else 0
    masks = 8 * ((spec.n_workers - 1) // 64)  # beyond the first word of the holder masks
    return (ALL_NBYTES + masks) * spec.n_samples + HELD_NBYTES * held


class EpochPlanner:
    """Make the plans of a shuffle, epoch by epoch."""

    # Planners with the same specification make the same plans.

    def __init__(self, spec: ShuffleSpec) -> None:
        self.spec = spec
        self.current: EpochPlan | None = None
        # Broadcast samples never move, so the other samples are planned alone.
        self._dealt = spec.of_dealt()
        self._last: EpochPlan | None = None
        self._drawn: EpochDraw | None = None
        # Epochs whose server may fail, so that they are planned again: who held what before, what was drawn, the plan.
        self._served: dict[int, tuple[Holders, EpochDraw, EpochPlan]] = {}
        self._policy = self._dealt.policy()

    def load(self, epoch: int | None = None) -> EpochPlan:
        """Plan the first epoch: every worker reads its share and its excess from the store, in ascending order."""
        # If ranks depend on earlier epochs of the same workers, these are drawn first.
        spec, first, rule = self._dealt, self._dealt.first_epoch, self._dealt.choices.assignment
        exchanges, draw = spec.choices.exchange_epochs, spec.draw_first()
        if exchanges.last(first) and rule.forgets:
            draw = spec.draw(draw, exchanges.last(first))
        holders = self._policy.first(draw.ranks)
        epoch = first if epoch is None else epoch
        begin = first if rule.forgets or not rule.moves else spec.history.epoch
        for later in exchanges.after(begin, epoch if rule.moves or spec.has_excess else first):
            draw = spec.draw(draw, later, holders)
            holders = self._policy.evolve(holders, draw.ranks, later)
        return self._found(epoch, draw, holders, loading(holders, spec.n_workers), spec.n_samples, loads=True)

    def advance(self, delivery: str | None = None) -> EpochPlan:
        """Plan the next epoch: the exchange from the current partitions to the next assignment."""
        spec, last, before = self._dealt, self._last, self._drawn
        if last is None or before is None:
            raise PlanError("advance() was called before load(). Call load() first.")
        choices, epoch = spec.choices, last.epoch + 1
        if not choices.exchange_epochs.has_exchange(epoch) or (not choices.assignment.moves and not spec.has_excess):
            # Only the order changes, and planning would take cores from the training that it goes on beside.
            return self._found(epoch, before, last.holders, Packets.uncoded([], [], []), 0)
        draw, name = spec.draw(before, epoch, last.holders), delivery or choices.delivery
        packets, n_needed = self._packets(epoch, last.holders, draw, name)
        holders = self._policy.evolve(last.holders, draw.ranks, epoch)
        plan = self._found(epoch, draw, holders, packets, n_needed)
        self._served = {number: served for number, served in self._served.items() if number == epoch - 1}
        if get_delivery(name).without_server != name:
            assert self._last is not None
            self._served[epoch] = last.holders, draw, self._last
        return plan

    def again(self, epoch: int, delivery: str | None = None) -> EpochPlan:
        """The plan of the current epoch. It may have another delivery if that of the first plan needs a server."""
        if epoch in self._served:
            before, draw, plan = self._served[epoch]
            # Not the holders: a policy may remember which epochs it has seen.
            packets, _ = self._packets(epoch, before, draw, delivery or self.spec.choices.delivery)
            return self._with_broadcast(dataclasses.replace(plan, packets=packets))
        if self.current is None or self.current.epoch != epoch:
            raise PlanError(f"epoch {epoch} cannot be planned again: it is not the current one")
        return self.current

    def _packets(self, epoch: int, before: Holders, draw: EpochDraw, delivery: str) -> tuple[Packets, int]:
        spec, n = self._dealt, self._dealt.n_workers
        seed = int(random_words(1, "delivery", spec.choices.seed, epoch)[0])
        plan_input = PlanInput(before, draw.ranks, n, seed, draw.packets, spec.hosts, spec.weights)
        packets = get_delivery(delivery).plan(plan_input)
        delivered = packets.samples[draw.ranks[packets.samples] == packets.destinations]
        needed = missing_samples(before, draw.ranks)
        if not np.array_equal(np.sort(delivered), needed):
            raise PlanError(f"the delivery {delivery!r} does not give every worker exactly the samples that it lacks")
        return packets, len(needed)

    def _found(
        self, epoch: int, draw: EpochDraw, holders: Holders, packets: Packets, n_needed: int, *, loads: bool = False
    ) -> EpochPlan:
        spec, epochs = self._dealt, self._dealt.choices.exchange_epochs
        plan = EpochPlan(
            epoch, spec.choices.seed, spec.n_workers, draw.ranks, holders, packets, n_needed, epochs=epochs
        )
        self._last, self._drawn = plan, draw
        self.current = self._with_broadcast(plan, loads=loads)
        return self.current

    def _with_broadcast(self, plan: EpochPlan, *, loads: bool = False) -> EpochPlan:
        sharding = self.spec.choices.sharding
        if isinstance(sharding, GivenSharding) and sharding.broadcast is not None and sharding.n_broadcast:
            return plan.with_broadcast(sharding.broadcast, sharding.others(), loads=loads)
        return plan
