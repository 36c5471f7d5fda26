"""The assignments ``local``, ``global``, ``chunks`` and ``partial:Q``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Self

import numpy as np

from dshuffle.checks import as_integer, as_ratio
from dshuffle.errors import InvalidParameter
from dshuffle.planning.assignment.balance import draw_classes, exchange_in_classes
from dshuffle.planning.assignment.rule import Assignment, Draw, EpochDraw
from dshuffle.planning.assignment.slots import Blocks, SlotExchange, Slots, WorkerChange
from dshuffle.planning.exchange_epochs import Weights
from dshuffle.planning.types import count_keys, group_by


@dataclass(frozen=True, slots=True)
class Local(Assignment):
    """Every worker keeps its samples; only the order in which it trains on them changes."""

    name: ClassVar[str] = "local"
    forms: ClassVar[str] = "'local'"
    moves: ClassVar[bool] = False
    can_weigh: ClassVar[bool] = True

    def draw(self, draw: Draw) -> EpochDraw:
        return EpochDraw(draw.previous.copy())

    def slots(self, first: Blocks, seed: int, changes: Sequence[WorkerChange] = ()) -> Slots:
        return Slots.of(first, changes, lambda n_workers: 0, fixed_points=False, seed=seed)

    @property
    def shuffled_fraction(self) -> float:
        """Nothing is exchanged."""
        return 0.0

    def most_incoming(self, n_samples: int, n_workers: int, largest_share: int) -> int:
        return 0

    @property
    def can_balance(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Global(Assignment):
    """A new uniform draw over all samples in every epoch."""

    name: ClassVar[str] = "global"
    forms: ClassVar[str] = "'global'"
    forgets: ClassVar[bool] = True
    can_weigh: ClassVar[bool] = True

    def draw(self, draw: Draw) -> EpochDraw:
        if draw.classes is not None:
            return EpochDraw(draw_classes(draw.classes, draw.n_workers, "global", draw.seed, draw.epoch))
        return EpochDraw(self.blocks(draw.n_samples, draw.n_workers, draw.seed, draw.epoch, draw.weights).all_ranks())

    def blocks(self, n_samples: int, n_workers: int, seed: int, epoch: int, weights: Weights = ()) -> Blocks:
        return Blocks.drawn(n_samples, n_workers, 1, "global", seed, epoch, weights=weights)

    @property
    def can_balance(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Chunks(Assignment):
    """Every chunk of the store goes to a random worker, which mixes the rows of all its chunks.

    Loaders that read a dataset again in every epoch shuffle this way: no chunk is read by two workers, and the rows of
    a chunk stay together. The first epoch's assignment consists of whole chunks too.

    Parameters
    ----------
    rows
        Number of samples per chunk. None means the chunk size of the dataset, which :class:`~dshuffle.Shuffler` fills
        in. Planning without a dataset needs the number.

    Examples
    --------
    >>> str(Chunks()), str(Chunks(64))
    ('chunks', 'chunks:64')
    """

    name: ClassVar[str] = "chunks"
    forms: ClassVar[str] = "'chunks' or 'chunks:ROWS' (an integer >= 1)"
    forgets: ClassVar[bool] = True
    in_chunks: ClassVar[bool] = True
    can_weigh: ClassVar[bool] = True

    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None:
            object.__setattr__(self, "rows", as_integer("assignment.rows", self.rows, 1))

    def __str__(self) -> str:
        return "chunks" if self.rows is None else f"chunks:{self.rows}"

    @classmethod
    def parse(cls, parameter: str | None) -> Self:
        return cls(None if parameter is None else int(parameter))

    def draw(self, draw: Draw) -> EpochDraw:
        return EpochDraw(self.blocks(draw.n_samples, draw.n_workers, draw.seed, draw.epoch, draw.weights).all_ranks())

    def blocks(self, n_samples: int, n_workers: int, seed: int, epoch: int, weights: Weights = ()) -> Blocks:
        return Blocks.drawn(
            n_samples, n_workers, self.unit_for(n_samples, n_workers), "chunks", seed, epoch, weights=weights
        )

    @property
    def unit(self) -> int | None:
        """Rows of a chunk, if known."""
        return self.rows

    def with_unit(self, rows: int) -> Chunks:
        return Chunks(rows)

    def unit_for(self, n_samples: int, n_workers: int) -> int:
        """Return the number of samples per chunk, if it is known and every worker gets a chunk.

        Raises
        ------
        InvalidParameter
            If the number is unknown, or there are fewer chunks than workers.
        """
        if self.rows is None:
            hint = "Planning without a dataset needs the number of samples per chunk."
            raise InvalidParameter.of("assignment", "chunks", "'chunks:ROWS'", hint)
        check_chunks(n_samples, n_workers, self.rows)
        return self.rows


def check_chunks(n_samples: int, n_workers: int, chunk_rows: int) -> None:
    """Check that there are at least as many chunks as workers."""
    n_chunks = -(-n_samples // chunk_rows)
    if n_chunks < n_workers:
        raise InvalidParameter.of(
            "chunk_rows",
            chunk_rows,
            f"at most {(n_samples - 1) // (n_workers - 1)}, for {n_samples} samples and {n_workers} workers",
            f"There {'is only 1 chunk' if n_chunks == 1 else f'are only {n_chunks} chunks'}, and the assignment "
            "'chunks' gives every worker at least one. Create the dataset with smaller chunks, use the assignment "
            "'global', or use fewer workers.",
        )


FIXED_POINTS = ":fixed-points"


@dataclass(frozen=True, slots=True)
class Partial(Assignment):
    """Every worker exchanges a fraction of its share with other workers.

    Parameters
    ----------
    fraction
        Q in [0, 1]. 0 is the same as ``local``. 1 is not the same as ``global``: every sample moves to another worker.
        More is not always better: see :meth:`return_probability`.
    fixed_points
        Allow rounds that send every sample to the worker that has it, as Nguyen et al. do for single samples. Workers
        then exchange at most as many samples, and about 1/n fewer on average, and every larger Q mixes better.

    References
    ----------
    Nguyen et al. (2022), Algorithm 1; see docs/papers.md. There, a random permutation of the ranks says where
    sample i of every worker goes, so about 1/M of the exchanges move nothing. We shift the ranks by a random distance
    that is not zero, in a random order, so that exactly ``ceil(Q N / M)`` samples leave and enter every worker.

    Examples
    --------
    >>> str(Partial(0.3))
    'partial:0.3'
    """

    name: ClassVar[str] = "partial"
    forms: ClassVar[str] = "'partial:Q' or 'partial:Q:fixed-points' (Q in [0, 1])"
    can_weigh: ClassVar[bool] = True

    fraction: float
    fixed_points: bool = False

    def __post_init__(self) -> None:
        as_ratio("assignment.fraction", self.fraction, Fraction(0))
        object.__setattr__(self, "fraction", float(self.fraction))

    def __str__(self) -> str:
        return f"partial:{self.fraction}{FIXED_POINTS if self.fixed_points else ''}"

    def n_exchanged(self, n_samples: int, n_workers: int) -> int:
        """Number of samples that every worker sends and receives in an epoch.

        ``ceil(Q * q / n)``, but at most the smallest share, and 0 if there is only one worker.

        Examples
        --------
        >>> Partial(0.1).n_exchanged(1000, 10), Partial(0.1).n_exchanged(1001, 10)
        (10, 11)
        """
        if n_workers == 1:
            return 0
        n_exchanged = as_ratio("assignment.fraction", self.fraction, Fraction(0)) * n_samples / n_workers
        # as_ratio rounds a Q below 1e-12 to 0, but a positive Q must move something.
        at_least = 1 if self.fraction > 0 else 0
        return min(max(-(-n_exchanged.numerator // n_exchanged.denominator), at_least), n_samples // n_workers)

    @classmethod
    def parse(cls, parameter: str | None) -> Self:
        number = (parameter or "").removesuffix(FIXED_POINTS)
        return cls(float(number), fixed_points=number != parameter)

    def draw(self, draw: Draw) -> EpochDraw:
        count = self.n_exchanged(draw.n_samples, draw.n_workers)
        if draw.classes is not None:
            ranks = exchange_in_classes(draw.previous, draw.classes, draw.n_workers, count, draw.seed, draw.epoch)
            return EpochDraw(ranks)
        slots = group_by(draw.previous, draw.n_workers)[0] if draw.slots is None else draw.slots
        if not count:
            return EpochDraw(draw.previous.copy(), slots=slots)
        sizes = count_keys(draw.previous, 0, draw.n_workers)
        exchange = SlotExchange.drawn(sizes, count, self.fixed_points, draw.seed, draw.epoch)
        slots = exchange.applied(slots)
        ranks = np.empty_like(draw.previous)
        ranks[slots] = np.repeat(np.arange(draw.n_workers, dtype=np.int32), sizes)
        return EpochDraw(ranks, slots=slots)

    def slots(self, first: Blocks, seed: int, changes: Sequence[WorkerChange] = ()) -> Slots:
        count = functools.partial(self.n_exchanged, first.n_samples)
        return Slots.of(first, changes, count, fixed_points=self.fixed_points, seed=seed)

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

    @property
    def can_balance(self) -> bool:
        """Balanced classes are exchanged without fixed points."""
        return not self.fixed_points

    def persistence(self, n_workers: int) -> float:
        """lambda: how strongly the worker of a sample in one epoch predicts that in the next; 1 if nothing moves.

        ``1 - Q n / (n - 1)``, or with fixed points ``1 - Q``. It is negative where samples tend to leave the worker
        that had them. The nearer to 0, the better an exchange mixes.

        Examples
        --------
        >>> Partial(0.5).persistence(2), Partial(1.0).persistence(2), Partial(1.0, fixed_points=True).persistence(2)
        (0.0, -1.0, 0.0)
        """
        if n_workers == 1:
            return 0.0
        return 1 - self.fraction * (1 if self.fixed_points else n_workers / (n_workers - 1))

    def return_probability(self, n_workers: int, epochs: int) -> float:
        """Probability that a sample is with the same worker again after some exchanges.

        ``1 / n + (1 - 1 / n) lambda ** epochs``; a uniform draw has ``1 / n``. Two workers that exchange everything
        (Q = 1) swap their shares for ever and mix nothing.

        Examples
        --------
        >>> [Partial(1.0).return_probability(2, epochs) for epochs in (1, 2, 3)]
        [0.0, 1.0, 0.0]
        >>> Partial(0.5).return_probability(2, 1)
        0.5
        """
        return 1 / n_workers + (1 - 1 / n_workers) * self.persistence(n_workers) ** epochs

    def warning(self, n_workers: int) -> str:
        persistence = self.persistence(n_workers)
        if persistence >= 0:
            return ""
        best, alike = (n_workers - 1) / n_workers, 2 * (n_workers - 1) / n_workers - self.fraction
        return (
            f"assignment={str(self)!r} mixes no better than 'partial:{alike:.3g}' on {n_workers} workers, although it "
            f"moves more samples, because no sample stays with its worker. Use 'global', 'partial:{best:.3g}' or "
            f"'{self}{FIXED_POINTS}'."
        )
