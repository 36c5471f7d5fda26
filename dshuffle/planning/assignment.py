"""Which worker trains on which sample: the first assignment, and how each epoch's follows from the last.

Every assignment is balanced (partition sizes differ by at most one) and a function of (seed, epoch, n) and,
for ``local`` and ``partial``, of the assignment before it; ``aligned`` also looks at who holds what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numba
import numpy as np
from numpy.typing import ArrayLike

from dshuffle.errors import InvalidParameter
from dshuffle.planning.aligned import draw_aligned
from dshuffle.planning.bits import group_by
from dshuffle.planning.holders import as_holders
from dshuffle.planning.plan import SERVER, Plan, missing_samples
from dshuffle.planning.randomness import below, choose, next_word, permutation, random_words, shuffle
from dshuffle.planning.values import Holders, Ranks, Samples, as_integer, as_ranks, as_ratio

KNOWN_ASSIGNMENTS = "'local', 'global', 'aligned', or with Q in [0, 1] 'partial:Q' or 'aligned:Q'"


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


Assignment = Local | Partial | Global | Aligned


def parse_assignment(assignment: str | Assignment) -> Assignment:
    """The assignment that a user named; values of the type pass through.

    Raises
    ------
    InvalidParameter
        If the name is unknown (the message lists the known ones), or Q is no number in [0, 1].

    Examples
    --------
    >>> parse_assignment("partial:0.3")
    Partial(fraction=0.3)
    """
    if isinstance(assignment, Assignment):
        return assignment
    if isinstance(assignment, str):
        name, _, fraction = assignment.partition(":")
        try:
            match name:
                case "partial":
                    return Partial(float(fraction))
                case "aligned" if fraction:
                    return Aligned(float(fraction))
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
    raise InvalidParameter.of("assignment", assignment, KNOWN_ASSIGNMENTS)


def _contiguous(n_samples: int, n_workers: int, seed: int) -> Ranks:
    sizes = np.full(n_workers, n_samples // n_workers)
    sizes[: n_samples % n_workers] += 1
    return np.repeat(np.arange(n_workers, dtype=np.int32), sizes)


def _random(n_samples: int, n_workers: int, seed: int) -> Ranks:
    return _uniform(n_samples, n_workers, "sharding", seed)


SHARDINGS: dict[str, Callable[[int, int, int], Ranks]] = {"contiguous": _contiguous, "random": _random}
"""How the first epoch's assignment is made: name -> function of (n_samples, n_workers, seed)."""


def first_assignment(sharding: str, n_samples: int, n_workers: int, *, seed: int) -> Ranks:
    """The assignment of epoch 0.

    Parameters
    ----------
    sharding
        ``"contiguous"`` (equal slices in sample order) or ``"random"`` (a uniform balanced draw).

    Returns
    -------
    (n_samples,) int32
        The worker that trains on each sample.

    Raises
    ------
    InvalidParameter
        If the sharding is unknown, or there are fewer samples than workers.

    Examples
    --------
    >>> first_assignment("contiguous", 5, 2, seed=0)
    array([0, 0, 0, 1, 1], dtype=int32)
    """
    n_workers = as_integer("n_workers", n_workers, 1)
    n_samples = as_integer("n_samples", n_samples, n_workers, "There are fewer samples than workers.")
    if sharding not in SHARDINGS:
        raise InvalidParameter.of("sharding", sharding, f"one of {sorted(SHARDINGS)}")
    return SHARDINGS[sharding](n_samples, n_workers, seed)


