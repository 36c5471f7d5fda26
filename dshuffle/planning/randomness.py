"""Random numbers that are equal on every machine, and counting."""

from __future__ import annotations

import hashlib
import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel, worth_a_kernel
from dshuffle.planning.types import NO_SAMPLES, Integers, Ranks, Samples, Words, starts_of

HALF = np.uint64(32)
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
"""Of the state of a SplitMix64 stream."""


def random_words(count: int, *path: int | str) -> Words:
    """Draw independent uniform 64-bit words for a path."""
    # path: integers of any size and sign, and strings, such as ``("order", seed, epoch, rank)``. Different paths give
    # independent streams. The first words of a stream do not depend on ``count``.
    # Each part carries its type and length, so that different paths have different texts. Hashing also allows
    # strings and negative integers, which SeedSequence rejects.
    parts = [f"s{len(part)}:{part}" if isinstance(part, str) else f"i{operator.index(part)};" for part in path]
    digest = hashlib.sha256("".join(parts).encode()).digest()
    bits = np.random.PCG64(np.random.SeedSequence(int.from_bytes(digest, "little")))
    return np.asarray(bits.random_raw(count), np.uint64)


def words_at(word: np.uint64, numbers: Integers) -> Words:
    """Independent 64-bit words for numbers from 0, all of them derived from one random word."""
    # They are the entries ``numbers`` of the SplitMix64 stream that starts at the word, so any of them can be had
    # alone.
    states = (numbers.astype(np.uint64) + np.uint64(1)) * _INCREMENT + word
    return np.asarray(_finalised(states))


def permutation(n: int, *path: int | str) -> Samples:
    """Draw a uniform random permutation of ``range(n)``, as (n,) int64."""
    if worth_a_kernel(n):
        values = np.arange(n)
        shuffle(values, *path)
        return values
    items = list(range(n))
    for i, word in enumerate(_words_to_draw(n - 1, n, path).tolist()):
        j = i + (word * (n - i) >> 64)  # as `below`
        items[i], items[j] = items[j], items[i]
    return np.array(items, np.int64)


def shuffle(values: Samples | Ranks, *path: int | str) -> None:
    """Shuffle a one-dimensional array uniformly, in place (Fisher-Yates)."""
    _draw(values, len(values) - 1, _words_to_draw(len(values) - 1, len(values), path))


def choose(candidates: Samples, k: int, *path: int | str) -> Samples:
    """Draw ``k`` different entries of ``candidates``, uniformly and in random order; (k,) int64."""
    values = candidates.copy()
    _draw(values, k, _words_to_draw(k, len(values), path))
    return values[:k].copy()


def _words_to_draw(count: int, n: int, path: tuple[int | str, ...]) -> Words:
    if n >= 2**32:
        raise InvalidParameter.of("n", n, "below 2**32, the limit of the random draws")
    return random_words(max(count, 0), *path)


@kernel("(i8[::1], i8, u8[::1])", "(i4[::1], i8, u8[::1])")
def _draw(values, count, words):  # type: ignore[no-untyped-def]
    """Move ``count`` values to the front, chosen uniformly and in random order."""
    for i in range(count):
        j = i + below(words[i], values.size - i)
        values[i], values[j] = values[j], values[i]


@kernel()
def below(word, bound):  # type: ignore[no-untyped-def]
    """Map one random word to an integer in [0, bound), for bounds below 2**32."""
    # The result is the high part of the 96-bit product, which needs no division. The relative difference between the
    # probabilities of two values is at most bound / 2**64, which is below 2**-32.
    return np.int64(_scaled(word, np.uint64(bound)))


@kernel(inline="always")
def _scaled(word, bound):  # type: ignore[no-untyped-def]
    low = (word & np.uint64(2**32 - 1)) * bound
    return ((word >> HALF) * bound + (low >> HALF)) >> HALF


