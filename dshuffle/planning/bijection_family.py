"""Many keyed bijections at once, one for each worker for example, all drawn from one random word.

Each point names its member, so that points of different members are evaluated in one call. Small domains have tables,
large ones networks, as in :mod:`dshuffle.planning.bijection`. Tables are drawn for all members, so only smaller domains
have them here: otherwise a worker that asks for a few points of each member would draw all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.kernels import kernel
from dshuffle.planning.bijection import ROUNDS, domain, evaluate_networks
from dshuffle.planning.randomness import draw_front, words_at
from dshuffle.planning.types import Samples, Words

LARGEST_TABLES = 256
"""Size up to which members have tables."""


@dataclass(frozen=True, slots=True, eq=False)
class BijectionFamily:
    """Random bijections of ``range(size)``, of different sizes.

    Parameters
    ----------
    offsets
        ``(n + 1,)`` int64, where the tables of each member begin; members have these differences as sizes.
    tables, inverse_tables
        ``(offsets[-1],)`` int64 of small members, otherwise empty.
    domains, keys
        ``(n, 3)`` and ``(n, rounds)`` uint64 of large members, otherwise empty.

    Examples
    --------
    >>> family = BijectionFamily.of(np.array([3, 4]), np.uint64(7))
    >>> members, points = np.array([0, 0, 0, 1, 1, 1, 1]), np.array([0, 1, 2, 0, 1, 2, 3])
    >>> family.inverse(members, family.forward(members, points))
    array([0, 1, 2, 0, 1, 2, 3])
    """

    offsets: NDArray[np.int64]
    tables: Samples
    inverse_tables: Samples
    domains: Words
    keys: Words

    @classmethod
    def of(
        cls, sizes: NDArray[np.int64], word: np.uint64, *, rounds: int = ROUNDS, largest_tables: int = LARGEST_TABLES
    ) -> BijectionFamily:
        """Draw a bijection for each size.

        Parameters
        ----------
        word
            A random word. Different words give independent families.
        rounds, largest_tables
            For tests of weaker bijections.
        """
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        nothing, no_words = np.empty(0, np.int64), np.empty((0, 0), np.uint64)
        if sizes.max(initial=0) <= largest_tables:
            tables, inverse = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
            _draw_tables(offsets, words_at(word, np.arange(len(sizes))), tables, inverse)
            return cls(offsets, tables, inverse, no_words, no_words)
        domain_of = {size: domain(size) for size in np.unique(sizes).tolist()}
        domains = np.array([domain_of[size] for size in sizes.tolist()], np.uint64)
        keys = words_at(word, np.arange(len(sizes) * rounds)).reshape(len(sizes), rounds)
        return cls(offsets, nothing, nothing, domains, keys)

    def forward(self, members: NDArray[np.int64], points: NDArray[np.int64]) -> Samples:
        """``(k,)`` int64: where the bijections of the ``(k,)`` members map the ``(k,)`` points."""
        if len(self.tables):
            return np.asarray(self.tables[self.offsets[members] + points])
        return evaluate_networks(points, members, self.domains, self.keys, False)

    def inverse(self, members: NDArray[np.int64], points: NDArray[np.int64]) -> Samples:
        """``(k,)`` int64: the points that the bijections of the ``(k,)`` members map to the given ``(k,)`` ones."""
        if len(self.tables):
            return np.asarray(self.inverse_tables[self.offsets[members] + points])
        return evaluate_networks(points, members, self.domains, self.keys, True)


@kernel("(i8[::1], u8[::1], i8[::1], i8[::1])")
def _draw_tables(offsets, states, tables, inverse):  # type: ignore[no-untyped-def]
    for member in range(offsets.size - 1):
        table = tables[offsets[member] : offsets[member + 1]]
        for i in range(table.size):
            table[i] = i
        draw_front(table, table.size - 1, states[member])
        for i in range(table.size):
            inverse[offsets[member] + table[i]] = i
