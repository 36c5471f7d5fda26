"""Deliveries without coding.

- ``storage``: every worker reads the samples that it lacks from the store.
- ``server``: one worker that can read every sample sends each needed sample to its worker.
- ``peer``: one of the holders of a needed sample sends it directly to its worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.planning.delivery.definition import Delivery, Source
from dshuffle.planning.grouping import count_holders, group_by, lowest_bit
from dshuffle.planning.packets import SERVER, STORE, Packets, missing_samples
from dshuffle.planning.randomness import below, next_word, random_words
from dshuffle.planning.types import Holders, Ranks


def plan_storage(holders: Holders, destinations: Ranks, n_workers: int, *, seed: int) -> Packets:
    """Plan one packet from the store for every needed sample, by ascending sample.

    A worker receives the samples of one chunk one after the other, so it fetches the chunk once.
    """
    samples = missing_samples(holders, destinations)
    return Packets.uncoded(samples, destinations[samples], np.full(len(samples), STORE))


def plan_server(holders: Holders, destinations: Ranks, n_workers: int, *, seed: int) -> Packets:
    """Plan one packet from the server for every needed sample, by ascending sample.

    In this order, a server whose memory is smaller than the dataset streams through the store once.

    References
    ----------
    The uncoded baseline of Chung et al. (2017) and Attia and Tandon (2016); see docs/papers.md.
    """
    samples = missing_samples(holders, destinations)
    return Packets.uncoded(samples, destinations[samples], np.full(len(samples), SERVER))


def plan_peer(
    holders: Holders, destinations: Ranks, n_workers: int, *, seed: int, hosts: Sequence[int] = ()
) -> Packets:
    """Plan one packet for every needed sample from its least loaded holder, by ascending sample.

    Samples with few holders choose their sender first, and samples with many holders fill the gaps. With two or more
    holders per sample, loads differ by less than 1 % of the mean. Every worker must receive its samples in any case,
    so equal sends meet the cut-set bound. Holders on the destination's host come first, because their rows do
    not cross the network. Sends within hosts and sends between hosts are balanced separately.

    Raises
    ------
    InvalidParameter
        If no worker holds a needed sample.
    """
    needed = missing_samples(holders, destinations)
    counts = _counts(holders, needed)
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
    ranks, state = destinations[needed], random_words(1, "peer", seed)[0]
    where = np.array(hosts if len(hosts) else range(n_workers), np.int32)
    _pick_senders(holders, needed, ranks, scarce_first, where, state, senders)
    return Packets.uncoded(needed, ranks, senders)


@numba.njit(nogil=True, cache=True)
def _counts(holders, needed):  # type: ignore[no-untyped-def]
    counts = np.empty(needed.size, dtype=np.int32)
    for i in range(needed.size):
        counts[i] = count_holders(holders, needed[i])
    return counts


@numba.njit(nogil=True, cache=True)
def _pick_senders(holders, needed, ranks, scarce_first, hosts, state, senders):  # type: ignore[no-untyped-def]
    loads = np.zeros((2, hosts.size), dtype=np.int64)  # of rows to other hosts, and to the own one
    for i in scarce_first:
        best, ties, near = -1, 0, 0
        for word in range(holders.shape[1]):
            rest = holders[needed[i], word]
            while rest != 0:
                worker = word * 64 + lowest_bit(rest)
                rest &= rest - np.uint64(1)
                beside = int(hosts[worker] == hosts[ranks[i]])
                if best < 0 or beside > near or (beside == near and loads[near, worker] < loads[near, best]):
                    best, ties, near = worker, 1, beside
                elif beside == near and loads[near, worker] == loads[near, best]:
                    # Break ties at random; otherwise the low ranks would send more in every epoch.
                    ties += 1
                    state, random = next_word(state)
                    if below(random, ties) == 0:
                        best = worker
        senders[i] = best
        loads[near, best] += 1


STORAGE = Delivery("storage", plan_storage, Source.STORE)
SERVER_ROWS = Delivery("server", plan_server, Source.SERVER)
PEER = Delivery("peer", plan_peer, Source.PEERS, knows_hosts=True)
