"""Random numbers that are equal on every machine, and counting."""

from __future__ import annotations

import hashlib
import math
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel, worth_a_kernel
from dshuffle.planning.types import Ranks, Samples, Words

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
"""Of the state of a SplitMix64 stream."""


def random_words(count: int, *path: int | str) -> Words:
    """Draw independent uniform 64-bit words for a path.

    Parameters
    ----------
    path
        Integers of any size and sign, and strings, such as ``("order", seed, epoch, rank)``. Different paths give
        independent streams. The first words of a stream do not depend on ``count``.
    """
    # Each part carries its type and length, so that different paths have different texts. Hashing also allows
    # strings and negative integers, which SeedSequence rejects.
    parts = [f"s{len(part)}:{part}" if isinstance(part, str) else f"i{operator.index(part)};" for part in path]
    digest = hashlib.sha256("".join(parts).encode()).digest()
    bits = np.random.PCG64(np.random.SeedSequence(int.from_bytes(digest, "little")))
    return np.asarray(bits.random_raw(count), dtype=np.uint64)


def words_at(word: np.uint64, numbers: NDArray[np.int64]) -> Words:
    """Independent 64-bit words for numbers from 0, all of them derived from one random word.

    They are the entries ``numbers`` of the SplitMix64 stream that starts at the word, so any of them can be had alone.
    """
    states = (numbers.astype(np.uint64) + np.uint64(1)) * _INCREMENT + word
    return np.asarray(_finalised(states))


def permutation(n: int, *path: int | str) -> Samples:
    """Draw a uniform random permutation of ``range(n)``, as (n,) int64."""
    if not worth_a_kernel(n):
        return _permutation_without_numba(n, _words_to_draw(n - 1, n, path))
    values = np.arange(n, dtype=np.int64)
    shuffle(values, *path)
    return values


def _permutation_without_numba(n: int, words: Words) -> Samples:
    """The permutation that :func:`_draw` makes, with a list, whose items Python exchanges three times as fast."""
    bounds = np.arange(n, n - len(words), -1, dtype=np.uint64)
    low = (words & np.uint64(0xFFFFFFFF)) * bounds
    high = (words >> np.uint64(32)) * bounds
    offsets = (high + (low >> np.uint64(32))) >> np.uint64(32)  # as `below`
    places = np.arange(len(words)) + offsets.astype(np.int64)
    values = list(range(n))
    for i, j in enumerate(places.tolist()):
        values[i], values[j] = values[j], values[i]
    return np.array(values, dtype=np.int64)


def shuffle(values: Samples | Ranks, *path: int | str) -> None:
    """Shuffle a one-dimensional array uniformly, in place (Fisher-Yates)."""
    _draw(values, len(values) - 1, _words_to_draw(len(values) - 1, len(values), path))


def choose(candidates: Samples, k: int, *path: int | str) -> Samples:
    """Draw ``k`` different entries of ``candidates``, uniformly and in random order; (k,) int64."""
    if not 0 <= k <= len(candidates):
        raise InvalidParameter.of("k", k, f"in [0, {len(candidates)}], at most the number of candidates")
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
    """Map one random word to an integer in [0, bound), for bounds below 2**32.

    The result is the high part of the 96-bit product, which needs no division. The relative difference between the
    probabilities of two values is at most bound / 2**64, which is below 2**-32.
    """
    low = (word & np.uint64(0xFFFFFFFF)) * np.uint64(bound)
    high = (word >> np.uint64(32)) * np.uint64(bound)
    return np.int64((high + (low >> np.uint64(32))) >> np.uint64(32))


def _finalised(word: Any) -> Any:
    """Mix the bits of 64-bit words: the finaliser of SplitMix64, a bijection."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


finalised = kernel(inline="always")(_finalised)


@kernel()
def next_word(state):  # type: ignore[no-untyped-def]
    """Advance a SplitMix64 stream and return its next state and word.

    Kernels use it where they do not know in advance how many words they need.

    References
    ----------
    Steele, Lea and Flood (2014), Fast splittable pseudorandom number generators (OOPSLA), with the constants of Figure
    17.
    """
    state += _INCREMENT
    return state, finalised(state)


@kernel()
def draw_front(values, count, state):  # type: ignore[no-untyped-def]
    """Move ``count`` values to the front, chosen uniformly and in random order from a SplitMix64 stream.

    Returns the next state of the stream.
    """
    for i in range(count):
        state, word = next_word(state)
        j = i + below(word, values.size - i)
        values[i], values[j] = values[j], values[i]
    return state


def log_choose(n: float, k: float) -> float:
    """Natural logarithm of the binomial coefficient, which may be of real numbers."""
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
