"""Stratified assignments: the counts of every class differ by at most one between workers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel
from dshuffle.planning.grouping import group_by
from dshuffle.planning.randomness import below, next_word, permutation, random_words
from dshuffle.planning.types import Ranks

_TABLE = 1 << 20
"""Labels in a range of at most this width, or of the number of samples, are looked up in a table, not sorted."""


def label_codes(
    labels: ArrayLike, n_samples: int | None = None, *, name: str = "labels"
) -> tuple[NDArray[np.int32], NDArray[Any]]:
    """Number the classes of labels.

    Parameters
    ----------
    labels
        ``(q,)`` integers (or booleans), the class of each sample.
    n_samples
        Number of samples, if it is known.
    name
        Name of the labels in errors.

    Returns
    -------
    codes : (q,) int32
        Positions in ``classes``.
    classes : (c,) of the labels' dtype
        The distinct labels, ascending.

    Raises
    ------
    InvalidParameter
        If the labels are not one-dimensional, of the wrong length, not integers, or all distinct.

    Examples
    --------
    >>> label_codes([30, 10, 30])
    (array([1, 0, 1], dtype=int32), array([10, 30]))
    """
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
    """Deal the samples of every group to the workers in turn.

    The counts of every group, and share sizes, differ by at most one between workers, because each group continues
    where the previous one ended. Each worker gets one of ``n_workers`` consecutive samples of a group. A new random
    permutation decides which one, so that patterns in the order of the dataset are spread too.

    Parameters
    ----------
    groups
        ``(q,)`` integers in ``[0, n_groups)``, the group of each sample.
    path
        Name of the random numbers, as in :func:`~dshuffle.planning.random_words`.

    Returns
    -------
    (q,) int32
        Ranks.

    References
    ----------
    Provatas et al. (2021), Fig. 4; see docs/papers.md. The paper deals sample ``i`` of a class to worker ``i mod n``.
    There the same workers always get the extra samples, so that share sizes differ by up to the number of classes.
    """
    order, offsets = group_by(groups, n_groups)
    ranks = np.empty(len(groups), dtype=np.int32)
    names = permutation(n_workers, "names", *path).astype(np.int32)
    _deal(order, offsets, names, random_words(1, *path)[0], ranks)
    return ranks


def stratified_ranks(labels: ArrayLike, n_workers: int, *, seed: int, n_samples: int | None = None) -> Ranks:
    """Draw an assignment with the same class proportions on every worker.

    Parameters
    ----------
    labels
        ``(q,)`` integers, the class of each sample.
    n_workers
        Number of workers, at most q.
    seed
        Any integer.
    n_samples
        Number of samples q, if it is known.

    Returns
    -------
    (q,) int32
        The worker that trains on each sample. The counts of each class, and share sizes, differ by at most one between
        workers.

    Raises
    ------
    InvalidParameter
        As in :func:`label_codes`, or if there are fewer samples than workers.

    Examples
    --------
    >>> stratified_ranks([0, 0, 0, 0, 1, 1], 2, seed=0)
    array([0, 1, 0, 1, 0, 1], dtype=int32)
    """
    codes, classes = label_codes(labels, n_samples)
    return deal_classes(codes, len(classes), n_workers, seed=seed)


def deal_classes(codes: NDArray[np.int32], n_classes: int, n_workers: int, *, seed: int) -> Ranks:
    """Draw a :func:`stratified_ranks` from labels that are already numbered.

    Parameters
    ----------
    codes
        ``(q,)`` integers in ``[0, n_classes)``.
    """
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
            state = _shuffle(lap, names.size, state)
            for place in range(names.size):
                ranks[order[first + place]] = lap[place]
            first += names.size
        for place in range(last - first):
            rest[place] = names[at]
            at = at + 1 if at + 1 < names.size else 0
        state = _shuffle(rest, last - first, state)
        for place in range(last - first):
            ranks[order[first + place]] = rest[place]


@kernel()
def _shuffle(values, count, state):  # type: ignore[no-untyped-def]
    for i in range(count - 1):
        state, word = next_word(state)
        j = i + below(word, count - i)
        values[i], values[j] = values[j], values[i]
    return state
