"""Rows: all arrays of a sample packed into contiguous bytes, with a checksum.

A row layout is a packed NumPy structured dtype. A ``(n, nbytes)`` uint8 matrix and a ``(n,)`` array of records are two
views of the same memory: network code moves bytes, training code reads fields, and nothing is copied in between.

References
----------
RFC 4418 (UMAC), section 5.2, for the checksum's NH hash. We combine words and keys by exclusive or instead of addition.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.encodings import Encoding
from dshuffle.errors import InvalidParameter
from dshuffle.kernels import prefetch_row, row_kernel, worth_a_kernel

# NumPy gathers rows shorter than _LONG_ROW bytes faster. For longer rows it pays to prefetch _AHEAD rows ahead.
_LONG_ROW, _AHEAD = 512, 4

ByteMatrix = NDArray[np.uint8]
Checksums = NDArray[np.uint32]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Position of each array of a sample within its row.

    ``fields`` has ``(name, dtype, per-sample shape)`` of each array. :meth:`of` puts the widest items first, so
    that with the usual dtypes every field is aligned within the row without padding. ``encodings`` has those of arrays
    whose stored numbers, which are in the rows, are not their values.
    """

    fields: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]
    encodings: tuple[tuple[str, Encoding], ...] = ()
    dtype: np.dtype[np.void] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        dtype = np.dtype(list(self.fields))
        if dtype.hasobject:
            bad = next(name for name, item, _ in self.fields if item.hasobject)
            raise InvalidParameter.of(
                f"arrays[{bad!r}].dtype",
                "object",
                "a dtype of fixed size",
                "Cast it, or encode it as numbers.",
            )
        object.__setattr__(self, "dtype", dtype)

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, tuple[np.dtype[np.generic], tuple[int, ...]]],
        encodings: Mapping[str, Encoding] = MappingProxyType({}),
    ) -> RowLayout:
        """Create a layout from the stored dtype and per-sample shape of each named array, and the encodings of some."""
        order = sorted(arrays, key=lambda name: (-arrays[name][0].alignment, name))
        fields = tuple((name, arrays[name][0], tuple(arrays[name][1])) for name in order)
        return cls(fields, tuple(sorted(encodings.items())))

    def encoding(self, name: str) -> Encoding | None:
        """How the stored numbers of an array become values; None if they are the values."""
        return dict(self.encodings).get(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays, in row order."""
        return tuple(name for name, _, _ in self.fields)

    @property
    def nbytes(self) -> int:
        """Size of a row in bytes."""
        return self.dtype.itemsize

    def empty(self, n_rows: int) -> ByteMatrix:
        """Allocate an uninitialised ``(n_rows, nbytes)`` byte matrix."""
        return np.empty((n_rows, self.nbytes), dtype=np.uint8)

    def column(self, rows: ByteMatrix, name: str) -> NDArray[np.generic]:
        """Return one array of contiguous rows as a writeable view of shape ``(n_rows, *per-sample shape)``."""
        return self.records(rows)[name]

    def matrix(self, rows: ByteMatrix, name: str) -> tuple[NDArray[Any], int]:
        """Return a 2-D view of the rows for kernels, and the first column of one array in it."""
        column = self.column(rows, name)
        fields = self.dtype.fields
        assert fields is not None
        item, offset = column.dtype, fields[name][1]
        if item.itemsize and self.nbytes % item.itemsize == 0 and offset % item.itemsize == 0:
            return rows.view(item), offset // item.itemsize
        return column.reshape(len(rows), -1), 0

    def records(self, rows: ByteMatrix) -> NDArray[np.void]:
        """Return the rows as a ``(n_rows,)`` structured array that shares their memory."""
        if self.nbytes == 0:
            return np.empty(len(rows), dtype=self.dtype)
        return rows.view(self.dtype)[:, 0]


def checksum_rows(
    rows: ByteMatrix, sample_ids: NDArray[np.int64], slots: NDArray[np.integer] | None = None
) -> NDArray[np.uint32]:
    """Compute a 32-bit checksum of every row of a matrix, or of ``rows[slots]``, and its sample number.

    The sample number is part of the checksum, so a correct row with a wrong sample number is detected too. Checksums
    protect against faults, not against an adversary.
    """
    out = np.empty(len(sample_ids), dtype=np.uint32)
    if not worth_a_kernel(len(out) * rows.shape[1]):
        words, tail = row_words(rows if slots is None else rows[slots])
        return _checksums_without_numba(words, tail, row_keys(words.shape[1]), sample_ids)
    words, tail = row_words(rows)
    _checksum_all(
        words, tail, row_keys(words.shape[1]), np.arange(len(out)) if slots is None else slots, sample_ids, out
    )
    return out


def _checksums_without_numba(
    words: NDArray[np.uint64], tail: ByteMatrix, keys: NDArray[np.uint64], sample_ids: NDArray[np.int64]
) -> Checksums:
    """The checksums that :func:`checksum_words` computes."""
    half = np.uint64(0xFFFFFFFF)
    mixed = words ^ keys
    h = ((mixed & half) * (mixed >> np.uint64(32))).sum(axis=1, dtype=np.uint64)
    for word in (sample_ids.astype(np.uint64), *tail.T.astype(np.uint64), np.ones_like(h)):
        h = _stepped(h, word)
    return np.asarray((h ^ (h >> np.uint64(32))) & half, np.uint32)


def gather_rows(rows: ByteMatrix, slots: NDArray[np.integer], out: ByteMatrix) -> None:
    """Copy ``rows[slots]`` into the contiguous buffer ``out``."""
    if rows.shape[1] % 8 or rows.shape[1] < _LONG_ROW:
        np.take(rows, slots, axis=0, out=out, mode="clip")
    else:
        _gather(rows.view(np.uint64), slots, out.view(np.uint64))


def scatter_rows(rows: ByteMatrix, slots: NDArray[np.integer], arrived: ByteMatrix) -> None:
    """Copy ``arrived`` to ``rows[slots]``. Both must be contiguous."""
    if rows.shape[1]:
        # NumPy copies an opaque item in one step, but a row of uint8 byte by byte.
        item = np.dtype((np.void, rows.shape[1]))
        rows.view(item)[slots, 0] = arrived.view(item)[:, 0]


def scatter_verified(
    rows: ByteMatrix,
    slots: NDArray[np.integer],
    arrived: ByteMatrix,
    sample_ids: NDArray[np.int64],
    checksums: NDArray[np.uint32],
) -> int:
    """Copy received rows to ``rows[slots]``, each after verifying its checksum.

    One pass does both, so that each row is read from memory only once.
    """
    words, tail = row_words(arrived)
    keys = row_keys(words.shape[1])
    return int(_scatter_verified(*row_words(rows), slots, words, tail, keys, sample_ids, checksums))


@functools.cache
def row_keys(n_words: int) -> NDArray[np.uint64]:
    """Return fixed random words, one per word of a row, which are the same in every process."""
    return np.random.PCG64(0x9E3779B97F4A7C15).random_raw(n_words)


def row_words(rows: ByteMatrix) -> tuple[NDArray[np.uint64], ByteMatrix]:
    """Split rows into 8-byte words and the remaining bytes, as views."""
    whole = rows.shape[1] // 8 * 8
    return rows[:, :whole].view(np.uint64), rows[:, whole:]


def _stepped(h: Any, word: Any) -> Any:
    """Mix one more word into the hash."""
    h = h ^ word
    return ((h << np.uint64(27)) | (h >> np.uint64(37))) * np.uint64(0x9E3779B97F4A7C15)


_step = row_kernel()(_stepped)


@row_kernel()
def checksum_words(words, tail, keys, sample_id):  # type: ignore[no-untyped-def]
    """Compute the checksum of one row, given as 8-byte words and the remaining bytes."""
    # NH: a sum of products of 32-bit halves. It compiles to vector instructions and is as fast as memory.
    half = np.uint64(0xFFFFFFFF)
    h = np.uint64(0)
    for i in range(words.size):
        word = words[i] ^ keys[i]
        h += (word & half) * (word >> np.uint64(32))
    h = _step(h, np.uint64(sample_id))
    for i in range(tail.size):
        h = _step(h, np.uint64(tail[i]))
    h = _step(h, np.uint64(1))
    return np.uint32((h ^ (h >> np.uint64(32))) & half)


@row_kernel(
    "(u8[:,::1], u1[:,::1], u8[::1], i8[::1], i8[::1], u4[::1])",
    "(u8[:,:], u1[:,:], u8[::1], i8[::1], i8[::1], u4[::1])",
)
def _checksum_all(words, tail, keys, slots, sample_ids, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = checksum_words(words[slots[i]], tail[slots[i]], keys, sample_ids[i])


@row_kernel(
    "(u8[:,::1], u1[:,::1], i8[::1], u8[:,::1], u1[:,::1], u8[::1], i8[::1], u4[::1])",
    "(u8[:,:], u1[:,:], i8[::1], u8[:,:], u1[:,:], u8[::1], i8[::1], u4[::1])",
)
def _scatter_verified(  # type: ignore[no-untyped-def]
    words, tail, slots, arrived_words, arrived_tail, keys, sample_ids, checksums
):
    for i in range(slots.size):
        source, source_tail = arrived_words[i], arrived_tail[i]
        if checksum_words(source, source_tail, keys, sample_ids[i]) != checksums[i]:
            return i
        # With signed indices LLVM does not vectorise the loops below.
        to, at = np.uint64(slots[i]), np.uint64(i)
        for c in range(words.shape[1]):
            words[to, c] = arrived_words[at, c]
        for c in range(tail.shape[1]):
            tail[to, c] = arrived_tail[at, c]
    return -1


@row_kernel("(u8[:,::1], i8[::1], u8[:,::1])")
def _gather(rows, slots, out):  # type: ignore[no-untyped-def]
    n_words = rows.shape[1]
    row_0 = np.uint64(rows.ctypes.data)
    for i in range(slots.size):
        if i + _AHEAD < slots.size:
            prefetch_row(row_0, n_words * 8, slots[i + _AHEAD])
        at, to = np.uint64(slots[i]), np.uint64(i)
        for w in range(n_words):
            out[to, w] = rows[at, w]
