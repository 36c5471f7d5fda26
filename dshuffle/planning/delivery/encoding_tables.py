"""Encoding tables: needed samples grouped by the set of workers that a packet can serve.

The set of a needed sample is its holders and its destination. The table of a set has a column for every destination
in the set. The destination needs the samples of its column, and all other workers of the set hold them. One sample
from every column therefore makes a packet that all workers of the set can decode.

References
----------
Chung et al. (2017), Algorithm 1; see docs/papers.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dshuffle.planning.grouping import group_by
from dshuffle.planning.packets import SERVER, Packets, missing_samples
from dshuffle.planning.types import Holders, Ranks, Samples, Words

MOST_WORKERS = 64
"""A set of workers is one machine word. Sets of more workers hardly ever repeat, so tables would not help."""

_DIGIT = 11


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Non-empty tables by ascending mask of their set, with columns by ascending destination.

    Parameters
    ----------
    masks
        ``(T,)`` uint64, the mask of each table's set.
    columns
        ``(T + 1,)`` int64; the non-empty columns of table t are ``columns[t]`` to ``columns[t + 1] - 1``.
    starts
        ``(C + 1,)`` int64; column c has the samples ``samples[starts[c]:starts[c + 1]]``, ascending.
    workers
        ``(C,)`` int32, the destination of each column.
    samples
        ``(D,)`` int64, the needed samples.
    """

    masks: Words
    columns: Samples
    starts: Samples
    workers: Ranks
    samples: Samples

    @classmethod
    def of(cls, holders: Holders, destinations: Ranks, n_workers: int) -> Tables:
        """Build the tables of the needed samples from checked arrays, for at most 64 workers.

        Examples
        --------
        >>> holders = np.array([[0b010], [0b011], [0b001]], dtype=np.uint64)
        >>> tables = Tables.of(holders, np.array([0, 2, 1], dtype=np.int32), 3)
        >>> tables.masks, tables.columns, tables.workers, tables.samples
        (array([3, 7], dtype=uint64), array([0, 2, 3]), array([0, 1, 2], dtype=int32), array([0, 2, 1]))
        """
        needed = missing_samples(holders, destinations)
        workers = destinations[needed]
        masks = holders[needed, 0] | (np.uint64(1) << workers.astype(np.uint64))
        order = group_by(workers, n_workers)[0]
        for shift in range(0, n_workers, _DIGIT):
            digits = (masks[order] >> np.uint64(shift)) & np.uint64((1 << _DIGIT) - 1)
            order = order[group_by(digits.astype(np.int64), 1 << _DIGIT)[0]]
        samples, workers, masks = needed[order], workers[order], masks[order]
        new_table = _differs(masks)
        first = np.flatnonzero(new_table | _differs(workers))
        return cls(
            masks=masks[new_table],
            columns=np.append(np.flatnonzero(new_table[first]), len(first)),
            starts=np.append(first, len(samples)),
            workers=workers[first],
            samples=samples,
        )

    def plan(self, packet_of: Samples, n_packets: int, destinations: Ranks) -> Packets:
        """Return the server's plan with ``samples[i]`` in packet ``packet_of[i]``; every packet has a sample."""
        order, offsets = group_by(packet_of, n_packets)
        samples = self.samples[order]
        return Packets(offsets, samples, destinations[samples], np.full(n_packets, SERVER, dtype=np.int32))


def _differs(values: Words | Ranks) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return whether each value differs from the one before it; True for the first."""
    differs = np.ones(len(values), dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=differs[1:])
    return differs
