"""Balanced draws: equal counts of workers, of classes in every epoch, and of groups at first."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter, PlanError
from dshuffle.kernels import kernel
from dshuffle.planning.randomness import below, choose, draw_front, next_word, permutation, random_words
from dshuffle.planning.types import Ranks, Samples, group_by


def balanced_sizes(n_samples: int, n_workers: int, *path: int | str) -> Samples:
    """Draw ``(n_workers,)`` share sizes that differ by at most one; random workers get the larger ones."""
    sizes = np.full(n_workers, n_samples // n_workers)
    # If the first workers always got the extra samples, they would be slower in every epoch.
    sizes[permutation(n_workers, "extra", *path)[: n_samples % n_workers]] += 1
    return sizes


@kernel("(i8[:,::1], u8[::1], i4[::1])")
def derange(sent, words, ranks):  # type: ignore[no-untyped-def]
    """Reassign each row of ``sent`` by a uniform permutation of the ranks without fixed points."""
    n_workers = sent.shape[1]
    destination = np.arange(n_workers)
    for row in range(sent.shape[0]):
        state = words[row]
        rank = 0
        # Fisher-Yates, restarted at the first fixed point. The result is uniform among the derangements, whatever
        # order the previous row left behind.
        while rank < n_workers:
            state, word = next_word(state)
            other = rank + below(word, n_workers - rank)
            destination[rank], destination[other] = destination[other], destination[rank]
            rank = 0 if destination[rank] == rank else rank + 1
        for rank in range(n_workers):
            ranks[sent[row, rank]] = destination[rank]


_TABLE = 1 << 20
"""Labels in a range of at most this width, or of the number of samples, are looked up in a table, not sorted."""


def label_codes(
    labels: ArrayLike, n_samples: int | None = None, *, name: str = "labels"
) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """Number the classes of labels."""
    # labels: ``(q,)`` integers (or booleans), the class of each sample.
    array = np.asarray(labels)
    if array.ndim != 1:
        raise InvalidParameter.of(f"{name}.shape", array.shape, "(n_samples,)", "Pass one label per sample.")
    if n_samples is not None and len(array) != n_samples:
        raise InvalidParameter.of(f"len({name})", len(array), f"{n_samples}, one label per sample")
    if array.dtype.kind not in "iub":
        hint = "Number the classes with numpy.unique(labels, return_inverse=True)[1]."
        raise InvalidParameter.of(f"{name}.dtype", str(array.dtype), "an integer dtype", hint)
    if not array.size:
        raise InvalidParameter.of(f"len({name})", 0, "at least 1")
    values = array.view(np.uint8) if array.dtype == np.bool_ else array
    lowest, highest = int(values.min()), int(values.max())
    if highest - lowest < max(_TABLE, len(values)):
        wide = values if values.itemsize == 8 else values.astype(np.int64)  # int8 cannot hold 40 - (-88)
        base = wide.dtype.type(lowest)
        places = (wide - base).astype(np.int64, copy=False)
        present = np.bincount(places) > 0
        codes = (np.cumsum(present) - 1).astype(np.int32)[places]
        classes = (np.flatnonzero(present).astype(wide.dtype) + base).astype(array.dtype)
    else:
        classes, inverse = np.unique(array, return_inverse=True)
        codes = inverse.astype(np.int32)
    if len(classes) == len(array) > 1:
        hint = "Some class must have several samples. Otherwise use the sharding 'random', without balance."
        raise InvalidParameter.because(name, f"it has {len(array)} distinct values for {len(array)} samples", hint)
    return codes, classes


def deal_groups(groups: NDArray[np.int32], n_groups: int, n_workers: int, *path: int | str) -> Ranks:
    """Deal the samples of every group to the workers in turn."""
    # The counts of every group, and share sizes, differ by at most one between workers, because each group continues
    # where the previous one ended. Each worker gets one of ``n_workers`` consecutive samples of a group. A new random
    # permutation decides which one, so that patterns in the order of the dataset are spread too.
    # Provatas et al. (2021), Fig. 4; see docs/papers.md. The paper deals sample ``i`` of a class to worker ``i mod n``.
    # There the same workers always get the extra samples, so that share sizes differ by up to the number of classes.
    # groups: ``(q,)`` integers in ``[0, n_groups)``, the group of each sample.
    order, offsets = group_by(groups, n_groups)
    ranks = np.empty(len(groups), dtype=np.int32)
    names = permutation(n_workers, "names", *path).astype(np.int32)
    _deal(order, offsets, names, random_words(1, *path)[0], ranks)
    return ranks


def stratified_ranks(labels: ArrayLike, n_workers: int, *, seed: int, n_samples: int | None = None) -> Ranks:
    """Draw an assignment with the same class proportions on every worker."""
    # labels: ``(q,)`` integers, the class of each sample.
    codes, classes = label_codes(labels, n_samples)
    return deal_classes(codes, len(classes), n_workers, seed=seed)


def deal_classes(codes: NDArray[np.int32], n_classes: int, n_workers: int, *, seed: int) -> Ranks:
    """Draw a :func:`stratified_ranks` from labels that are already numbered."""
    # codes: ``(q,)`` integers in ``[0, n_classes)``.
    n_workers = as_integer("n_workers", n_workers, 1)
    as_integer("len(labels)", len(codes), n_workers, "There are fewer samples than workers.")
    return deal_groups(codes, n_classes, n_workers, "stratified", seed)


@kernel("(i8[::1], i8[::1], i4[::1], u8, i4[::1])")
def _deal(order, offsets, names, state, ranks):  # type: ignore[no-untyped-def]
    lap = names.copy()
    rest = names.copy()
    at = 0
    for group in range(offsets.size - 1):
        first, last = offsets[group], offsets[group + 1]
        while last - first >= names.size:
            state = draw_front(lap, names.size - 1, state)
            for place in range(names.size):
                ranks[order[first + place]] = lap[place]
            first += names.size
        for place in range(last - first):
            rest[place] = names[at]
            at = at + 1 if at + 1 < names.size else 0
        state = draw_front(rest[: last - first], last - first - 1, state)
        for place in range(last - first):
            ranks[order[first + place]] = rest[place]


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """The classes that every epoch's assignment keeps balanced, with labels or known by name only."""

    name: str  # Name in records, and of the labels in the dataset.
    checksum: int | None = None  # Checksum of the labels' codes. None accepts whatever labels are found.
    # order, offsets: Samples, class after class and ascending in each: class c has ``order[offsets[c]:offsets[c +
    # 1]]``. None while only the name is known, since each member of a session reads the labels itself.
    order: Samples | None = None
    offsets: Samples | None = None

    @classmethod
    def of(cls, name: str, labels: ArrayLike, n_samples: int | None = None) -> Self:
        """Number the classes of labels."""
        codes, classes = label_codes(labels, n_samples, name=f"balance {name!r}")
        return cls(name, zlib.crc32(codes.data), *group_by(codes, len(classes)))

    def __str__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Classes) and (self.name, self.checksum) == (other.name, other.checksum)

    def __hash__(self) -> int:
        return hash((self.name, self.checksum))

    @property
    def n_samples(self) -> int | None:
        """Number of samples, or None if only the name is known."""
        return None if self.order is None else len(self.order)

    def found(self, labels: ArrayLike, n_samples: int | None = None) -> Classes:
        """Return a copy with labels."""
        classes = Classes.of(self.name, labels, n_samples)
        if self.checksum not in (None, classes.checksum):
            hint = "The labels may have been rewritten. Create a new Shuffler."
            expected = f"{self.checksum}, as when the session was opened"
            raise InvalidParameter.of(f"balance {self.name!r}: checksum", classes.checksum, expected, hint)
        return classes

    def members(self) -> tuple[Samples, Samples]:
        """Return ``order`` and ``offsets``."""
        if self.order is None or self.offsets is None:
            raise PlanError(f"the labels {self.name!r} are not known here")
        return self.order, self.offsets

    def only(self, kept: Samples) -> Classes:
        """Keep only some samples (ascending), renumbered from 0."""
        order, offsets = self.members()
        numbers = np.full(len(order), -1, dtype=np.int64)
        numbers[kept] = np.arange(len(kept))
        renumbered = numbers[order]
        left = renumbered >= 0
        before = np.concatenate([[0], np.cumsum(left)])
        return Classes(self.name, self.checksum, renumbered[left], before[offsets])

    def check_balanced(self, parameter: str, value: object, ranks: Ranks, n_workers: int) -> None:
        """Reject an assignment in which the counts of a class differ by more than one between workers."""
        order, offsets = self.members()
        classes = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        pairs, counts = np.unique(classes * n_workers + ranks[order], return_counts=True)
        least, found = np.diff(offsets) // n_workers, pairs // n_workers
        lacking = (least > 0) & (np.bincount(found, minlength=len(least)) < n_workers)
        uneven = np.concatenate([np.flatnonzero(lacking), found[(counts - least[found]) >> 1 != 0]])
        if uneven.size:
            raise InvalidParameter.of(
                parameter,
                value,
                f"an assignment in which the counts of each class of {self.name!r} differ by at most one",
                f"Class {uneven.min()} (in ascending order) is spread unevenly. With balance={self.name!r} use the "
                f"sharding 'random' or 'stratified:{self.name}'.",
            )