def next_assignment(
    assignment: Assignment,
    previous: ArrayLike,
    n_workers: int,
    *,
    seed: int,
    epoch: int,
    holders: ArrayLike | None = None,
) -> Ranks:
    """The assignment of an epoch, from the one before it.

    Parameters
    ----------
    previous
        ``(q,)`` integers: the assignment of epoch ``epoch - 1``.
    holders
        ``(q, words)`` masks of who holds what in epoch ``epoch - 1``; only ``aligned`` needs them.

    Returns
    -------
    (q,) int32
        The worker that trains on each sample in ``epoch``.

    Raises
    ------
    InvalidParameter
        If there are no holders for ``aligned``, or an array has a wrong shape or range.

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
    return draw_assignment(assignment, previous, n_workers, seed=seed, epoch=epoch, holders=holders)[0]


def draw_assignment(
    assignment: Assignment,
    previous: ArrayLike,
    n_workers: int,
    *,
    seed: int,
    epoch: int,
    holders: ArrayLike | None = None,
) -> tuple[Ranks, Plan | None]:
    """:func:`next_assignment` and, with ``aligned``, the perfect packets that it was drawn with.

    They deliver a part of what is needed, and are the ``start`` of :func:`~dshuffle.planning.plan_delivery`.
    """
    n_workers = as_integer("n_workers", n_workers, 1)
    ranks = as_ranks("previous", previous, n_workers)
    masks = None if holders is None else _covering(as_holders(holders, n_workers), ranks)
    match assignment:
        case Global():
            return _uniform(len(ranks), n_workers, "global", seed, epoch), None
        case Partial():
            return _exchange(ranks, n_workers, assignment.n_exchanged(len(ranks), n_workers), seed, epoch), None
        case Aligned():
            if masks is None:
                raise InvalidParameter.of("holders", None, "the masks of who holds what for the assignment 'aligned'")
            return _align(assignment, ranks, masks, n_workers, seed, epoch)
        case Local():
            return ranks.copy(), None
    raise InvalidParameter.of("assignment", assignment, KNOWN_ASSIGNMENTS)


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


def epoch_order(sample_ids: Samples, *, seed: int, epoch: int, rank: int) -> Samples:
    """The order in which a worker trains on its samples: a function of (seed, epoch, rank) and their set.

    Examples
    --------
    >>> epoch_order(np.array([30, 10, 20]), seed=0, epoch=1, rank=0)
    array([10, 30, 20])
    """
    return np.sort(sample_ids)[epoch_permutation(len(sample_ids), seed=seed, epoch=epoch, rank=rank)]


def epoch_permutation(n_own: int, *, seed: int, epoch: int, rank: int) -> Samples:
    """:func:`epoch_order` as ``(n_own,)`` int64 positions within the ascending samples."""
    return permutation(n_own, "order", seed, epoch, rank)


def _uniform(n_samples: int, n_workers: int, *path: int | str) -> Ranks:
    """A uniform balanced draw: the multiset of ranks, shuffled."""
    ranks = np.repeat(np.arange(n_workers, dtype=np.int32), _sizes(n_samples, n_workers, *path))
    shuffle(ranks, *path)
    return ranks


def _sizes(n_samples: int, n_workers: int, *path: int | str) -> Samples:
    sizes = np.full(n_workers, n_samples // n_workers)
    # Always giving the first workers the samples left over would make them slower in every epoch.
    sizes[permutation(n_workers, "extra", *path)[: n_samples % n_workers]] += 1
    return sizes


def _align(
    assignment: Aligned, previous: Ranks, holders: Holders, n_workers: int, seed: int, epoch: int
) -> tuple[Ranks, Plan]:
    if assignment.fraction == 1:
        pool = np.arange(len(previous))
        room = _sizes(len(previous), n_workers, "aligned", seed, epoch)
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


def _exchange(previous: Ranks, n_workers: int, count: int, seed: int, epoch: int) -> Ranks:
    """Every worker sends ``count`` of its samples, drawn at random, and receives as many (Algorithm 1)."""
    ranks = previous.copy()
    if count == 0:
        return ranks
    order, offsets = group_by(previous, n_workers)
    sent = np.empty((count, n_workers), dtype=np.int64)
    for rank in range(n_workers):
        own = order[offsets[rank] : offsets[rank + 1]]
        sent[:, rank] = choose(own, count, "partial", seed, epoch, rank)
    _derange(sent, random_words(count, "partial", seed, epoch), ranks)
    return ranks


@numba.njit(nogil=True, cache=True)
def _derange(sent, words, ranks):  # type: ignore[no-untyped-def]
    """Reassign each row of ``sent`` by a uniform permutation of the ranks without fixed points."""
    n_workers = sent.shape[1]
    destination = np.arange(n_workers)
    for row in range(sent.shape[0]):
        state = words[row]
        rank = 0
        # Fisher-Yates, given up and begun again at the first fixed point: what passes is uniform among the
        # derangements, whatever order the last round left behind.
        while rank < n_workers:
            state, word = next_word(state)
            other = rank + below(word, n_workers - rank)
            destination[rank], destination[other] = destination[other], destination[rank]
            rank = 0 if destination[rank] == rank else rank + 1
        for rank in range(n_workers):
            ranks[sent[row, rank]] = destination[rank]
