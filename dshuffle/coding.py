"""XOR of rows, for coded deliveries: encode packets on the server, decode them on the workers.

XOR works on raw bytes, so it is exact for every dtype, and a row's checksum is coded beside the row by the same
sums: what a packet says of a sample is verified like any other row after decoding.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

ByteMatrix = NDArray[np.uint8]
Checksums = NDArray[np.uint32]
Indices = NDArray[np.int64]


def xor_into(
    out: ByteMatrix,
    out_checksums: Checksums,
    places: Indices,
    rows: ByteMatrix,
    checksums: Checksums,
    slots: Indices,
) -> None:
    """``out[places[i]] ^= rows[slots[i]]`` for every i, in order, and the same for the checksums.

    Parameters
    ----------
    out, out_checksums
        ``(n, nbytes)`` uint8 and ``(n,)`` uint32, changed in place.
    places
        ``(m,)`` rows of ``out``, any number of times each.
    rows, checksums
        ``(r, nbytes)`` uint8 and ``(r,)`` uint32. May be the same memory as ``out``.
    slots
        ``(m,)`` rows of ``rows``.

    Examples
    --------
    >>> rows = np.array([[1, 2], [4, 8]], np.uint8)
    >>> sums = np.array([1, 2], np.uint32)
    >>> packet, packet_sum = np.zeros((1, 2), np.uint8), np.zeros(1, np.uint32)
    >>> xor_into(packet, packet_sum, np.array([0, 0]), rows, sums, np.array([0, 1]))
    >>> packet, packet_sum
    (array([[ 5, 10]], dtype=uint8), array([3], dtype=uint32))

    References
    ----------
    Paper 000, Algorithms 2 and 3. The paper adds real numbers; XOR loses no precision and takes any dtype.
    """
    whole = out.shape[1] // 8 * 8
    _xor_into(
        out[:, :whole].view(np.uint64),
        out[:, whole:],
        out_checksums,
        places,
        rows[:, :whole].view(np.uint64),
        rows[:, whole:],
        checksums,
        slots,
    )


@numba.njit(nogil=True, cache=True)
def _xor_into(  # type: ignore[no-untyped-def]
    out_words, out_tail, out_checksums, places, words, tail, checksums, slots
):
    for i in range(places.size):
        place, slot = places[i], slots[i]
        target, source = out_words[place], words[slot]
        for c in range(target.size):
            target[c] ^= source[c]
        target_tail, source_tail = out_tail[place], tail[slot]
        for c in range(target_tail.size):
            target_tail[c] ^= source_tail[c]
        out_checksums[place] ^= checksums[slot]
