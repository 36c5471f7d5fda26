"""What an assignment is; ``local``, ``global``, ``chunks`` and ``partial:Q``; and shardings, the first assignments."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from dshuffle.checks import as_indices, as_integer, as_ranks, as_ratio
from dshuffle.errors import InvalidParameter, PlanError
from dshuffle.planning.assignment.balance import Classes, draw_classes
from dshuffle.planning.assignment.slots import Blocks, SlotExchange, Slots, WorkerChange
from dshuffle.planning.epoch_plan import Packets
from dshuffle.planning.exchange_epochs import Weights
from dshuffle.planning.types import NO_SAMPLES, Holders, Ranks, Samples, group_by


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """What the ranks of one epoch depend on."""

    # n_samples, n_workers, seed, epoch: Numbers of samples and workers, seed of the shuffle, and the epoch to draw.
    n_samples: int
    n_workers: int
    seed: int
    epoch: int
    # ``(q,)`` int32, the worker that trained on each sample in epoch ``epoch - 1``; None for rules that ``forget``.
    ranks_before: Ranks | None = None
    # ``(q, words)`` masks of who holds what in epoch ``epoch - 1``, for rules with ``needs_holders``.
    holders: Holders | None = None
    classes: Classes | None = None  # Classes to keep balanced, for rules with ``can_balance``.
    # ``(q,)`` int64, the samples in the slots of worker 0, then of worker 1, and so on, for rules with slots. None
    # means ascending samples.
    slots: Samples | None = None
    weights: Weights = ()  # Relative share of each rank, for rules with ``can_weigh``; none for equal shares.

    @property
    def previous(self) -> Ranks:
        """The ranks of the epoch before."""
        if self.ranks_before is None:
            raise PlanError("the assignment declares forgets = True, so draw.previous does not exist. Remove forgets")
        return self.ranks_before


@dataclass(frozen=True, slots=True, eq=False)
class EpochDraw:
    """The ranks of one epoch, and what was drawn with them."""

    ranks: Ranks  # ``(q,)`` int32, the worker that trains on each sample.
    # Perfect packets that deliver some of the samples that workers need, with ``aligned``.
    packets: Packets | None = None
    slots: Samples | None = None  # ``(q,)`` int64, the samples in the slots, for rules with slots.


class Assignment(ABC):
    """A rule for which worker trains on which sample in each epoch."""

    __slots__ = ()

    name: ClassVar[str]  # What users call it, without a parameter.
    forms: ClassVar[str]  # How it can be written, for error messages.
    moves: ClassVar[bool] = True  # Whether samples change workers.
    # Whether the ranks of an epoch do not depend on the epochs before. Sessions then draw any epoch at once, and
    # ``draw`` gets no ``previous``. Without this declaration, a session that begins later draws all earlier epochs.
    forgets: ClassVar[bool] = False
    needs_holders: ClassVar[bool] = False  # Whether the draw depends on who holds what.
    in_chunks: ClassVar[bool] = False  # Whether it moves whole chunks.
    preferred_caching: ClassVar[str] = "uniform"  # The caching policy to use unless another one is chosen.
    can_weigh: ClassVar[bool] = False  # Whether it can draw unequal shares, which are refused otherwise.
    can_balance: ClassVar[bool] = False  # Whether it can keep classes balanced.

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, parameter: str | None) -> Self:
        """The rule with the parameter that followed its name, if any; ValueError if it cannot be written like this."""
        if parameter is not None:
            raise ValueError(parameter)
        return cls()

    def draw(self, draw: Draw) -> EpochDraw:
        """Draw the ranks of an epoch; those of :meth:`blocks`, if they are a function."""
        blocks = self.blocks(draw)
        assert blocks is not None
        return EpochDraw(blocks.all_ranks())

    def blocks(self, draw: Draw) -> Blocks | None:
        """The ranks of an epoch from 1 as a function; None if they depend on the epoch before."""
        return None

    def slots(self, first: Blocks, seed: int, changes: Sequence[WorkerChange] = ()) -> Slots | None:
        """The samples in all slots as a function, from the ranks of epoch 0; None for rules without slots.

        Workers that stay keep their samples when workers change.
        """
        return None

    def warning(self, n_workers: int) -> str:
        """What a user should know about this rule on this many workers; empty if nothing."""
        return ""

    @property
    def shuffled_fraction(self) -> float:
        """Q, the fraction of its share that every worker gives up and receives again; 1 for a draw over all samples."""
        return 1.0

    @property
    def redraws_all(self) -> bool:
        """Whether every epoch is a new draw over all single samples."""
        return self.forgets and not self.in_chunks

    @property
    def unit(self) -> int | None:
        """Samples that always have the same worker: 1, or the rows of a chunk; None if only a dataset tells."""
        return 1

    def with_unit(self, rows: int) -> Assignment:
        """The same rule with chunks of this many rows; a rule for single samples is left as it is."""
        return self

    def unit_for(self, n_samples: int, n_workers: int) -> int:
        """:attr:`unit`, or InvalidParameter if it is unknown, or there are fewer chunks than workers."""
        return 1

    def least_share(self, n_samples: int, n_workers: int) -> int:
        """Smallest number of samples that a rank must have."""
        return self.unit_for(n_samples, n_workers)

    def most_incoming(self, n_samples: int, n_workers: int, largest_share: int) -> int:
        """Largest number of samples that a worker can receive in one exchange."""
        return largest_share

    def missing_fraction(self, cached: float, excess: float) -> float:
        """Expected fraction of all samples whose new worker does not hold them."""
        # cached: Fraction of the samples that each worker holds.
        # excess: Probability that a worker holds a given sample outside its share.
        # Chung et al. (2017), Theorem 1 (equation 1): ``q - s`` samples for a new draw over all of them, whatever the
        # excess, since a worker holds any sample with probability s/q.
        return self.shuffled_fraction * (1 - cached)


@dataclass(frozen=True, slots=True)
class Local(Assignment):
    """Every worker keeps its samples; only the order in which it trains on them changes."""

    name: ClassVar[str] = "local"
    forms: ClassVar[str] = "'local'"
    can_balance: ClassVar[bool] = True
    moves: ClassVar[bool] = False
    can_weigh: ClassVar[bool] = True

    def draw(self, draw: Draw) -> EpochDraw:
        return EpochDraw(draw.previous)

    def slots(self, first: Blocks, seed: int, changes: Sequence[WorkerChange] = ()) -> Slots:
        return Partial(0.0).slots(first, seed, changes)

    @property
    def shuffled_fraction(self) -> float:
        """Nothing is exchanged."""
        return 0.0

    def most_incoming(self, n_samples: int, n_workers: int, largest_share: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Global(Assignment):
    """A new uniform draw over all samples in every epoch."""

    name: ClassVar[str] = "global"
    forms: ClassVar[str] = "'global'"
    can_balance: ClassVar[bool] = True
    forgets: ClassVar[bool] = True
    can_weigh: ClassVar[bool] = True

    def draw(self, draw: Draw) -> EpochDraw:
        if draw.classes is None:
            return Assignment.draw(self, draw)
        return EpochDraw(draw_classes(draw.classes, draw.n_workers, "global", draw.seed, draw.epoch))

    def blocks(self, draw: Draw) -> Blocks:
        return Blocks.drawn(draw.n_samples, draw.n_workers, 1, "global", draw.seed, draw.epoch, weights=draw.weights)


@dataclass(frozen=True, slots=True)
class Chunks(Assignment):
    """Every chunk of the store goes to a random worker, which mixes the rows of all its chunks.

    Loaders that read a dataset again in every epoch shuffle this way: no chunk is read by two workers, and the rows of
    a chunk stay together. The first epoch's assignment consists of whole chunks too.
    """

    name: ClassVar[str] = "chunks"
    forms: ClassVar[str] = "'chunks' or 'chunks:ROWS' (an integer >= 1)"
    forgets: ClassVar[bool] = True
    in_chunks: ClassVar[bool] = True
    can_weigh: ClassVar[bool] = True

    # Samples per chunk. None means the chunk size of the dataset, which :class:`~dshuffle.Shuffler` fills in.
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None:
            object.__setattr__(self, "rows", as_integer("assignment.rows", self.rows, 1))

    def __str__(self) -> str:
        return "chunks" if self.rows is None else f"chunks:{self.rows}"

    @classmethod
    def parse(cls, parameter: str | None) -> Self:
        return cls(None if parameter is None else int(parameter))

    def blocks(self, draw: Draw) -> Blocks:
        n_samples, n, seed = draw.n_samples, draw.n_workers, draw.seed
        unit = self.unit_for(n_samples, n)
        return Blocks.drawn(n_samples, n, unit, "chunks", seed, draw.epoch, weights=draw.weights)

    @property
    def unit(self) -> int | None:
        """Rows of a chunk, if known."""
        return self.rows

    def with_unit(self, rows: int) -> Chunks:
        return Chunks(rows)

    def unit_for(self, n_samples: int, n_workers: int) -> int:
        if self.rows is None:
            hint = "Planning without a dataset needs the number of samples per chunk."
            raise InvalidParameter.of("assignment", "chunks", "'chunks:ROWS'", hint)
        if (n_chunks := -(-n_samples // self.rows)) < n_workers:
            most = (n_samples - 1) // (n_workers - 1)
            allowed = f"at most {most}, for {n_samples} samples and {n_workers} workers"
            hint = (
                f"The number of chunks is {n_chunks}, and the assignment 'chunks' gives every worker at least one. "
                "Create the dataset with smaller chunks, use the assignment 'global', or use fewer workers."
            )
            raise InvalidParameter.of("chunk_rows", self.rows, allowed, hint)
        return self.rows


@dataclass(frozen=True, slots=True)
class Partial(Assignment):
    """Every worker exchanges a fraction of its share with other workers."""

    # Nguyen et al. (2022), Algorithm 1; see docs/papers.md. There, a random permutation of the ranks says where
    # sample i of every worker goes, so about 1/M of the exchanges move nothing. We shift the ranks by a random distance
    # that is not zero, in a random order, so that exactly ``ceil(Q N / M)`` samples leave and enter every worker.

    name: ClassVar[str] = "partial"
    forms: ClassVar[str] = "'partial:Q' (Q in [0, 1])"
    can_weigh: ClassVar[bool] = True

    # Q in [0, 1]. 0 is the same as ``local``. 1 is not the same as ``global``: every sample moves to another worker.
    # More is not always better: see :meth:`warning`.
    fraction: float

    def __post_init__(self) -> None:
        as_ratio("assignment.fraction", self.fraction, Fraction(0))
        object.__setattr__(self, "fraction", float(self.fraction))

    def __str__(self) -> str:
        return f"partial:{self.fraction}"

    def n_exchanged(self, n_samples: int, n_workers: int) -> int:
        """Number of samples that every worker sends and receives in an epoch.

        ``ceil(Q * q / n)``, but at most the smallest share, and 0 if there is only one worker.

        >>> Partial(0.1).n_exchanged(1000, 10), Partial(0.1).n_exchanged(1001, 10)
        (10, 11)
        """
        if n_workers == 1:
            return 0
        n_exchanged = as_ratio("assignment.fraction", self.fraction, Fraction(0)) * n_samples / n_workers
        # as_ratio rounds a Q below 1e-12 to 0, but a positive Q must move something.
        at_least = int(self.fraction > 0)
        return min(max(math.ceil(n_exchanged), at_least), n_samples // n_workers)

    @classmethod
    def parse(cls, parameter: str | None) -> Self:
        return cls(float(parameter or ""))

    def draw(self, draw: Draw) -> EpochDraw:
        n, previous = draw.n_workers, draw.previous
        count = self.n_exchanged(draw.n_samples, n)
        slots = group_by(previous, n)[0] if draw.slots is None else draw.slots
        if not count:
            return EpochDraw(previous, slots=slots)
        sizes = np.bincount(previous, minlength=n)
        slots = SlotExchange.drawn(sizes, count, draw.seed, draw.epoch).applied(slots)
        ranks = np.empty_like(previous)
        ranks[slots] = np.repeat(np.arange(n, dtype=np.int32), sizes)
        return EpochDraw(ranks, slots=slots)

    def slots(self, first: Blocks, seed: int, changes: Sequence[WorkerChange] = ()) -> Slots:
        count = functools.partial(self.n_exchanged, first.n_samples)
        return Slots.of(first, changes, count, seed)

    @property
    def shuffled_fraction(self) -> float:
        """Q."""
        return self.fraction

    def least_share(self, n_samples: int, n_workers: int) -> int:
        """Every rank exchanges as many samples."""
        return max(1, self.n_exchanged(n_samples, n_workers))

    def most_incoming(self, n_samples: int, n_workers: int, largest_share: int) -> int:
        return self.n_exchanged(n_samples, n_workers)

    def missing_fraction(self, cached: float, excess: float) -> float:
        """See :class:`Assignment`; samples go to workers other than their owners, who hold them by excess alone."""
        return self.fraction * (1 - excess)

    def warning(self, n_workers: int) -> str:
        # A sample is with the same worker again after t exchanges with probability ``1 / n + (1 - 1 / n) lambda ** t``,
        # and lambda is ``1 - Q n / (n - 1)``.
        best = (n_workers - 1) / n_workers
        if n_workers == 1 or self.fraction <= best:
            return ""
        alike = 2 * best - self.fraction
        return (
            f"assignment={str(self)!r} mixes no better than 'partial:{alike:.3g}' on {n_workers} workers, although it "
            f"moves more samples, because no sample stays with its worker. Use 'global' or 'partial:{best:.3g}'."
        )


SHARDINGS = ("contiguous", "random", "round-robin")
"""Shardings, the first assignments, that are drawn from the seed."""


def first_blocks(
    sharding: object, n_samples: int, n_workers: int, seed: int, unit: int, weights: Weights = ()
) -> Blocks | None:
    """The ranks of epoch 0 as a function; None if the sharding is given, or deals samples out in turn."""
    if sharding == "random":
        return Blocks.drawn(n_samples, n_workers, unit, "sharding", seed, weights=weights)
    return Blocks.contiguous(n_samples, n_workers, unit, weights) if sharding == "contiguous" else None


def first_ranks(sharding: str, n_samples: int, n_workers: int, *, seed: int, chunk_rows: int = 1) -> Ranks:
    """Make the assignment of epoch 0, which gives out whole chunks, or single samples."""
    if sharding not in SHARDINGS:
        raise InvalidParameter.of("sharding", sharding, f"one of {sorted(SHARDINGS)}")
    if (blocks := first_blocks(sharding, n_samples, n_workers, seed, chunk_rows)) is not None:
        return blocks.all_ranks()
    turns = np.arange(-(-n_samples // chunk_rows)) % n_workers
    return np.repeat(turns.astype(np.int32), chunk_rows)[:n_samples]


@dataclass(frozen=True, slots=True)
class GivenSharding:
    """A first assignment that is not drawn from the seed alone, with ranks or known by name only."""

    name: str  # Name in records, and of the stored ranks in the dataset.
    # n_workers, checksum: Number of workers and checksum of the ranks. None accepts ranks for any number of workers.
    n_workers: int | None = None
    checksum: int | None = None
    # ``(q,)`` int32, or None while only the name is known, since each member of a session reads the ranks itself.
    ranks: Ranks | None = field(default=None, compare=False)
    # Ascending int64 samples that every worker trains on and holds permanently, whatever their ranks say. None while
    # only the name is known.
    broadcast: Samples | None = field(default=None, compare=False)
    n_broadcast: int = field(default=0, compare=False)

    @classmethod
    def of(cls, name: str, ranks: ArrayLike, broadcast: ArrayLike = ()) -> Self:
        """Check ranks and broadcast samples, and make a sharding of them."""
        checked = as_ranks("sharding", ranks, 1 << 31)
        n_workers = int(checked.max()) + 1 if checked.size else 0
        everywhere = as_indices("broadcast", broadcast, checked.size, "samples")
        if (np.diff(everywhere) <= 0).any():
            raise InvalidParameter.of("broadcast", everywhere, "ascending samples, each once")
        hint = "Every worker must get a sample of its own besides the broadcast samples."
        as_integer("samples that are not broadcast", checked.size - len(everywhere), max(1, n_workers), hint)
        sizes = np.bincount(np.delete(checked, everywhere), minlength=n_workers)
        if sizes.max() - sizes.min() > 1:
            reason = (
                f"worker {sizes.argmin()} has {sizes.min()} samples and worker {sizes.argmax()} has {sizes.max()}"
                f"{', not counting the broadcast samples' if len(everywhere) else ''}"
            )
            hint = "Share sizes must differ by at most one: workers with smaller shares would wait in every epoch."
            raise InvalidParameter.because("sharding", reason, hint)
        checksum = zlib.crc32(everywhere.astype("<i8").data, zlib.crc32(checked.astype("<i4").data))
        return cls(name, n_workers, checksum, checked, everywhere, len(everywhere))

    def __str__(self) -> str:
        return self.name

    def by_name(self) -> GivenSharding:
        """Return a copy without arrays, which is small to send."""
        return dataclasses.replace(self, ranks=None, broadcast=None)

    def found(self, ranks: ArrayLike, broadcast: ArrayLike = ()) -> GivenSharding:
        """Return a copy with ranks and broadcast samples."""
        sharding = GivenSharding.of(self.name, ranks, broadcast)
        if self.checksum not in (None, sharding.checksum):
            hint = "The sharding may have been rewritten. Create a new Shuffler."
            allowed = f"{self.checksum}, as when the session was opened"
            raise InvalidParameter.of(f"sharding {self.name!r}: checksum", sharding.checksum, allowed, hint)
        return sharding

    def check(self, n_samples: int, n_workers: int) -> None:
        """Check that the sharding fits a job."""
        if self.n_workers is not None and self.n_workers != n_workers:
            allowed = f"{self.n_workers}, for which the sharding {self.name!r} was made"
            raise InvalidParameter.of("n_workers", n_workers, allowed, f"Make a sharding for {n_workers} workers.")
        if self.ranks is not None and len(self.ranks) != n_samples:
            length = f"len(sharding {self.name!r})"
            raise InvalidParameter.of(length, len(self.ranks), f"{n_samples}, one rank per sample")

    def assignment(self) -> Ranks:
        """Return the ranks, ``(q,)`` int32."""
        if self.ranks is None:
            raise PlanError(f"the ranks of the sharding {self.name!r} are not known here")
        return self.ranks

    def others(self) -> Samples:
        """Samples that are not broadcast, ascending int64."""
        everywhere = NO_SAMPLES if self.broadcast is None else self.broadcast
        return np.delete(np.arange(len(self.assignment())), everywhere)

    def of_others(self) -> GivenSharding:
        """Return the sharding of the samples that are not broadcast, renumbered from 0."""
        return GivenSharding.of(self.name, self.assignment()[self.others()])
