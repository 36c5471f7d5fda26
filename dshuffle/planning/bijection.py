"""Keyed bijections of ``range(size)`` that can be evaluated at single points, in both directions.

A draw over all samples is a bijection from samples to positions. If it is a table, everybody who wants one entry has
to make all of them. These bijections are functions instead: a worker evaluates them for its own samples alone.

Small domains use a table, which is exactly uniform. Large ones use a Feistel network with additions on a rectangle
``a * b`` that is just larger than the domain; points outside of the domain are mapped again until they are inside.

References
----------
Black and Rogaway (2002), Ciphers with arbitrary finite domains (CT-RSA), for generalised Feistel networks and cycle
walking. The round function is the finaliser of SplitMix64: Steele, Lea and Flood (2014), Fast splittable pseudorandom
number generators (OOPSLA), Figure 17. We need uniform shuffles, not secrecy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel
from dshuffle.planning.randomness import draw_front, finalised, permutation, random_words, words_at
from dshuffle.planning.types import Samples, Words

DRAW_VERSION = 3
"""Changes whenever the same seed would draw other samples, so that no release reorders a resumed run silently."""

LARGEST_TABLE = 2**16
"""Size up to which a domain has a table. On small domains a network of eight rounds is not uniform."""

ROUNDS = 8
"""Rounds of the network. Tests show that four are too few: neighbours stay together too often."""


@dataclass(frozen=True, slots=True, eq=False)
class Bijection:
    """A random bijection of ``range(size)``.

    Parameters
    ----------
    size
        Number of points, below 2**63.
    table, inverse_table
        ``(size,)`` int64 of a small domain, otherwise empty.
    keys
        ``(rounds,)`` uint64 of a large domain, otherwise empty.
    """

    size: int
    table: Samples
    inverse_table: Samples
    keys: Words

    @classmethod
    def of(cls, size: int, *path: int | str, rounds: int = ROUNDS, largest_table: int = LARGEST_TABLE) -> Bijection:
        """Draw a bijection."""
        if not 0 <= size < 2**63:
            raise InvalidParameter.of("size", size, "in [0, 2**63)")
        nothing = np.empty(0, np.int64)
        if size <= largest_table:
            table = permutation(size, "table", *path)
            inverse = np.empty_like(table)
            inverse[table] = np.arange(size)
            return cls(size, table, inverse, np.empty(0, np.uint64))
        return cls(size, nothing, nothing, random_words(rounds, "network", *path))

    def forward(self, points: NDArray[np.int64]) -> Samples:
        """``(k,)`` int64: where the bijection maps each of the ``(k,)`` points."""
        return self._evaluate(points, self.table, False)

    def inverse(self, points: NDArray[np.int64]) -> Samples:
        """``(k,)`` int64: the points that the bijection maps to the given ``(k,)`` ones."""
        return self._evaluate(points, self.inverse_table, True)

    def _evaluate(self, points: NDArray[np.int64], table: Samples, backward: bool) -> Samples:
        if not len(self.keys):
            return table[points]
        domains = np.array([domain(self.size)], np.uint64)
        return evaluate_networks(points, np.empty(0, np.int64), domains, self.keys[np.newaxis], backward)


def domain(size: int) -> tuple[int, int, int]:
    """The size, and height and width of a rectangle that is nearly a square and hardly larger."""
    height = math.isqrt(size - 1) + 1
    return size, height, -(-size // height)


def evaluate_networks(
    points: NDArray[np.int64], members: NDArray[np.int64], domains: Words, keys: Words, backward: bool
) -> Samples:
    """Evaluate one of many networks at each point.

    Parameters
    ----------
    members
        ``(k,)``, the network of each of the ``(k,)`` points; empty if there is only one.
    domains, keys
        ``(n, 3)`` and ``(n, rounds)`` uint64, the :func:`domain` and the keys of each network.
    """
    found = np.empty(len(points), dtype=np.int64)
    (_inverse if backward else _forward)(
        np.ascontiguousarray(points, np.int64), np.ascontiguousarray(members, np.int64), found, domains, keys
    )
    return found


@kernel(inline="always")
def _scaled(word, bound):  # type: ignore[no-untyped-def]
    """The high part of ``word * bound``, in [0, bound), for bounds below 2**32."""
    low = (word & np.uint64(0xFFFFFFFF)) * bound
    return ((word >> np.uint64(32)) * bound + (low >> np.uint64(32))) >> np.uint64(32)


@kernel("(i8[::1], i8[::1], i8[::1], u8[:,::1], u8[:,::1])")
def _forward(points, members, found, domains, keys):  # type: ignore[no-untyped-def]
    for i in range(points.size):
        member = members[i] if members.size else 0
        size, height, width = domains[member, 0], domains[member, 1], domains[member, 2]
        value = np.uint64(points[i])
        while True:
            row = value // width
            column = value - row * width
            for j in range(keys.shape[1]):
                if j & 1 == 0:
                    row += _scaled(finalised(column + keys[member, j]), height)
                    if row >= height:
                        row -= height
                else:
                    column += _scaled(finalised(row + keys[member, j]), width)
                    if column >= width:
                        column -= width
            value = row * width + column
            if value < size:
                break
        found[i] = np.int64(value)


@kernel("(i8[::1], i8[::1], i8[::1], u8[:,::1], u8[:,::1])")
def _inverse(points, members, found, domains, keys):  # type: ignore[no-untyped-def]
    for i in range(points.size):
        member = members[i] if members.size else 0
        size, height, width = domains[member, 0], domains[member, 1], domains[member, 2]
        value = np.uint64(points[i])
        while True:
            row = value // width
            column = value - row * width
            for back in range(keys.shape[1]):
                j = keys.shape[1] - 1 - back
                if j & 1 == 0:
                    drawn = _scaled(finalised(column + keys[member, j]), height)
                    row = row - drawn if row >= drawn else row + height - drawn
                else:
                    drawn = _scaled(finalised(row + keys[member, j]), width)
                    column = column - drawn if column >= drawn else column + width - drawn
            value = row * width + column
            if value < size:
                break
        found[i] = np.int64(value)


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
        """Draw a bijection for each size."""
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
