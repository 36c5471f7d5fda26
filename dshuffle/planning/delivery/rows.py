"""Deliveries of single rows: from peers, from a server, or from the store."""

from __future__ import annotations

import functools

import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel
from dshuffle.planning.delivery.definition import Delivery, PlanInput
from dshuffle.planning.epoch_plan import SERVER, STORE, Packets
from dshuffle.planning.randomness import below, next_word, random_words
from dshuffle.planning.types import count_each, group_by, lowest_bit


def plan_peer(plan_input: PlanInput) -> Packets:
    """Plan one packet for every needed sample from its least loaded holder, by ascending sample."""
    # Samples with few holders choose their sender first, and samples with many holders fill the gaps. With two or more
    # holders per sample, loads differ by less than 1 % of the mean. Every worker must receive its samples in any case,
    # so equal sends meet the cut-set bound. With unequal shares, loads are in proportion to shares: no worker then
    # sends more than it receives, and a worker whose link is slow has less of both. Holders on the destination's host
    # come first, because their rows do not cross the network. Sends within hosts and sends between hosts are balanced
    # separately.
    holders, n_workers, hosts = plan_input.holders, plan_input.n_workers, plan_input.hosts
    weights = np.array(plan_input.weights or (1,) * n_workers, np.int64)
    needed = plan_input.missing_samples()
    counts = count_each(holders, needed)
    if (nowhere := np.flatnonzero(counts == 0)).size:
        raise InvalidParameter.of(
            f"holders[{needed[nowhere[0]]}]",
            0,
            "a mask of at least one worker for the delivery 'peer'",
            "Use the delivery 'server' or 'storage' for samples that no worker holds.",
        )
    choice = counts.max(initial=0) > 1
    scarce_first = group_by(counts, n_workers + 1)[0] if choice else np.arange(len(needed))
    senders = np.empty(len(needed), dtype=np.int32)
    ranks, state = plan_input.destinations[needed], random_words(1, "peer", plan_input.seed)[0]
    where = np.array(hosts if len(hosts) else range(n_workers), np.int32)
    _pick_senders(holders, needed, ranks, scarce_first, where, weights, state, senders)
    return Packets.uncoded(needed, ranks, senders)


@kernel("(u8[:,::1], i8[::1], i4[::1], i8[::1], i4[::1], i8[::1], u8, i4[::1])")
def _pick_senders(holders, needed, ranks, scarce_first, hosts, weights, state, senders):  # type: ignore[no-untyped-def]
    loads = np.zeros((2, hosts.size), dtype=np.int64)  # of rows to other hosts, and to the own one
    for i in scarce_first:
        best, ties, near = -1, 0, -1
        for word in range(holders.shape[1]):
            rest = holders[needed[i], word]
            while rest != 0:
                worker = word * 64 + lowest_bit(rest)
                rest &= rest - np.uint64(1)
                beside = int(hosts[worker] == hosts[ranks[i]])
                excess = 0
                if beside == near:
                    # Integers compare loads relative to weights, because machines may round fractions differently.
                    excess = (loads[near, worker] + 1) * weights[best] - (loads[near, best] + 1) * weights[worker]
                if beside > near or (beside == near and excess < 0):
                    best, ties, near = worker, 1, beside
                elif beside == near and excess == 0:
                    # Break ties at random; otherwise the low ranks would send more in every epoch.
                    ties += 1
                    state, random = next_word(state)
                    if below(random, ties) == 0:
                        best = worker
        senders[i] = best
        loads[near, best] += 1


def plan_from(sender: int, plan_input: PlanInput) -> Packets:
    """Plan one packet from the server or the store for every needed sample, by ascending sample."""
    # In this order, a server whose memory is smaller than the dataset streams through the store once, and a worker
    # fetches a chunk once. From the server, it is the uncoded baseline of Chung et al. (2017) and Attia and Tandon
    # (2016); see docs/papers.md.
    samples = plan_input.missing_samples()
    return Packets.uncoded(samples, plan_input.destinations[samples], np.full(len(samples), sender))


PEER = Delivery("peer", plan_peer, plans_own_parts=True)
SERVER_ROWS = Delivery("server", functools.partial(plan_from, SERVER), needs_server=True)
STORAGE = Delivery("storage", functools.partial(plan_from, STORE), reads_store=True, plans_own_parts=True)