def draw_classes(classes: Classes, n_workers: int, *path: int | str) -> Ranks:
    """Draw a random assignment in which the counts of each class, and share sizes, differ by at most one."""
    # Given the number of samples of each class on each worker, all assignments are equally likely. Classes are visited
    # in random order to choose the workers that get one sample more. Workers with fewer such samples so far are chosen
    # first, and others only if there are not enough of these. So all workers are equally likely to get a sample.
    order, offsets = classes.members()
    ranks = np.empty(len(order), dtype=np.int32)
    turns = permutation(len(offsets) - 1, "class turns", *path)
    names = permutation(n_workers, "class names", *path).astype(np.int32)
    _draw(order, offsets, turns, names, random_words(1, "classes", *path)[0], ranks)
    return ranks


def exchange_in_classes(previous: Ranks, classes: Classes, n_workers: int, count: int, seed: int, epoch: int) -> Ranks:
    """Exchange ``count`` samples of every worker so that the counts of each class stay within one of each other."""
    # Of a class of s samples every worker has ``s // n``, and some workers have one more, called the loose sample.
    # Which of the worker's samples of the class is loose is drawn in every epoch. A round exchanges one sample of each
    # worker. The ``count`` rounds are drawn without replacement from all possible rounds: ``s // n`` for each class,
    # and as many rounds of loose samples as every worker has loose samples.
    # * In a round of a class every worker sends one sample of that class, and a permutation of the ranks without fixed
    # points gives the destinations. No count changes.
    # * All loose samples of an epoch follow one such permutation. In a round each worker sends a loose sample that it
    # has not sent yet. If the next worker has a loose sample of the same class, it sends that one. Such a choice always
    # exists: start anywhere, and let each worker pass its class on along the cycle for as long as the next worker has
    # that class. When the cycle is closed, the first worker may have to change its choice and pass that on as well.
    # This stops at the last worker at the latest, which has already made the same choice.
    # Every sample is equally likely to be sent, except for loose samples. Those of classes of which many workers have a
    # loose sample are sent somewhat more often than others, and the loose samples of one worker move together. This
    # matters only if most classes have fewer samples than there are workers.
    # Nguyen et al. (2022), Algorithm 1, for the rounds of a class; see docs/papers.md. The rounds of loose samples are
    # ours.
    # previous: ``(q,)`` ranks in which the counts of each class, and share sizes, differ by at most one.
    ranks = previous.copy()
    if count == 0:
        return ranks
    order, offsets = classes.members()
    each = np.diff(offsets) // n_workers
    sizes = np.bincount(previous, minlength=n_workers)
    chosen_rounds = choose(np.arange(len(order) // n_workers), count, "class rounds", seed, epoch)
    rounds = np.bincount(np.searchsorted(np.cumsum(each), chosen_rounds, side="right"), minlength=len(each) + 1)
    n_loose = int(rounds[-1])
    sent = np.empty((count - n_loose, n_workers), dtype=np.int64)
    loose = np.concatenate([[0], np.cumsum(np.maximum(sizes - int(each.sum()), 0))])
    samples = np.empty(int(loose[-1]), dtype=np.int64)
    codes = np.empty_like(samples)
    words = random_words(2, "classes", seed, epoch)
    _choose_sent(order, offsets, rounds, previous, sent, loose, samples, codes, words[0])
    derange(sent, random_words(len(sent), "partial", seed, epoch), ranks)
    if n_loose:
        following = np.empty(n_workers, dtype=np.int32)
        derange(np.arange(n_workers)[np.newaxis], random_words(1, "loose", seed, epoch), following)
        _exchange_loose(following, n_loose, loose, samples, codes, words[1], ranks)
    return ranks


@kernel("(i8[::1], i8[::1], i8[::1], i4[::1], u8, i4[::1])")
def _draw(order, offsets, turns, names, state, ranks):  # type: ignore[no-untyped-def]
    n_workers = names.size
    largest = 0
    for c in range(turns.size):
        largest = max(largest, offsets[c + 1] - offsets[c])
    places = np.empty(largest, dtype=np.int32)
    at = 0  # names[:at] have one more loose sample than names[at:]
    for turn in range(turns.size):
        first, last = offsets[turns[turn]], offsets[turns[turn] + 1]
        size = last - first
        place = 0
        for _ in range(size // n_workers):
            for rank in range(n_workers):
                places[place] = rank
                place += 1
        extra = size - place
        fewer = min(extra, n_workers - at)
        state = draw_front(names[at:], fewer, state)
        for k in range(fewer):
            places[place + k] = names[at + k]
        place += fewer
        if fewer < extra:  # all of names[at:] have got one, so all workers are even
            state = draw_front(names[:at], extra - fewer, state)
            for k in range(extra - fewer):
                places[place + k] = names[k]
            at = extra - fewer
        else:
            at += fewer
        state = draw_front(places[:size], size - 1, state)
        for i in range(size):
            ranks[order[first + i]] = places[i]


@kernel("(i8[::1], i8[::1], i8[::1], i4[::1], i8[:,::1], i8[::1], i8[::1], i8[::1], u8)")
def _choose_sent(  # type: ignore[no-untyped-def]
    order, offsets, rounds, ranks, sent, loose, loose_samples, loose_codes, state
):
    """Draw the samples sent in the rounds of all classes, and list every worker's loose samples by ascending class."""
    n_workers = loose.size - 1
    n_classes = offsets.size - 1
    largest = 0
    for c in range(n_classes):
        largest = max(largest, offsets[c + 1] - offsets[c])
    own = np.empty(largest + n_workers, dtype=np.int64)
    counts = np.zeros(n_workers, dtype=np.int64)
    at = loose[:-1].copy()
    row = 0
    for c in range(n_classes):
        first, last = offsets[c], offsets[c + 1]
        each = (last - first) // n_workers
        room = each + 1
        for i in range(first, last):
            rank = ranks[order[i]]
            own[rank * room + counts[rank] if each else i - first] = order[i]
            counts[rank] += 1
        if each:
            for rank in range(n_workers):
                count = counts[rank]
                counts[rank] = 0
                mine = own[rank * room : rank * room + count]
                state = draw_front(mine, min(rounds[c] + 1, count), state)
                for i in range(rounds[c]):
                    sent[row + i, rank] = mine[i]
                if count == room:
                    state, word = next_word(state)
                    loose_samples[at[rank]] = mine[rounds[c] + below(word, count - rounds[c])]
                    loose_codes[at[rank]] = c
                    at[rank] += 1
            row += rounds[c]
        else:
            for i in range(last - first):
                rank = ranks[own[i]]
                counts[rank] = 0
                loose_samples[at[rank]] = own[i]
                loose_codes[at[rank]] = c
                at[rank] += 1


@kernel("(i4[::1], i8, i8[::1], i8[::1], i8[::1], u8, i4[::1])")
def _exchange_loose(following, n_rounds, loose, samples, codes, state, ranks):  # type: ignore[no-untyped-def]
    n_workers = following.size
    waits = np.ones(samples.size, dtype=np.bool_)
    turns = np.arange(samples.size)
    for rank in range(n_workers):
        state = draw_front(turns[loose[rank] : loose[rank + 1]], loose[rank + 1] - loose[rank], state)
    at = loose[:-1].copy()
    chosen = np.full(n_workers, -1, dtype=np.int64)
    for _ in range(n_rounds):
        for rank in range(n_workers):
            while not waits[turns[at[rank]]]:
                at[rank] += 1
            chosen[rank] = -1
        for begin in range(n_workers):
            if chosen[begin] >= 0:
                continue
            chosen[begin] = turns[at[begin]]
            rank = begin
            while following[rank] != begin:
                after = following[rank]
                same = _find(codes, loose[after], loose[after + 1], waits, codes[chosen[rank]])
                chosen[after] = same if same >= 0 else turns[at[after]]
                rank = after
            while True:
                after = following[rank]
                same = _find(codes, loose[after], loose[after + 1], waits, codes[chosen[rank]])
                if same < 0 or same == chosen[after]:
                    break
                chosen[after] = same
                rank = after
        for rank in range(n_workers):
            waits[chosen[rank]] = False
            ranks[samples[chosen[rank]]] = following[rank]


@kernel()
def _find(codes, first, last, waits, code):  # type: ignore[no-untyped-def]
    """Index of ``code`` in the ascending ``codes[first:last]`` if that sample is still waiting, else -1."""
    place = first + np.searchsorted(codes[first:last], code)
    if place < last and codes[place] == code and waits[place]:
        return place
    return -1
