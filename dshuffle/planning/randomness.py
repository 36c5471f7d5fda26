"""Random numbers that are a function of their path alone, equal on every machine and NumPy version.

NumPy promises the raw stream of ``PCG64`` and the expansion of ``SeedSequence`` for good, but not the
methods of ``Generator``, whose results may change with any release. Workers and scheduler that recompute
one plan from one seed must agree bit for bit, so only raw words are taken from NumPy and all draws are made
here.
"""

from __future__ import annotations

import hashlib
import operator

import numba
import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.planning.types import Ranks, Samples, Words


def random_words(count: int, *path: int | str) -> Words:
    """Independent uniform 64-bit words for a path.

    Parameters
    ----------
    count
        How many.
    path
        Integers of any size and sign, and strings, such as ``("order", seed, epoch, rank)``. Different paths
        give independent streams; the first words of a stream do not depend on ``count``.

    Returns
    -------
    (count,) uint64

    Examples
    --------
    >>> random_words(2, "example", 7)
    array([15563045205250564628, 13939520576727142184], dtype=uint64)
    """
    # Every part is written with its kind and length, so that no two paths have the same text; the digest
    # takes negative and huge integers, which SeedSequence does not.
    parts = [f"s{len(part)}:{part}" if isinstance(part, str) else f"i{operator.index(part)};" for part in path]
    digest = hashlib.sha256("".join(parts).encode()).digest()
    bits = np.random.PCG64(np.random.SeedSequence(int.from_bytes(digest, "little")))
    return np.asarray(bits.random_raw(count), dtype=np.uint64)


def permutation(n: int, *path: int | str) -> Samples:
    """A uniform random permutation of ``range(n)``, as (n,) int64.

    Examples
    --------
    >>> permutation(5, "example", 7)
    array([4, 0, 1, 2, 3])
    """
    values = np.arange(n, dtype=np.int64)
    shuffle(values, *path)
    return values


def shuffle(values: Samples | Ranks, *path: int | str) -> None:
    """Shuffle a one-dimensional array uniformly, in place (Fisher-Yates)."""
    _draw(values, len(values) - 1, _words_to_draw(len(values) - 1, len(values), path))


def choose(candidates: Samples, k: int, *path: int | str) -> Samples:
    """``k`` different entries of ``candidates``, uniformly at random and in random order; (k,) int64.

    Raises
    ------
    InvalidParameter
        If there are fewer than ``k`` candidates.

    Examples
    --------
    >>> choose(np.arange(100), 3, "example", 7)
    array([84, 75, 71])
    """
    if not 0 <= k <= len(candidates):
        raise InvalidParameter.of("k", k, f"in [0, {len(candidates)}], the number of candidates")
    values = candidates.copy()
    _draw(values, k, _words_to_draw(k, len(values), path))
    return values[:k].copy()


def _words_to_draw(count: int, n: int, path: tuple[int | str, ...]) -> Words:
    if n >= 2**32:
        raise InvalidParameter.of("n", n, "below 2**32, the most that can be drawn from without bias")
    return random_words(max(count, 0), *path)


@numba.njit(nogil=True, cache=True)
def _draw(values, count, words):  # type: ignore[no-untyped-def]
    """Move a uniform ordered choice of ``count`` values to the front."""
    for i in range(count):
        j = i + below(words[i], values.size - i)
        values[i], values[j] = values[j], values[i]


@numba.njit(nogil=True, cache=True)
def below(word, bound):  # type: ignore[no-untyped-def]
    """A number in [0, bound) from one random word, for bounds below 2**32.

    The high half of the 96-bit product: no value is more likely than another by more than bound / 2**64, that
    is 2**-32, and there is no division.
    """
    low = (word & np.uint64(0xFFFFFFFF)) * np.uint64(bound)
    high = (word >> np.uint64(32)) * np.uint64(bound)
    return np.int64((high + (low >> np.uint64(32))) >> np.uint64(32))


@numba.njit(nogil=True, cache=True)
def next_word(state):  # type: ignore[no-untyped-def]
    """The next state and word of a SplitMix64 stream, for kernels that cannot know how many words they need.

    References
    ----------
    Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), figure 17's constants.
    """
    state += np.uint64(0x9E3779B97F4A7C15)
    word = state
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state, word ^ (word >> np.uint64(31))


@numba.njit(nogil=True, cache=True)
def draw_front(values, count, state):  # type: ignore[no-untyped-def]
    """Move a uniform ordered choice of ``count`` values to the front, from a SplitMix64 stream; its next state."""
    for i in range(count):
        state, word = next_word(state)
        j = i + below(word, values.size - i)
        values[i], values[j] = values[j], values[i]
    return state
