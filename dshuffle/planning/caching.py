"""Caching policies: which excess samples a worker keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dshuffle.kernels import kernel
from dshuffle.planning.randomness import below, choose, next_word, permutation, random_words
from dshuffle.planning.types import (
    Holders,
    Ranks,
    Samples,
    Words,
    add_holders,
    bit,
    count_held,
    count_holders,
    each_holder,
    held_by,
    holders_of,
    holds,
    missing_samples,
    set_name,
)


@dataclass
class Shares:
    """The policy of caches without room for excess, which keep their shares; the base of all others."""

    # The others cannot recognize this case by the capacity if shares differ in size, as with ``chunks``: a worker with
    # a smaller share in this epoch has room left in its cache.

    n_workers: int
    capacity: int
    seed: int

    def first(self, assignment: Ranks) -> Holders:
        """The holders of epoch 0."""
        return holders_of(assignment, self.n_workers)

    def evolve(self, holders: Holders, assignment: Ranks, epoch: int) -> Holders:
        """The holders after the exchange for ``epoch``, which leads to an assignment, as a new array."""
        # Every worker holds its new share, no sample that it neither held nor received, and no more samples than the
        # capacity.
        return self.first(assignment)


class Uniform(Shares):
    """Evict uniformly at random among the samples outside the new share."""

    # Chung et al. (2017), section 2; see docs/papers.md. The paper lets a node cache up to ``s = floor(alpha q)`` data
    # points and does not say which ones it evicts. Its rates assume caches of uniformly random content. With this
    # policy, caches have such content at first. Over the epochs, numbers of holders become more even than random,
    # because a sample that moves gains a holder.

    def first(self, assignment: Ranks) -> Holders:
        """Each worker's share, and uniformly random excess that fills every cache exactly to the capacity."""
        holders = holders_of(assignment, self.n_workers)
        for worker in range(self.n_workers):
            foreign = np.flatnonzero(assignment != worker)
            room = self.capacity - (len(assignment) - len(foreign))
            chosen = choose(foreign, min(room, len(foreign)), "excess", self.seed, worker)
            holders[chosen, worker // 64] |= np.uint64(1 << worker % 64)
        return holders

    def evolve(self, holders: Holders, assignment: Ranks, epoch: int) -> Holders:
        """See :class:`Shares`."""
        evolved = holders.copy()
        for worker in range(self.n_workers):
            own = assignment == worker
            excess = np.flatnonzero(held_by(evolved, worker) & ~own)
            n_evicted = len(excess) + int(own.sum()) - self.capacity
            if n_evicted > 0:
                evicted = self.evict(excess, n_evicted, worker, epoch)
                evolved[evicted, worker // 64] &= ~np.uint64(1 << worker % 64)
        add_holders(evolved, assignment)
        return evolved

    def evict(self, excess: Samples, count: int, worker: int, epoch: int) -> Samples:
        """Choose ``count`` samples to evict from those that the worker holds outside its new share."""
        return choose(excess, count, "evict", self.seed, epoch, worker)


@dataclass
class Recent(Uniform):
    """Keep the samples that the worker trained on most recently; ties are random."""

    # Samples that many workers trained on recently stay cached by many workers, which helps coded deliveries: they need
    # 4 to 7 % fewer packets than with ``uniform`` at a million samples. The state is one byte per worker and sample:
    # the number of epochs since the worker trained on the sample. It is at most 255, which also means never.

    ages: NDArray[np.uint8] = field(init=False, repr=False)

    def first(self, assignment: Ranks) -> Holders:
        """See :class:`Uniform`."""
        self.ages = np.full((self.n_workers, len(assignment)), 255, dtype=np.uint8)
        self.ages[assignment, np.arange(len(assignment))] = 0
        return super().first(assignment)

    def evolve(self, holders: Holders, assignment: Ranks, epoch: int) -> Holders:
        """See :class:`Shares`."""
        np.minimum(self.ages, 254, out=self.ages)
        self.ages += 1
        self.ages[assignment, np.arange(len(assignment))] = 0
        return super().evolve(holders, assignment, epoch)

    def evict(self, excess: Samples, count: int, worker: int, epoch: int) -> Samples:
        """Choose the ``count`` samples of the excess that the worker trained on least recently."""
        mixed = excess[permutation(len(excess), "evict", self.seed, epoch, worker)]
        youngest_first = mixed[np.argsort(self.ages[worker, mixed], kind="stable")]
        return youngest_first[len(excess) - count :]


class Even(Shares):
    """Keep the number of holders of each sample, and evict so that the holder sets become most even."""

    # With c = n * capacity / q, every sample has c holders. If c is not an integer, some samples have floor(c) holders
    # and the others ceil(c), so that the caches are full. When a sample moves to a worker that does not hold it, that
    # worker becomes a holder and one of the old holders drops the sample. The policy prefers holders whose caches are
    # too full and, among those, the one whose removal leaves the sample with the rarest set of holders. Ties are
    # random.
    # No worker ever holds more than the capacity. If a worker is too full in the end, it drops a sample in place of
    # another worker that has dropped that sample and has room, or it drops a sample without replacement. The latter
    # affects a handful of samples per epoch, if any. Such samples keep all their holders when they next move.
    # This policy is ours. Chung et al. (2017) and Attia and Tandon (2016) do not say what to evict; see docs/papers.md.

    def first(self, assignment: Ranks) -> Holders:
        """Caches fill in rounds; each round gives every sample one more holder."""
        holders, q = holders_of(assignment, self.n_workers), len(assignment)
        for nth in range(2, -(-self.n_workers * self.capacity // q) + 1):
            _add_round(holders, permutation(q, "even", self.seed, -nth), self.capacity, *self._drawn(q, -nth))
        return holders

    def _drawn(self, n_samples: int, epoch: int) -> tuple[Words, NDArray[np.int32], np.uint64]:
        """Names of the workers, counters of samples by the lowest bits of the name of their set, and random bits."""
        # Few sets share a counter. Those that do are counted as one set.
        counters = np.zeros(1 << max((4 * n_samples).bit_length(), 16), np.int32)
        return random_words(self.n_workers, "sets"), counters, random_words(1, "even", self.seed, epoch)[0]

    def evolve(self, holders: Holders, assignment: Ranks, epoch: int) -> Holders:
        """See :class:`Shares`."""
        evolved, q = holders.copy(), len(assignment)
        moved = missing_samples(evolved, assignment)
        moved = moved[permutation(len(moved), "even", self.seed, epoch)]
        loads = count_held(evolved, self.n_workers)
        left = _move(evolved, assignment, moved, loads, self.capacity, *self._drawn(q, epoch))
        if loads.max() > self.capacity:
            _change_places(evolved, moved, left, assignment, loads, self.capacity)
        if loads.max() > self.capacity:
            _give_up(evolved, permutation(q, "spare", self.seed, epoch), assignment, loads, self.capacity)
        return evolved


CACHINGS: dict[str, type[Shares]] = {"uniform": Uniform, "recent": Recent, "even": Even}
"""Caching policies by name."""


@kernel()
def _toggle(holders, sample, worker):  # type: ignore[no-untyped-def]
    holders[sample, worker >> 6] ^= bit(worker)


@kernel("(u8[:,::1], i8[::1], i8, u8[::1], i4[::1], u8)")
def _add_round(holders, order, capacity, names, counters, state):  # type: ignore[no-untyped-def]
    """Give every sample one more holder: of a few random workers, the one that makes the rarest set."""
    room = capacity - count_held(holders, names.size)
    open_workers, n_open = np.empty(names.size, np.int64), 0
    for worker in range(names.size):
        if room[worker] > 0:
            open_workers[n_open] = worker
            n_open += 1
    mask = np.uint64(counters.size - 1)
    for sample in order:
        name = set_name(holders, sample, names)
        best = np.int64(-1)
        for i in range(8):
            if n_open == 0:
                return
            # Try eight random workers, or all if there are at most eight.
            state, word = next_word(state)
            worker = open_workers[below(word, n_open) if n_open > 8 else i % n_open]
            if holds(holders, sample, worker):
                continue
            if best < 0 or counters[(name ^ names[worker]) & mask] < counters[(name ^ names[best]) & mask]:
                best = worker
        if best < 0:
            continue
        counters[(name ^ names[best]) & mask] += 1
        _toggle(holders, sample, best)
        room[best] -= 1
        if room[best] == 0:
            open_workers[:n_open][open_workers[:n_open] == best] = open_workers[n_open - 1]
            n_open -= 1


@kernel("(u8[:,::1], i4[::1], i8[::1], i8[::1], i8, u8[::1], i4[::1], u8)")
def _move(holders, ranks, moved, loads, capacity, names, counters, state):  # type: ignore[no-untyped-def]
    """Add the destinations of the moved samples as holders and remove old holders."""
    # Updates ``loads``. Returns the holder removed for each sample, or -1.
    mask = np.uint64(counters.size - 1)
    spare = capacity * loads.size - loads.sum()
    fewest = capacity * loads.size // ranks.size
    most = fewest + (capacity * loads.size % ranks.size > 0)
    lacking = 0
    for sample in range(ranks.size):
        counters[set_name(holders, sample, names) & mask] += 1
        lacking += max(fewest - count_holders(holders, sample), 0)
    left = np.full(moved.size, -1, np.int32)
    for sample in moved:
        loads[ranks[sample]] += 1
    for i in range(moved.size):
        sample = moved[i]
        name = set_name(holders, sample, names)
        counters[name & mask] -= 1
        name ^= names[ranks[sample]]
        size = count_holders(holders, sample)
        if spare > 0 and (size < fewest or (size < most and spare > lacking)):
            spare -= 1
            lacking -= size < fewest
        elif size > 0:
            best, ties, best_full, best_count = np.int64(-1), 0, False, np.int32(0)
            for worker in each_holder(holders, sample):
                full = loads[worker] > capacity
                count = counters[(name ^ names[worker]) & mask]
                if best < 0 or full > best_full or (full == best_full and count < best_count):
                    best, ties, best_full, best_count = worker, 1, full, count
                elif full == best_full and count == best_count:
                    ties += 1
                    state, random = next_word(state)
                    if below(random, ties) == 0:
                        best = worker
            left[i] = best
            loads[best] -= 1
            name ^= names[best]
            _toggle(holders, sample, best)
        _toggle(holders, sample, ranks[sample])
        counters[name & mask] += 1
    return left


@kernel("(u8[:,::1], i8[::1], i4[::1], i4[::1], i8[::1], i8)")
def _change_places(holders, moved, left, ranks, loads, capacity):  # type: ignore[no-untyped-def]
    """Replace a holder that is too full by the holder that was removed, if that worker has room."""
    for i in range(moved.size):
        if left[i] < 0 or loads[left[i]] >= capacity:
            continue
        for worker in each_holder(holders, moved[i]):
            if loads[worker] > capacity and worker != ranks[moved[i]]:
                _toggle(holders, moved[i], worker)
                _toggle(holders, moved[i], left[i])
                loads[worker] -= 1
                loads[left[i]] += 1
                break


@kernel("(u8[:,::1], i8[::1], i4[::1], i8[::1], i8)")
def _give_up(holders, order, ranks, loads, capacity):  # type: ignore[no-untyped-def]
    """Drop samples that workers with full caches hold but do not train on, until the caches fit."""
    for sample in order:
        for worker in each_holder(holders, sample):
            if loads[worker] > capacity and worker != ranks[sample]:
                _toggle(holders, sample, worker)
                loads[worker] -= 1
