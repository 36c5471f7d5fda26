"""XOR coding: encode rows into packets, and decode and verify rows from packets.

A packet is the XOR of some rows, and its checksum is the XOR of their checksums. Removing the known rows and their
checksums from a packet leaves one row and its checksum. A decoded row is therefore verified like an uncoded one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dshuffle.kernels import prefetch, prefetch_row, row_kernel
from dshuffle.rows import ByteMatrix, Checksums, Places, checksum_words, row_keys, row_words

# Rows are read in random order, so most of the time is spent waiting for memory. The hardware prefetcher detects that a
# row is read sequentially, but it cannot predict where the next row begins and reacts late at its beginning.
AHEAD_PACKETS, AHEAD_BYTES = 8, 1600
"""Limits on how far ahead rows are prefetched: in packets, and in bytes per component; at least one packet ahead."""


def encode(
    rows: ByteMatrix,
    checksums: Checksums,
    offsets: Places,
    slots: Places,
    packets: Places,
    out: ByteMatrix,
    out_checksums: Checksums,
) -> None:
    """XOR rows into packets, each of the rows ``slots[offsets[packet]:offsets[packet + 1]]``; overwrite ``out``."""
    _encode(_wide(rows), checksums, offsets, slots, packets, _wide(out), out_checksums)


def decode(
    rows: ByteMatrix,
    checksums: Checksums,
    packets: ByteMatrix,
    packet_checksums: Checksums,
    offsets: Places,
    slots: Places,
    targets: Places,
    sample_ids: Places,
) -> int:
    """Decode one row from each packet, verify it and write it to ``rows[targets]``; skip those with a negative target.

    ``slots[offsets[i]:offsets[i + 1]]`` are the known rows of packet i, and ``sample_ids`` the samples of the decoded
    rows. Returns the first packet whose row is wrong, or -1.
    """
    words, tail = row_words(rows)
    wrong: int = _decode(
        _wide(rows),
        words,
        tail,
        checksums,
        _wide(packets),
        packet_checksums,
        offsets,
        slots,
        targets,
        sample_ids,
        row_keys(words.shape[1]),
    )
    return wrong


def add_packets(
    rows: ByteMatrix,
    checksums: Checksums,
    packets: ByteMatrix,
    packet_checksums: Checksums,
    offsets: Places,
    targets: Places,
) -> None:
    """XOR packet i into the rows ``targets[offsets[i]:offsets[i + 1]]``, for rows decoded from several packets."""
    _add(_wide(rows), checksums, _wide(packets), packet_checksums, offsets, targets)


def _wide(rows: ByteMatrix) -> NDArray[np.unsignedinteger]:
    """View contiguous rows as the widest items that divide a row, for vector instructions."""
    nbytes = rows.shape[1]
    return rows.view(np.uint64 if nbytes % 8 == 0 else np.uint32 if nbytes % 4 == 0 else np.uint8)


@row_kernel()
def _packets_ahead(nbytes):  # type: ignore[no-untyped-def]
    """Number of packets by which to prefetch. Too few do not help; with too many, rows are evicted before use."""
    return max(1, min(AHEAD_PACKETS, AHEAD_BYTES // max(1, nbytes)))


@row_kernel(inline="always")
def _prefetch_all(row_0, checksum_0, nbytes, slots):  # type: ignore[no-untyped-def]
    """Prefetch the rows and checksums in some slots."""
    for slot in slots:
        prefetch(checksum_0 + np.uint64(slot) * np.uint64(4))
        prefetch_row(row_0, nbytes, slot)


# Row indices are unsigned and columns start at zero, so that LLVM can prove that no index is negative. It
# vectorises the loops only then, which makes them 4 times as fast.


@row_kernel(inline="always")
def _xor_row(target, at, base, i, rows, slots, begin, end):  # type: ignore[no-untyped-def]
    """``target[at] = base[i] ^ rows[slots[begin]] ^ ... ^ rows[slots[end - 1]]``, two rows at a time."""
    n = target.shape[1]
    first = begin
    if end - begin >= 2:
        a, b = np.uint64(slots[begin]), np.uint64(slots[begin + 1])
        for w in range(n):
            target[at, w] = base[i, w] ^ rows[a, w] ^ rows[b, w]
        first = begin + 2
    else:
        for w in range(n):
            target[at, w] = base[i, w]
    while first + 1 < end:
        a, b = np.uint64(slots[first]), np.uint64(slots[first + 1])
        for w in range(n):
            target[at, w] ^= rows[a, w] ^ rows[b, w]
        first += 2
    if first < end:
        a = np.uint64(slots[first])
        for w in range(n):
            target[at, w] ^= rows[a, w]


@row_kernel(
    "(u8[:,::1], u4[::1], i8[::1], i8[::1], i8[::1], u8[:,::1], u4[::1])",
    "(u4[:,::1], u4[::1], i8[::1], i8[::1], i8[::1], u4[:,::1], u4[::1])",
    "(u1[:,::1], u4[::1], i8[::1], i8[::1], i8[::1], u1[:,::1], u4[::1])",
)
def _encode(rows, checksums, offsets, slots, packets, out, out_checksums):  # type: ignore[no-untyped-def]
    nbytes = rows.shape[1] * rows.itemsize
    ahead = _packets_ahead(nbytes)
    row_0, checksum_0 = np.uint64(rows.ctypes.data), np.uint64(checksums.ctypes.data)
    for i in range(packets.size):
        if i + ahead < packets.size:
            soon = packets[i + ahead]
            _prefetch_all(row_0, checksum_0, nbytes, slots[offsets[soon] : offsets[soon + 1]])
        begin, end = offsets[packets[i]], offsets[packets[i] + 1]
        at, first = np.uint64(i), np.uint64(slots[begin])
        total = checksums[first]
        for e in range(begin + 1, end):
            total ^= checksums[np.uint64(slots[e])]
        out_checksums[i] = total
        _xor_row(out, at, rows, first, rows, slots, begin + 1, end)


@row_kernel(
    "(u8[:,::1], u8[:,::1], u1[:,::1], u4[::1], u8[:,::1], u4[::1], i8[::1], i8[::1], i8[::1], i8[::1], u8[::1])",
    "(u4[:,::1], u8[:,:], u1[:,:], u4[::1], u4[:,::1], u4[::1], i8[::1], i8[::1], i8[::1], i8[::1], u8[::1])",
    "(u1[:,::1], u8[:,:], u1[:,:], u4[::1], u1[:,::1], u4[::1], i8[::1], i8[::1], i8[::1], i8[::1], u8[::1])",
)
def _decode(  # type: ignore[no-untyped-def]
    rows, words, tail, checksums, packets, packet_checksums, offsets, slots, targets, sample_ids, keys
):
    nbytes = rows.shape[1] * rows.itemsize
    ahead = _packets_ahead(nbytes)
    row_0, checksum_0 = np.uint64(rows.ctypes.data), np.uint64(checksums.ctypes.data)
    for i in range(targets.size):
        soon = i + ahead
        if soon < targets.size and targets[soon] >= 0:
            _prefetch_all(row_0, checksum_0, nbytes, slots[offsets[soon] : offsets[soon + 1]])
            _prefetch_all(row_0, checksum_0, nbytes, targets[soon : soon + 1])
        if targets[i] < 0:
            continue
        begin, end = offsets[i], offsets[i + 1]
        to = np.uint64(targets[i])
        total = packet_checksums[i]
        for e in range(begin, end):
            total ^= checksums[np.uint64(slots[e])]
        _xor_row(rows, to, packets, np.uint64(i), rows, slots, begin, end)
        if checksum_words(words[to], tail[to], keys, sample_ids[i]) != total:
            return i
        checksums[to] = total
    return -1


@row_kernel(
    "(u8[:,::1], u4[::1], u8[:,::1], u4[::1], i8[::1], i8[::1])",
    "(u4[:,::1], u4[::1], u4[:,::1], u4[::1], i8[::1], i8[::1])",
    "(u1[:,::1], u4[::1], u1[:,::1], u4[::1], i8[::1], i8[::1])",
)
def _add(rows, checksums, packets, packet_checksums, offsets, targets):  # type: ignore[no-untyped-def]
    for i in range(offsets.size - 1):
        for e in range(offsets[i], offsets[i + 1]):
            to, at = np.uint64(targets[e]), np.uint64(i)
            for w in range(rows.shape[1]):
                rows[to, w] ^= packets[at, w]
            checksums[to] ^= packet_checksums[i]
