"""Which worker trains on which sample: how each epoch's assignment follows from the last.

Every assignment is balanced (partition sizes differ by at most one, with ``chunks`` by at most one chunk's rows) and a
function of (seed, epoch, n) and, for ``local`` and ``partial``, of the assignment before it; ``aligned`` also looks at
who holds what.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from dshuffle.checks import as_integer, as_ranks, as_ratio
from dshuffle.errors import InvalidParameter
from dshuffle.planning.assignment.aligned import draw_aligned
from dshuffle.planning.assignment.balance import Classes, draw_classes, exchange_in_classes
from dshuffle.planning.assignment.chunks import check_chunks, draw_chunks
from dshuffle.planning.assignment.partial import balanced_sizes, exchange_samples, uniform_ranks
from dshuffle.planning.grouping import group_by
from dshuffle.planning.holders import as_holders
from dshuffle.planning.plan import SERVER, Plan, missing_samples
from dshuffle.planning.randomness import choose
from dshuffle.planning.types import Holders, Ranks

KNOWN_ASSIGNMENTS = (
    "'local', 'global', 'aligned', 'chunks', with Q in [0, 1] 'partial:Q' or 'aligned:Q', "
    "or with an integer ROWS >= 1 'chunks:ROWS'"
)


@dataclass(frozen=True, slots=True)
class Local:
    """Every worker keeps its partition; only the order within it changes."""

    def __str__(self) -> str:
        return "local"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every worker exchanges a fraction of its partition (paper 004, Algorithm 1).

    Parameters
    ----------
    fraction
        Q in [0, 1]; 0 is the same as ``local``. The other end is not ``global``: with Q = 1 every sample
        moves to another worker.

    Examples
    --------
    >>> str(Partial(0.3))
    'partial:0.3'
    """

    fraction: float

    def __post_init__(self) -> None:
        as_ratio("assignment.fraction", self.fraction, Fraction(0))
        object.__setattr__(self, "fraction", float(self.fraction))

    def __str__(self) -> str:
        return f"partial:{self.fraction}"

    def n_exchanged(self, n_samples: int, n_workers: int) -> int:
        """Samples that every worker sends, and receives, in an epoch.

        ``ceil(Q * q / n)``, but no more than the smallest partition has, and none without a second worker.

        Examples
        --------
        >>> Partial(0.1).n_exchanged(1000, 10), Partial(0.1).n_exchanged(1001, 10)
        (10, 11)
        """
        if n_workers == 1:
            return 0
        wanted = as_ratio("assignment.fraction", self.fraction, Fraction(0)) * n_samples / n_workers
        # A positive Q of less than 1e-12 is the fraction 0, but it was asked to move something.
        at_least = 1 if self.fraction > 0 else 0
        return min(max(-(-wanted.numerator // wanted.denominator), at_least), n_samples // n_workers)


@dataclass(frozen=True, slots=True)
class Aligned:
    """A random draw over all samples every epoch, or over a part, made so that coded deliveries pack perfectly.

    To training it is what ``global`` is; only the packets are fewer, with the caching policy ``even`` by far.

    Parameters
    ----------
    fraction
        Q in [0, 1]. Below 1, every worker puts as many of its samples into the draw as ``partial`` exchanges, and gets
        as many out of it, of which about 1/n were its own.

    Examples
    --------
    >>> str(Aligned()), str(Aligned(0.3))
    ('aligned', 'aligned:0.3')
    """

    fraction: float = 1.0

    def __post_init__(self) -> None:
        as_ratio("assignment.fraction", self.fraction, Fraction(0))
        object.__setattr__(self, "fraction", float(self.fraction))

    def __str__(self) -> str:
        return "aligned" if self.fraction == 1 else f"aligned:{self.fraction}"

    def most_drawn(self, n_samples: int, n_workers: int) -> int:
        """Samples that a worker gets out of the draw, at most.

        Examples
        --------
        >>> Aligned().most_drawn(1001, 10), Aligned(0.1).most_drawn(1001, 10)
        (101, 11)
        """
        if self.fraction == 1:
            return -(-n_samples // n_workers)
        return Partial(self.fraction).n_exchanged(n_samples, n_workers)


@dataclass(frozen=True, slots=True)
class Global:
    """A fresh uniform draw over all samples every epoch."""

    def __str__(self) -> str:
        return "global"


@dataclass(frozen=True, slots=True)
class Chunks:
    """Every chunk of the store goes to a random worker, which mixes the rows of all its chunks.

    This is how loaders shuffle that read a dataset again every epoch: no chunk is read by two workers, and rows of one
    chunk stay together. The first epoch's assignment is made of whole chunks as well.

    Parameters
    ----------
    rows
        Samples in a chunk. None stands for those of the dataset, which :class:`~dshuffle.Shuffler` fills in; planning
        by itself has no dataset, and needs the number.

    Examples
    --------
    >>> str(Chunks()), str(Chunks(64))
    ('chunks', 'chunks:64')
    """

    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None:
            object.__setattr__(self, "rows", as_integer("assignment.rows", self.rows, 1))

    def __str__(self) -> str:
        return "chunks" if self.rows is None else f"chunks:{self.rows}"

    def rows_for(self, n_samples: int, n_workers: int) -> int:
        """The samples in a chunk, if that is known and every worker gets one.

        Raises
        ------
        InvalidParameter
            If they are unknown, or there are fewer chunks than workers.
        """
        if self.rows is None:
            hint = "Without a dataset nobody knows how many samples a chunk has."
            raise InvalidParameter.of("assignment", "chunks", "'chunks:ROWS'", hint)
        check_chunks(n_samples, n_workers, self.rows)
        return self.rows


Assignment = Local | Partial | Global | Aligned | Chunks


def parse_assignment(assignment: str | Assignment) -> Assignment:
    """The assignment that a user named; values of the type pass through.

    Raises
    ------
    InvalidParameter
        If the name is unknown (the message lists the known ones), Q is no number in [0, 1], or ROWS no integer of at
        least 1.

    Examples
    --------
    >>> parse_assignment("partial:0.3")
    Partial(fraction=0.3)
    """
    if isinstance(assignment, Assignment):
        return assignment
    if isinstance(assignment, str):
        name, _, number = assignment.partition(":")
        try:
            match name:
                case "partial":
                    return Partial(float(number))
                case "aligned" if number:
                    return Aligned(float(number))
                case "chunks" if number:
                    return Chunks(int(number))
        except ValueError:
            # InvalidParameter is a ValueError too; either way the user typed the whole text, so show it
            # whole.
            raise InvalidParameter.of("assignment", assignment, KNOWN_ASSIGNMENTS) from None
        match assignment:
            case "local":
                return Local()
            case "global":
                return Global()
            case "aligned":
                return Aligned()
            case "chunks":
                return Chunks()
    raise InvalidParameter.of("assignment", assignment, KNOWN_ASSIGNMENTS)


def next_assignment(
    assignment: Assignment,
    previous: ArrayLike,
    n_workers: int,
    *,
    seed: int,
    epoch: int,
    holders: ArrayLike | None = None,
    classes: Classes | None = None,
) -> Ranks:
    """The assignment of an epoch, from the one before it.

    Parameters
    ----------
    previous
        ``(q,)`` integers: the assignment of epoch ``epoch - 1``.
    holders
        ``(q, words)`` masks of who holds what in epoch ``epoch - 1``; only ``aligned`` needs them.
    classes
        With ``local``, ``partial`` and ``global``: classes that are to stay in equal parts, to within one sample on
        every worker, as they are in ``previous``.

    Returns
    -------
    (q,) int32
        The worker that trains on each sample in ``epoch``.

    Raises
    ------
    InvalidParameter
        If there are no holders for ``aligned``, an array has a wrong shape or range, or an assignment cannot keep
        classes in equal parts.

    References
    ----------
    Paper 004, Algorithm 1 (``Partial``). There, sample i of every worker goes where a random permutation of
    the ranks sends it, which may be to itself: about 1/M of the exchanges move nothing. We draw
    permutations without fixed points, so that exactly ``ceil(Q N / M)`` samples leave and enter every
    worker.

    Examples
    --------
    >>> next_assignment(Partial(0.5), [0, 0, 0, 0, 1, 1, 1, 1], 2, seed=0, epoch=1)
    array([0, 0, 1, 1, 0, 1, 0, 1], dtype=int32)
    """
    return draw_assignment(assignment, previous, n_workers, seed=seed, epoch=epoch, holders=holders, classes=classes)[0]


def draw_assignment(
    assignment: Assignment,
    previous: ArrayLike,
    n_workers: int,
    *,
    seed: int,
    epoch: int,
    holders: ArrayLike | None = None,
    classes: Classes | None = None,
) -> tuple[Ranks, Plan | None]:
    """:func:`next_assignment` and, with ``aligned``, the perfect packets that it was drawn with.

    They deliver a part of what is needed, and are the ``start`` of :func:`~dshuffle.planning.plan_delivery`.
    """
    n_workers = as_integer("n_workers", n_workers, 1)
    ranks = as_ranks("previous", previous, n_workers)
    masks = None if holders is None else _covering(as_holders(holders, n_workers), ranks)
    if classes is not None:
        check_balance(classes, assignment, len(ranks))
    match assignment:
        case Global():
            if classes is not None:
                return draw_classes(classes, n_workers, "global", seed, epoch), None
            return uniform_ranks(len(ranks), n_workers, "global", seed, epoch), None
        case Partial():
            count = assignment.n_exchanged(len(ranks), n_workers)
            if classes is not None:
                return exchange_in_classes(ranks, classes, n_workers, count, seed, epoch), None
            return exchange_samples(ranks, n_workers, count, seed, epoch), None
        case Aligned():
            if masks is None:
                raise InvalidParameter.of("holders", None, "the masks of who holds what for the assignment 'aligned'")
            return _align(assignment, ranks, masks, n_workers, seed, epoch)
        case Chunks():
            rows = assignment.rows_for(len(ranks), n_workers)
            return draw_chunks(len(ranks), n_workers, rows, "chunks", seed, epoch), None
        case Local():
            return ranks.copy(), None
    raise InvalidParameter.of("assignment", assignment, KNOWN_ASSIGNMENTS)


def check_balance(classes: Classes, assignment: Assignment, n_samples: int) -> None:
    """Refuse classes that an assignment cannot keep in equal parts, or of another number of samples.

    Raises
    ------
    InvalidParameter
        Saying why.
    """
    if isinstance(assignment, Aligned | Chunks):
        whole = "gives out whole chunks" if isinstance(assignment, Chunks) else "follows from who holds what"
        hint = f"What {str(assignment)!r} draws {whole}, and cannot regard classes; take 'global' or 'partial:Q'."
        raise InvalidParameter.of("balance", classes.name, f"None with the assignment {str(assignment)!r}", hint)
    if classes.n_samples not in (None, n_samples):
        raise InvalidParameter.of(
            f"len(balance {classes.name!r})", classes.n_samples, f"{n_samples}, one label to a sample"
        )


def _covering(masks: Holders, ranks: Ranks) -> Holders:
    """The holders, if every worker holds the samples that it trains on now."""
    if len(masks) != len(ranks):
        raise InvalidParameter.of("holders.shape", masks.shape, f"those of {len(ranks)} samples")
    lacking = missing_samples(masks, ranks)
    if len(lacking):
        sample = int(lacking[0])
        raise InvalidParameter.of(
            f"holders[{sample}]",
            masks[sample].tolist(),
            f"a mask with worker {ranks[sample]}, which trains on the sample now",
            "Every worker must hold its own share.",
        )
    return masks


def _align(
    assignment: Aligned, previous: Ranks, holders: Holders, n_workers: int, seed: int, epoch: int
) -> tuple[Ranks, Plan]:
    if assignment.fraction == 1:
        pool = np.arange(len(previous))
        room = balanced_sizes(len(previous), n_workers, "aligned", seed, epoch)
    else:
        count = assignment.most_drawn(len(previous), n_workers)
        order, offsets = group_by(previous, n_workers)
        owns = [order[offsets[rank] : offsets[rank + 1]] for rank in range(n_workers)]
        pool = np.concatenate([choose(own, count, "aligned", seed, epoch, rank) for rank, own in enumerate(owns)])
        room = np.full(n_workers, count)
    drawn = draw_aligned(holders[pool], room, seed, epoch)
    ranks = previous.copy()
    ranks[pool] = drawn.destinations
    senders = np.full(len(drawn.offsets) - 1, SERVER, dtype=np.int32)
    return ranks, Plan(drawn.offsets, pool[drawn.members], drawn.destinations[drawn.members], senders)
