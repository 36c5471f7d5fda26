"""What is left of an epoch in which training stopped, and digests of samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel
from dshuffle.planning.assignment.rules import GivenSharding
from dshuffle.planning.exchange_epochs import Weights, check_weights
from dshuffle.planning.planner import EpochPlanner, ShuffleSpec
from dshuffle.planning.randomness import finalised, random_words
from dshuffle.planning.types import Mask, Ranks, Samples, Words

SAME_BUILD = "Install the same build of dshuffle on all workers, and on the scheduler and the client"
"""What to do if processes draw different samples although they speak the same protocol."""

WORDS = 2**64
"""All fields of a digest are modulo this."""

BLOCK = 2**16
"""Samples of a range that are hashed at a time; their numbers fit the cache of a processor."""


@dataclass(frozen=True, slots=True)
class SampleDigest:
    """Number of samples, their sum, and two sums of keyed hashes, all modulo 2**64."""

    # The digest of a union is the sum of digests, and a sample that occurs twice counts twice. Different samples have
    # the same digest with a probability of 2**-128, if the hashes are random.

    # count, total, first, second: The number of samples, the sum of their ids, and the sums of their hashes with two
    # keys.
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
    """A rank's part of the digest of all samples that are due in an epoch."""
    # The parts of all ranks add up to that digest: a contiguous block of the samples for each rank, and the further
    # copies of samples that all workers train on for rank 0. They depend on no draw, and take O(q / n).
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


