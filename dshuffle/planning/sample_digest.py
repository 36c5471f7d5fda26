"""Digests of samples, which tell without a list of them whether all workers together train on what they should.

Workers with different builds may draw differently from the same seed. Then some samples are trained on twice and others
not at all, although all counts are right. So each worker sums keyed hashes of its samples. The sum over all workers
must be the sum over all samples of the dataset, which depends on no draw.

References
----------
Bellare and Micciancio (1997), A new paradigm for collision-free hashing: incrementality at reduced cost (EUROCRYPT),
for sums of hashes as digests of sets. We look for mistakes and not for attacks, so a fast hash is enough.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from dshuffle.kernels import kernel
from dshuffle.planning.assignment.initial import GivenSharding
from dshuffle.planning.randomness import finalised, random_words
from dshuffle.planning.shuffle_spec import ShuffleSpec
from dshuffle.planning.types import Samples, Words

SAME_BUILD = "Install the same build of dshuffle on all workers, and on the scheduler and the client"
"""What to do if processes draw different samples although they speak the same protocol."""

WORDS = 2**64
"""All fields of a digest are modulo this."""

BLOCK = 2**16
"""Samples of a range that are hashed at a time; their numbers fit the cache of a processor."""


@dataclass(frozen=True, slots=True)
class SampleDigest:
    """Number of samples, their sum, and two sums of keyed hashes, all modulo 2**64.

    The digest of a union is the sum of digests, and a sample that occurs twice counts twice. Different samples have the
    same digest with a probability of 2**-128, if the hashes are random.

    Parameters
    ----------
    count, total, first, second
        The number of samples, the sum of their ids, and the sums of their hashes with two keys.

    Examples
    --------
    >>> one, other = SampleDigest.of(np.array([4, 0]), seed=7), SampleDigest.of(np.array([3, 1, 2]), seed=7)
    >>> one + other == SampleDigest.of_range(0, 5, seed=7)
    True
    >>> one + SampleDigest.of(np.array([3, 3, 0]), seed=7) == SampleDigest.of_range(0, 5, seed=7)
    False
    """

    count: int = 0
    total: int = 0
    first: int = 0
    second: int = 0

    @classmethod
    def of(cls, samples: Samples, seed: int) -> Self:
        """Digest of ``(k,)`` samples in any order; the seed of the shuffle chooses the keys."""
        total, first, second = _sums(np.ascontiguousarray(samples, np.int64), _keys(seed))
        return cls(len(samples), int(total), int(first), int(second))

    @classmethod
    @functools.lru_cache(maxsize=256)  # the same in every epoch
    def of_range(cls, start: int, stop: int, seed: int) -> Self:
        """Digest of ``range(start, stop)``."""
        blocks = (np.arange(each, min(each + BLOCK, stop)) for each in range(start, stop, BLOCK))
        return cls.summed(cls.of(block, seed).fields for block in blocks)

    @classmethod
    def summed(cls, digests: Iterable[Sequence[int]]) -> Self:
        """Sum of digests that are given by their fields, as in messages."""
        return cls(*(sum(column) % WORDS for column in zip(*digests, strict=True)))

    @property
    def fields(self) -> list[int]:
        """The fields, for a message."""
        return [self.count, self.total, self.first, self.second]

    def __add__(self, other: SampleDigest) -> SampleDigest:
        return SampleDigest.summed([self.fields, other.fields])

    def __sub__(self, other: SampleDigest) -> SampleDigest:
        return self + other * -1

    def __mul__(self, times: int) -> SampleDigest:
        return SampleDigest(*(field * times % WORDS for field in self.fields))


def due_in_an_epoch(spec: ShuffleSpec, rank: int) -> SampleDigest:
    """A rank's part of the digest of all samples that are due in an epoch.

    The parts of all ranks add up to that digest: a contiguous block of the samples for each rank, and the further
    copies of samples that all workers train on for rank 0. They depend on no draw, and take O(q / n).

    Examples
    --------
    >>> from dshuffle.planning import Choices
    >>> spec = ShuffleSpec(10, 3, Choices("global", seed=7))
    >>> sum((due_in_an_epoch(spec, rank) for rank in range(3)), SampleDigest()) == SampleDigest.of_range(0, 10, seed=7)
    True
    """
    n_samples, n_workers, choices = spec.n_samples, spec.n_workers, spec.choices
    due = SampleDigest.of_range(rank * n_samples // n_workers, (rank + 1) * n_samples // n_workers, choices.seed)
    sharding = choices.sharding
    if rank == 0 and isinstance(sharding, GivenSharding) and sharding.broadcast is not None:
        due += SampleDigest.of(sharding.broadcast, choices.seed) * (n_workers - 1)
    return due


@functools.lru_cache(maxsize=8)
def _keys(seed: int) -> Words:
    return random_words(2, "digest", seed)


@kernel("(i8[::1], u8[::1])")
def _sums(samples, keys):  # type: ignore[no-untyped-def]
    """The sum of samples, and the sums of their hashes with each of two keys."""
    total, first, second = np.uint64(0), np.uint64(0), np.uint64(0)
    for i in range(samples.size):
        sample = np.uint64(samples[i])
        total += sample
        first += finalised(sample + keys[0])
        second += finalised(sample + keys[1])
    return total, first, second
