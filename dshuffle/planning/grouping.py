"""Kernels on the 64-bit words of holder masks, and a counting sort that groups samples by worker."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.kernels import Instruction, kernel, worth_a_kernel
from dshuffle.planning.types import Samples

_ctpop: Any = Instruction("count_bits")
_cttz: Any = Instruction("count_trailing_zeros")


@kernel()
def popcount(word):  # type: ignore[no-untyped-def]
    """Number of set bits of a uint64 (one machine instruction, which numba does not expose)."""
    return np.int64(_ctpop(word))


@kernel()
def lowest_bit(word):  # type: ignore[no-untyped-def]
    """Index of the lowest set bit of a uint64, or 64 if no bit is set."""
    return np.int64(_cttz(word))


@kernel()
def holds(holders, sample, worker):  # type: ignore[no-untyped-def]
    """Whether the bit of ``worker`` is set in row ``sample`` of the ``(q, words)`` holders."""
    return (holders[sample, worker >> 6] >> np.uint64(worker & 63)) & np.uint64(1) != 0


@kernel()
def count_holders(holders, sample):  # type: ignore[no-untyped-def]
    """Number of workers that hold ``sample``."""
    count = 0
    for word in range(holders.shape[1]):
        count += popcount(holders[sample, word])
    return count


@kernel()
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


@kernel()
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
    offsets = np.zeros(n_keys + 1, dtype=np.int64)
    if not worth_a_kernel(len(keys)) or (n_keys <= 2**16 and not worth_a_kernel(0)):
        # NumPy sorts integers of 16 bits by radix.
        np.cumsum(np.bincount(keys, minlength=n_keys), out=offsets[1:])
        return np.argsort(keys.astype(np.uint16) if n_keys <= 2**16 else keys, kind="stable"), offsets
    order = np.empty(len(keys), dtype=np.int64)
    _counting_sort(keys, order, offsets)
    return order, offsets


@kernel()
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