@dataclass(frozen=True, slots=True)
class Remainder:
    """How far the ranks of earlier sessions came in an epoch."""

    epoch: int
    # One tuple for each session that trained in the epoch, in order: the number of samples that each of its ranks
    # trained on. A rank skips the samples that earlier sessions trained on, and takes the others in its training order.
    # So these numbers and the weights are enough to tell which samples were trained on.
    trained: tuple[tuple[int, ...], ...]
    # Digest of the samples that were trained on, as the ranks noted it. None if nobody did, as in states of earlier
    # releases.
    digest: SampleDigest | None = None
    # For each of these sessions, the relative share of each rank; none for equal shares. Nothing at all if all of them
    # had equal shares.
    weights: tuple[Weights, ...] = ()

    def __post_init__(self) -> None:
        for counts, weights in self.sessions:
            check_weights(weights, len(counts))
        for counts in self.trained:
            if not counts or min(counts) < 0:
                raise InvalidParameter.of("trained", counts, "numbers of samples, at least 0, one for each rank")

    @property
    def sessions(self) -> list[tuple[tuple[int, ...], Weights]]:
        """The numbers and the weights of each session that trained in the epoch."""
        return list(zip(self.trained, self.weights or ((),) * len(self.trained), strict=True))

    @property
    def total(self) -> int:
        """Number of samples that were trained on."""
        return sum(map(sum, self.trained))

    def followed_by(self, counts: tuple[int, ...], digest: SampleDigest, weights: Weights = ()) -> Remainder:
        """The same epoch after another session, whose ranks trained on so many samples with this digest."""
        all_weights = (*(earlier for _, earlier in self.sessions), weights)
        known = self.digest or (None if self.trained else SampleDigest())
        return Remainder(
            self.epoch,
            (*self.trained, counts),
            None if known is None else known + digest,
            all_weights if any(all_weights) else (),
        )

    def left(
        self, spec: ShuffleSpec, rank: int, spec_for: Callable[[int], ShuffleSpec] | None = None
    ) -> tuple[Mask, tuple[int, int]]:
        """Which samples of a rank are left, and the least and the most of any rank. Takes O(q) time and memory.

        ``spec_for`` makes the specification for another number of workers.
        """
        masks = [left for _, left in self._orders(spec, spec_for)]
        counts = [int(np.count_nonzero(left)) for left in masks]
        return masks[rank], (min(counts), max(counts))

    def trained_digest(self, spec: ShuffleSpec, spec_for: Callable[[int], ShuffleSpec] | None = None) -> SampleDigest:
        """Digest of the samples that were trained on."""
        # If it was not noted, it is that of the samples that these parameters draw, as in :meth:`left`, in O(q).
        if self.digest is not None:
            return self.digest
        orders, seed = self._orders(spec, spec_for), spec.choices.seed
        return SampleDigest.summed(SampleDigest.of(order[~left], seed).fields for order, left in orders)

    def _orders(
        self, spec: ShuffleSpec, spec_for: Callable[[int], ShuffleSpec] | None
    ) -> Iterator[tuple[Samples, Mask]]:
        """The samples of every rank in training order, and which of them are left."""
        orders, n = training_orders(spec, self.epoch), spec.n_workers
        if all((len(counts), weights) == (n, spec.weights) for counts, weights in self.sessions):
            for rank, order in enumerate(orders):  # every rank goes on with its own order
                if (done := sum(counts[rank] for counts in self.trained)) > len(order):
                    raise InvalidParameter.of("trained", self.trained, "at most the samples of each rank")
                yield order, np.arange(len(order)) >= done
            return
        if spec.n_broadcast:
            hint = "In the middle of an epoch, samples that every worker trains on cannot be given to others."
            raise InvalidParameter.of("n_workers", n, f"{len(self.trained[-1])}, as before", hint)
        left = self.left_samples(spec, spec_for)
        for order in orders:
            yield order, left[order]

    def left_samples(self, spec: ShuffleSpec, spec_for: Callable[[int], ShuffleSpec] | None = None) -> Mask:
        """``(q,)``, whether a sample is left. The parameters are those of :meth:`left`."""
        spec_for = spec_for or spec.with_workers
        sessions: list[ShuffleSpec] = []
        for counts, weights in reversed(self.sessions):
            if (len(counts), weights) != (spec.n_workers, spec.weights):
                if spec.changes and spec.history.epoch == self.epoch:
                    spec = spec.with_history(spec.history.before, self.epoch)
                else:
                    spec = dataclasses.replace(spec_for(len(counts)), first_weights=weights)
            sessions.append(spec)
        left = np.ones(spec.n_samples, np.bool_)
        for counts, session in zip(self.trained, reversed(sessions), strict=True):
            for count, order in zip(counts, training_orders(session, self.epoch), strict=True):
                if count:  # no other rank of the session has these samples
                    left[order[left[order]][:count]] = False
        return left


def workers_of(spec: ShuffleSpec, epoch: int, samples: Samples) -> Ranks:
    """``(k,)`` int32, the workers that train on the ``(k,)`` samples in an epoch."""
    # Where :meth:`ShuffleSpec.ranks_at` returns None, this takes time and memory for all samples. Any worker is named
    # for samples that all of them train on.
    if (find := spec.ranks_at(epoch)) is not None:
        return find(samples)
    ranks = np.empty(spec.n_samples, np.int32)
    for rank, order in enumerate(training_orders(spec, epoch)):
        ranks[order] = rank
    return ranks[samples]


def training_orders(spec: ShuffleSpec, epoch: int) -> Iterator[Samples]:
    """The samples of every rank in an epoch, in training order."""
    spec, n = dataclasses.replace(spec, first_epoch=epoch), spec.n_workers
    owns: Iterable[Samples]
    if (slots := spec.slots()) is not None:
        owns = np.split(slots.all_samples(epoch), np.cumsum(slots.last.sizes)[:-1])
    elif (blocks := spec.blocks(epoch)) is not None:
        owns = map(blocks.samples_of, range(n))
    else:
        plan = EpochPlanner(spec).load()
        owns = (plan.for_worker(rank).own for rank in range(n))
    for rank, own in enumerate(owns):
        yield spec.choices.exchange_epochs.order(own, seed=spec.choices.seed, epoch=epoch, rank=rank)
