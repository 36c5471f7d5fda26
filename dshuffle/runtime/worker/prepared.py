"""What a worker prepares while the rows of an epoch arrive: the next index, the next view, and the digests it votes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dshuffle.exchange.cache_partition import Swap
from dshuffle.planning import ShuffleSpec
from dshuffle.planning.sample_digest import SampleDigest, due_in_an_epoch
from dshuffle.runtime.dataset_inputs import for_workers
from dshuffle.runtime.worker.epoch_lock import View
from dshuffle.runtime.worker.member_exchange import MemberExchange
from dshuffle.runtime.worker.member_parts import MemberParts


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a commit installs on a worker that trains, and what shows that all workers together train on every sample.

    Parameters
    ----------
    swap, view
        The next index of the cache, and the next epoch as tasks see it.
    digest
        Digest of the samples in the view, which the worker trains on.
    due
        The rank's part of the digest of all samples that are to be trained on. It does not depend on the draw.
    """

    swap: Swap
    view: View
    digest: SampleDigest
    due: SampleDigest

    @classmethod
    def of(cls, exchange: MemberExchange, parts: MemberParts, epoch: int) -> Prepared:
        """Prepare an epoch whose slots have been reserved."""
        training, shuffle, start = parts.training, parts.shuffle, parts.start
        assert training is not None
        mine = exchange.parts[training.rank]
        swap = training.cache.prepare(mine.held)
        # Without excess, a worker holds exactly what it trains on, and the slots are already known.
        own = swap.index.slots if len(mine.own) == len(mine.held) else swap.index.find(mine.own)
        sample_ids, slots, shares = mine.order, own[mine.permutation], exchange.shares
        due = due_in_an_epoch(shuffle, training.rank)
        if start.trained and start.epoch == epoch:

            def spec_for(n_workers: int) -> ShuffleSpec:
                return for_workers(shuffle, n_workers, parts.dataset)

            keep, shares = start.left(shuffle, training.rank, spec_for)
            sample_ids, slots = sample_ids[keep], slots[keep]
            if training.rank == 0:
                due -= start.trained_digest(shuffle, spec_for)
        broadcast = exchange.broadcast
        if len(broadcast):
            broadcast = broadcast[np.isin(broadcast, sample_ids)]
        view = View(epoch, sample_ids, slots, shares, broadcast, shuffle.weights, shuffle.choices.shares.may_change)
        return cls(swap, view, SampleDigest.of(sample_ids, shuffle.choices.seed), due)
