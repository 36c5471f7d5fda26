"""Balanced draws: equal counts of workers, of classes in every epoch, and of groups at first."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter, PlanError
from dshuffle.kernels import kernel
from dshuffle.planning.randomness import draw_front, permutation, random_words
from dshuffle.planning.types import Ranks, Samples, group_by


def balanced_sizes(n_samples: int, n_workers: int, *path: int | str) -> Samples:
    """Draw ``(n_workers,)`` share sizes that differ by at most one; random workers get the larger ones."""
    sizes = np.full(n_workers, n_samples // n_workers)
    # If the first workers always got the extra samples, they would be slower in every epoch.
    sizes[permutation(n_workers, "extra", *path)[: n_samples % n_workers]] += 1
    return sizes


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
    classes, inverse = np.unique(array, return_inverse=True)
    if len(classes) == len(array) > 1:
        hint = "Some class must have several samples. Otherwise use the sharding 'random', without balance."
        raise InvalidParameter.because(name, f"it has {len(array)} distinct values for {len(array)} samples", hint)
    return inverse.astype(np.int32), classes


def deal_groups(groups: NDArray[np.int32], n_groups: int, n_workers: int, *path: int | str) -> Ranks:
    """Deal the samples of every group to the workers in turn."""
    # The counts of every group, and share sizes, differ by at most one between workers, because each group continues
    # where the previous one ended. Each worker gets one of ``n_workers`` consecutive samples of a group. A new random
    # permutation decides which one, so that patterns in the order of the dataset are spread too.
    # Provatas et al. (2021), Fig. 4; see docs/papers.md. The paper deals sample ``i`` of a class to worker ``i mod n``.
    # There the same workers always get the extra samples, so that share sizes differ by up to the number of classes.
    # groups: ``(q,)`` integers in ``[0, n_groups)``, the group of each sample.
    order, offsets = group_by(groups, n_groups)
    ranks = np.empty(len(groups), np.int32)
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


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes that every epoch's assignment keeps balanced, with labels or known by name only."""

    name: str  # Name in records, and of the labels in the dataset.
    checksum: int | None = None  # Checksum of the labels' codes. None accepts whatever labels are found.
    # order, offsets: Samples, class after class and ascending in each: class c has ``order[offsets[c]:offsets[c +
    # 1]]``. None while only the name is known, since each member of a session reads the labels itself.
    order: Samples | None = field(default=None, compare=False)
    offsets: Samples | None = field(default=None, compare=False)

    @classmethod
    def of(cls, name: str, labels: ArrayLike, n_samples: int | None = None) -> Self:
        """Number the classes of labels."""
        codes, classes = label_codes(labels, n_samples, name=f"balance {name!r}")
        return cls(name, zlib.crc32(codes.data), *group_by(codes, len(classes)))

    def __str__(self) -> str:
        return self.name

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


def draw_classes(classes: Classes, n_workers: int, *path: int | str) -> Ranks:
    """Draw a random assignment in which the counts of each class, and share sizes, differ by at most one."""
    # Given the number of samples of each class on each worker, all assignments are equally likely. Classes are visited
    # in random order to choose the workers that get one sample more. Workers with fewer such samples so far are chosen
    # first, and others only if there are not enough of these. So all workers are equally likely to get a sample.
    order, offsets = classes.members()
    ranks = np.empty(len(order), np.int32)
    turns = permutation(len(offsets) - 1, "class turns", *path)
    names = permutation(n_workers, "class names", *path).astype(np.int32)
    _draw(order, offsets, turns, names, random_words(1, "classes", *path)[0], ranks)
    return ranks


@kernel("(i8[::1], i8[::1], i8[::1], i4[::1], u8, i4[::1])")
def _draw(order, offsets, turns, names, state, ranks):  # type: ignore[no-untyped-def]
    n_workers = names.size
    largest = 0
    for c in range(turns.size):
        largest = max(largest, offsets[c + 1] - offsets[c])
    places = np.empty(largest, np.int32)
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
