"""Array types, kernels on holder masks, and sorting by small keys.

Holders are a ``(q, words)`` uint64 array with ``words = ceil(n / 64)``. Worker k caches sample j if bit ``k % 64`` of
``holders[j, k // 64]`` is set.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_ranks
from dshuffle.kernels import kernel, worth_a_kernel

Samples = NDArray[np.int64]
Integers = NDArray[np.int64]
Ranks = NDArray[np.int32]
Holders = NDArray[np.uint64]
Words = NDArray[np.uint64]
Amounts = NDArray[np.float64]
Mask = NDArray[np.bool_]

ONE = np.uint64(1)
NO_SAMPLES = np.empty(0, np.int64)


@kernel()
def popcount(word):  # type: ignore[no-untyped-def]
    """Number of set bits of a uint64. LLVM knows this text, and makes one instruction of it."""
    word -= (word >> ONE) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


@kernel()
def bit(worker):  # type: ignore[no-untyped-def]
    """The bit of a worker in its word of a mask."""
    return ONE << np.uint64(worker & 63)


@kernel()
def lowest_bit(word):  # type: ignore[no-untyped-def]
    """Index of the lowest set bit of a uint64, or 64 if no bit is set."""
    return popcount(~word & (word - ONE))


@kernel()
def holds(holders, sample, worker):  # type: ignore[no-untyped-def]
    """Whether the bit of ``worker`` is set in row ``sample`` of the ``(q, words)`` holders."""
    return holders[sample, worker >> 6] & bit(worker) != 0


# Numba does not find generators that it loads from a cache. Kernels that call them are cached all the same.


@kernel(cache=False)
def each_bit(word):  # type: ignore[no-untyped-def]
    """The indices of the set bits of a uint64, ascending."""
    while word != 0:
        yield lowest_bit(word)
        word &= word - ONE


@kernel(cache=False, _nrt=False)  # so that its state does not count references of the array
def each_holder(holders, sample):  # type: ignore[no-untyped-def]
    """The workers that hold ``sample``, ascending."""
    for word in range(holders.shape[1]):
        rest = holders[sample, word]
        while rest != 0:
            yield word * 64 + lowest_bit(rest)
            rest &= rest - ONE


@kernel()
def set_name(holders, sample, names):  # type: ignore[no-untyped-def]
    """The XOR of a word for each holder, which names a set of holders."""
    name = np.uint64(0)
    for worker in each_holder(holders, sample):
        name ^= names[worker]
    return name


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
    counts = np.zeros(n_workers, np.int64)
    for sample in range(holders.shape[0]):
        for word in range(holders.shape[1]):
            for worker in each_bit(holders[sample, word]):
                counts[word * 64 + worker] += 1
    return counts


@kernel("(u8[:,::1], i4[::1])")
def add_holders(holders, ranks):  # type: ignore[no-untyped-def]
    """Set the bit of worker ``ranks[j]`` for every sample j, in place."""
    for sample in range(ranks.size):
        holders[sample, ranks[sample] >> 6] |= bit(ranks[sample])


def holders_of(assignment: ArrayLike, n_workers: int) -> Holders:
    """Holders if every worker caches exactly its share."""
    ranks = as_ranks("assignment", assignment, n_workers)
    holders = np.zeros((len(ranks), -(-n_workers // 64)), np.uint64)
    add_holders(holders, ranks)
    return holders


def held_by(holders: Holders, worker: int) -> Mask:
    """``(q,)`` mask of the samples that a worker holds."""
    held: Mask = (holders[:, worker // 64] & np.uint64(1 << worker % 64)) != 0
    return held


def missing_samples(holders: Holders, destinations: Ranks) -> Samples:
    """Return the samples that their destination, ``(q,)`` ranks, does not hold, ascending; ``(D,)`` int64."""
    missing = np.empty(len(destinations), np.int64)
    return missing[: _missing(holders, destinations, missing)]


@kernel("(u8[:,::1], i4[::1], i8[::1])")
def _missing(holders, destinations, missing):  # type: ignore[no-untyped-def]
    count = 0
    for sample in range(destinations.size):
        missing[count] = sample
        count += not holds(holders, sample, destinations[sample])
    return count


def group_by(keys: NDArray[np.integer], n_keys: int) -> tuple[Samples, Samples]:
    """Sort the indices of ``(m,)`` keys in [0, ``n_keys``) stably; also where each key begins, ``(n_keys + 1,)``."""
    if not worth_a_kernel(len(keys)) or (n_keys <= 2**16 and not worth_a_kernel(0)):
        # NumPy sorts integers of 16 bits by radix.
        small = keys.astype(np.uint16) if n_keys <= 2**16 else keys
        return np.argsort(small, kind="stable"), starts_of(np.bincount(keys, minlength=n_keys))
    order, offsets = np.empty(len(keys), np.int64), np.zeros(n_keys + 1, np.int64)
    _counting_sort(keys, order, offsets)
    return order, offsets


def starts_of(counts: Integers | Mask) -> Integers:
    """``(n + 1,)`` int64, where each of ``(n,)`` parts of these sizes begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(counts)])


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


def sorted_positions(sorted_ids: Samples, ids: Samples) -> Samples:
    """``(k,)`` int64, the position of each of the ``(k,)`` ids in sorted ids without duplicates, or -1."""
    if not len(sorted_ids):
        return np.full(len(ids), -1, np.int64)
    positions = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
    return np.where(sorted_ids[positions] == ids, positions, -1)
