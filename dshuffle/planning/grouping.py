"""Kernels on the 64-bit words of holder masks, and a counting sort that groups samples by worker."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dshuffle.kernels import kernel, worth_a_kernel
from dshuffle.planning.types import Samples


@kernel()
def popcount(word):  # type: ignore[no-untyped-def]
    """Number of set bits of a uint64. LLVM knows this text, and makes one instruction of it."""
    word -= (word >> np.uint64(1)) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@kernel()
def lowest_bit(word):  # type: ignore[no-untyped-def]
    """Index of the lowest set bit of a uint64, or 64 if no bit is set."""
    return popcount(~word & (word - np.uint64(1)))


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


@kernel("(u8[:,::1], i8)")
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


@kernel("(i4[::1], i8, i8)")
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
    """
    offsets = np.zeros(n_keys + 1, dtype=np.int64)
    if not worth_a_kernel(len(keys)) or (n_keys <= 2**16 and not worth_a_kernel(0)):
        # NumPy sorts integers of 16 bits by radix.
        np.cumsum(np.bincount(keys, minlength=n_keys), out=offsets[1:])
        return np.argsort(keys.astype(np.uint16) if n_keys <= 2**16 else keys, kind="stable"), offsets
    order = np.empty(len(keys), dtype=np.int64)
    _counting_sort(keys, order, offsets)
    return order, offsets


@kernel("(i4[::1], i8[::1], i8[::1])", "(i8[::1], i8[::1], i8[::1])")
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