def _finalised(word: Any) -> Any:
    """Mix the bits of 64-bit words: the finaliser of SplitMix64, a bijection."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


finalised = kernel(inline="always")(_finalised)


@kernel()
def next_word(state):  # type: ignore[no-untyped-def]
    """Advance a SplitMix64 stream and return its next state and word."""
    # Kernels use it where they do not know in advance how many words they need.
    # Steele, Lea and Flood (2014), Fast splittable pseudorandom number generators (OOPSLA), with the constants of
    # Figure 17.
    state += _INCREMENT
    return state, finalised(state)


@kernel()
def draw_front(values, count, state):  # type: ignore[no-untyped-def]
    """Move ``count`` values to the front, chosen uniformly and in random order from a SplitMix64 stream."""
    # Returns the next state of the stream.
    for i in range(count):
        state, word = next_word(state)
        j = i + below(word, values.size - i)
        values[i], values[j] = values[j], values[i]
    return state


DRAW_VERSION = 3
"""Changes whenever the same seed would draw other samples, so that no release reorders a resumed run silently."""

LARGEST_TABLE = 2**16
"""Size up to which a domain has a table. On small domains a network of eight rounds is not uniform."""

ROUNDS = 8
"""Rounds of the network. Tests show that four are too few: neighbours stay together too often."""


LARGEST_TABLES = 256
"""Size up to which the bijections of a family have tables."""


@dataclass(frozen=True, slots=True, eq=False)
class Bijection:
    """A random bijection of ``range(size)``, or a family of such bijections whose members may differ in size.

    A draw over all samples is a bijection from samples to positions. If it is a table, everybody who wants one entry
    has to make all of them. Large bijections are functions instead: a worker evaluates them for its own samples alone.
    """

    # Small domains use a table, which is exactly uniform. Large ones use a Feistel network with additions on a
    # rectangle ``a * b`` that is just larger than the domain; points outside of the domain are mapped again until they
    # are inside. Black and Rogaway (2002), Ciphers with arbitrary finite domains (CT-RSA), for generalised Feistel
    # networks and cycle walking. The round function is the finaliser of SplitMix64: Steele, Lea and Flood (2014), Fast
    # splittable pseudorandom number generators (OOPSLA), Figure 17. We need uniform shuffles, not secrecy.

    offsets: Integers  # ``(n + 1,)``, where the tables of each member begin.
    tables: Samples  # ``(offsets[-1],)`` of small domains, otherwise empty; the same for ``inverse_tables``.
    inverse_tables: Samples
    domains: Words  # ``(n, 3)`` of large domains: size, height and width of a rectangle that is nearly a square.
    keys: Words  # ``(n, rounds)`` of large domains, otherwise empty.

    @classmethod
    def of(cls, size: int, *path: int | str) -> Bijection:
        """Draw one bijection."""
        if size > LARGEST_TABLE:
            return cls.network(np.array([size]), random_words(ROUNDS, "network", *path))
        table = permutation(size, "table", *path)
        inverse = np.empty_like(table)
        inverse[table] = np.arange(size)
        return cls(np.array([0, size]), table, inverse, _NO_WORDS, _NO_WORDS)

    @classmethod
    def family(cls, sizes: Integers, word: np.uint64, *, largest_tables: int = LARGEST_TABLES) -> Bijection:
        """Draw a bijection for each size."""
        if sizes.max(initial=0) > largest_tables:
            return cls.network(sizes, words_at(word, np.arange(len(sizes) * ROUNDS)))
        offsets = starts_of(sizes)
        tables, inverse = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
        _draw_tables(offsets, words_at(word, np.arange(len(sizes))), tables, inverse)
        return cls(offsets, tables, inverse, _NO_WORDS, _NO_WORDS)

    @classmethod
    def network(cls, sizes: Integers, keys: Words) -> Bijection:
        """Networks of these sizes, each with as many of the keys."""
        domains = [(size, height := math.isqrt(max(0, size - 1)) + 1, -(-size // height)) for size in sizes.tolist()]
        keys = keys.reshape(len(sizes), -1)
        return cls(starts_of(sizes), NO_SAMPLES, NO_SAMPLES, np.array(domains, np.uint64), keys)

    def forward(self, points: Integers, members: Integers = NO_SAMPLES, *, back: bool = False) -> Samples:
        """``(k,)`` int64: where the bijection, or that of each member, maps the ``(k,)`` points."""
        if not len(self.keys):
            tables = self.inverse_tables if back else self.tables
            return tables[self.offsets[members] + points if len(members) else points]
        found = np.empty(len(points), np.int64)
        points, members = np.ascontiguousarray(points, np.int64), np.ascontiguousarray(members, np.int64)
        (_walk_back if back else _walk_forward)(points, members, found, self.domains, self.keys)
        return found

    def inverse(self, points: Integers, members: Integers = NO_SAMPLES) -> Samples:
        """``(k,)`` int64: the points that :meth:`forward` maps to the given ones."""
        return self.forward(points, members, back=True)


_NO_WORDS = np.empty((0, 0), np.uint64)


@kernel(inline="always")
def _walk(points, members, found, domains, keys, backward):  # type: ignore[no-untyped-def]
    last = keys.shape[1] - 1
    for i in range(points.size):
        member = members[i] if members.size else 0
        size, height, width = domains[member, 0], domains[member, 1], domains[member, 2]
        value = np.uint64(points[i])
        while True:
            row = value // width
            column = value - row * width
            for turn in range(keys.shape[1]):
                j = last - turn if backward else turn
                if j & 1 == 0:
                    drawn = _scaled(finalised(column + keys[member, j]), height)
                    row += height - drawn if backward else drawn
                    if row >= height:
                        row -= height
                else:
                    drawn = _scaled(finalised(row + keys[member, j]), width)
                    column += width - drawn if backward else drawn
                    if column >= width:
                        column -= width
            value = row * width + column
            if value < size:
                break
        found[i] = np.int64(value)


# With a constant direction, the compiler leaves out the other one, which saves a tenth of the time.


@kernel("(i8[::1], i8[::1], i8[::1], u8[:,::1], u8[:,::1])")
def _walk_forward(points, members, found, domains, keys):  # type: ignore[no-untyped-def]
    _walk(points, members, found, domains, keys, False)


@kernel("(i8[::1], i8[::1], i8[::1], u8[:,::1], u8[:,::1])")
def _walk_back(points, members, found, domains, keys):  # type: ignore[no-untyped-def]
    _walk(points, members, found, domains, keys, True)


@kernel("(i8[::1], u8[::1], i8[::1], i8[::1])")
def _draw_tables(offsets, states, tables, inverse):  # type: ignore[no-untyped-def]
    for member in range(offsets.size - 1):
        table = tables[offsets[member] : offsets[member + 1]]
        for i in range(table.size):
            table[i] = i
        draw_front(table, table.size - 1, states[member])
        for i in range(table.size):
            inverse[offsets[member] + table[i]] = i
