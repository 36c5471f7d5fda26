"""Kernels on the 64-bit words of holder masks, and a counting sort that groups samples by worker."""

from __future__ import annotations

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from dshuffle.planning.types import Samples


@intrinsic
def _ctpop(typingctx, word):  # type: ignore[no-untyped-def]

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


@intrinsic
def _cttz(typingctx, word):  # type: ignore[no-untyped-def]

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        zero_is_undefined = context.get_constant(types.boolean, False)
        return builder.cttz(args[0], zero_is_undefined)

    return types.uint64(types.uint64), codegen


@numba.njit(nogil=True, cache=True)
def popcount(word):  # type: ignore[no-untyped-def]
    """Number of set bits of a uint64 (one machine instruction, which numba does not expose)."""
    return np.int64(_ctpop(word))  # type: ignore[call-arg]


@numba.njit(nogil=True, cache=True)
def lowest_bit(word):  # type: ignore[no-untyped-def]
    """Index of the lowest set bit of a uint64, or 64 if no bit is set."""
    return np.int64(_cttz(word))  # type: ignore[call-arg]


@numba.njit(nogil=True, cache=True)
def holds(holders, sample, worker):  # type: ignore[no-untyped-def]
    """Whether the bit of ``worker`` is set in row ``sample`` of the ``(q, words)`` holders."""
    return (holders[sample, worker >> 6] >> np.uint64(worker & 63)) & np.uint64(1) != 0


@numba.njit(nogil=True, cache=True)
def count_holders(holders, sample):  # type: ignore[no-untyped-def]
    """Number of workers that hold ``sample``."""
    count = 0
    for word in range(holders.shape[1]):
        count += popcount(holders[sample, word])
    return count


@numba.njit(nogil=True, cache=True)
def count_held(holders, n_workers):  # type: ignore[no-untyped-def]
    """``(n_workers,)`` int64 number of samples that each worker holds."""
    counts = np.zeros(n_workers, dtype=np.int64)
    for sample in range(holders.shape[0]):
        for word in range(holders.shape[1]):
            rest = holders[sample, word]
            while rest != 0:
                counts[word * 64 + lowest_bit(rest)] += 1
                rest &= rest - np.uint64(1)
    return counts


@numba.njit(nogil=True, cache=True)
def count_keys(keys, first, end):  # type: ignore[no-untyped-def]
    """Count each integer of [``first``, ``end``) in ``keys``; ``(end - first,)`` int64.

    ``keys`` must not contain other integers. ``np.bincount`` first converts all keys to int64, which takes longer than
    the count.
    """
    counts = np.zeros(end - first, dtype=np.int64)
    for index in range(keys.size):
        counts[keys[index] - first] += 1
    return counts


def group_by(keys: NDArray[np.integer], n_keys: int) -> tuple[Samples, Samples]:
    """Sort indices by small integer keys; indices with equal keys keep their order.

    Parameters
    ----------
    keys
        ``(m,)`` integers in [0, ``n_keys``).

    Returns
    -------
    order : (m,) int64
        Indices into ``keys``, group after group.
    offsets : (n_keys + 1,) int64
        The indices with key ``k`` are ``order[offsets[k]:offsets[k + 1]]``.

    Examples
    --------
    >>> order, offsets = group_by(np.array([2, 0, 2, 0]), 3)
    >>> order, offsets
    (array([1, 3, 0, 2]), array([0, 2, 2, 4]))
    """
    order = np.empty(len(keys), dtype=np.int64)
    offsets = np.zeros(n_keys + 1, dtype=np.int64)
    _counting_sort(keys, order, offsets)
    return order, offsets


@numba.njit(nogil=True, cache=True)
def _counting_sort(keys, order, offsets):  # type: ignore[no-untyped-def]
    for index in range(keys.size):
        offsets[keys[index] + 1] += 1
    # A loop, because np.cumsum and the assignment of an array take three seconds to compile.
    for key in range(offsets.size - 1):
        offsets[key + 1] += offsets[key]
    place = offsets[:-1].copy()
    for index in range(keys.size):
        key = keys[index]
        order[place[key]] = index
        place[key] += 1
