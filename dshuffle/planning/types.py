"""Array types, kernels on holder masks, and sorting by small keys.

Holders are a ``(q, words)`` uint64 array with ``words = ceil(n / 64)``. Worker k caches sample j if bit ``k % 64`` of
``holders[j, k // 64]`` is set.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer, as_ranks
from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel, worth_a_kernel

Samples = NDArray[np.int64]
Ranks = NDArray[np.int32]
Holders = NDArray[np.uint64]
Words = NDArray[np.uint64]
Amounts = NDArray[np.float64]


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


@kernel("(u8[:,::1], i8[::1])")
def count_each(holders, samples):  # type: ignore[no-untyped-def]
    """``(k,)`` int64 number of workers that hold each of the ``(k,)`` samples."""
    counts = np.empty(samples.size, dtype=np.int64)
    for i in range(samples.size):
        counts[i] = count_holders(holders, samples[i])
    return counts


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
    """Count each integer of [``first``, ``end``) in ``keys``; ``(end - first,)`` int64."""
    # ``keys`` must not contain other integers. ``np.bincount`` first converts all keys to int64, which takes longer
    # than the count.
    counts = np.zeros(end - first, dtype=np.int64)
    for index in range(keys.size):
        counts[keys[index] - first] += 1
    return counts


def group_by(keys: NDArray[np.integer], n_keys: int) -> tuple[Samples, Samples]:
    """Sort indices by small integer keys; indices with equal keys keep their order."""
    # keys: ``(m,)`` integers in [0, ``n_keys``).
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


def sorted_positions(sorted_ids: NDArray[np.int64], ids: NDArray[np.int64]) -> Samples:
    """``(k,)`` int64, the position of each of the ``(k,)`` ids in sorted ids without duplicates, or -1."""
    if not len(sorted_ids):
        return np.full(len(ids), -1, np.int64)
    positions = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
    return np.where(sorted_ids[positions] == ids, positions, -1)


def as_instance(holders: ArrayLike, destinations: ArrayLike, n_workers: int) -> tuple[Holders, Ranks]:
    """Check where samples are and where they must go, as ``(q, words)`` uint64 and ``(q,)`` int32."""
    # holders: ``(q, words)`` non-negative integers. For up to 64 workers, ``(q,)`` is allowed too.
    n_workers = as_integer("n_workers", n_workers, 1)
    ranks, words = as_ranks("destinations", destinations, n_workers), -(-n_workers // 64)
    masks = np.asarray(holders)
    if masks.ndim == 1 and words == 1:
        masks = masks[:, np.newaxis]
    if masks.shape != (len(ranks), words):
        raise InvalidParameter.of("holders.shape", masks.shape, f"({len(ranks)}, {words}): a bit for each worker")
    if masks.dtype.kind not in "iu" or (masks.dtype.kind == "i" and (masks < 0).any()):
        raise InvalidParameter.of("holders.dtype", str(masks.dtype), "integers >= 0")
    masks = np.ascontiguousarray(masks, dtype=np.uint64)
    if n_workers % 64 and (masks[:, -1] >> np.uint64(n_workers % 64)).any():
        raise InvalidParameter.because("holders", f"they name workers beyond {n_workers - 1}")
    return masks, ranks


def holders_of(assignment: ArrayLike, n_workers: int) -> Holders:
    """Holders if every worker caches exactly its share."""
    ranks = as_ranks("assignment", assignment, n_workers)
    holders = np.zeros((len(ranks), -(-n_workers // 64)), dtype=np.uint64)
    add_holders(holders, ranks)
    return holders


def held_by(holders: Holders, worker: int) -> NDArray[np.bool_]:
    """``(q,)`` mask of the samples that a worker holds."""
    held: NDArray[np.bool_] = (holders[:, worker // 64] & np.uint64(1 << worker % 64)) != 0
    return held


@kernel("(u8[:,::1], i4[::1])")
def add_holders(holders, ranks):  # type: ignore[no-untyped-def]
    """Set the bit of worker ``ranks[j]`` for every sample j, in place."""
    for sample in range(ranks.size):
        rank = ranks[sample]
        holders[sample, rank >> 6] |= np.uint64(1) << np.uint64(rank & 63)
