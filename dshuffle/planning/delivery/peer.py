"""``peer``: one of the holders of a needed sample sends it directly to its worker."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel
from dshuffle.planning.delivery.definition import (
    Delivery,
    Demand,
    Loads,
    PartsByWorker,
    PlanInput,
    loads_of_one_hop,
    messages_of_rows,
)
from dshuffle.planning.epoch_plan import Packets, split_by_worker
from dshuffle.planning.grouping import count_holders, group_by, lowest_bit
from dshuffle.planning.moves import Moves
from dshuffle.planning.randomness import below, next_word, random_words


def plan_peer(plan_input: PlanInput) -> Packets:
    """Plan one packet for every needed sample from its least loaded holder, by ascending sample.

    Samples with few holders choose their sender first, and samples with many holders fill the gaps. With two or more
    holders per sample, loads differ by less than 1 % of the mean. Every worker must receive its samples in any case,
    so equal sends meet the cut-set bound. With unequal shares, loads are in proportion to shares: no worker then sends
    more than it receives, and a worker whose link is slow has less of both. Holders on the destination's host come
    first, because their rows do not cross the network. Sends within hosts and sends between hosts are balanced
    separately.
    """
    holders, n_workers, hosts = plan_input.holders, plan_input.n_workers, plan_input.hosts
    weights = np.array(plan_input.weights or (1,) * n_workers, np.int64)
    needed = plan_input.missing_samples()
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
    ranks, state = plan_input.destinations[needed], random_words(1, "peer", plan_input.seed)[0]
    where = np.array(hosts if len(hosts) else range(n_workers), np.int32)
    _pick_senders(holders, needed, ranks, scarce_first, where, weights, state, senders)
    return Packets.uncoded(needed, ranks, senders)


@kernel("(u8[:,::1], i8[::1])")
def _counts(holders, needed):  # type: ignore[no-untyped-def]
    counts = np.empty(needed.size, dtype=np.int32)
    for i in range(needed.size):
        counts[i] = count_holders(holders, needed[i])
    return counts


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


class RowsFromPeers(Delivery):
    """Deliveries of single rows that one worker sends to another. A subclass plans who sends."""

    plans_own_parts: ClassVar[bool] = True

    def own_part(self, moves: Moves, n_workers: int) -> tuple[PartsByWorker, PartsByWorker]:
        """Receive each sample from the worker that has it, and send in the same way."""
        receives = split_by_worker(moves.arriving, moves.senders, n_workers)
        return receives, split_by_worker(moves.leaving, moves.receivers, n_workers)

    def counted_loads(self, demand: Demand, plan: Packets) -> Loads:
        """Every packet takes one hop."""
        return loads_of_one_hop(demand, plan)

    def message_count(self, loads: Loads, row_nbytes: int, relay: str, rate: float) -> float:
        """Every worker sends to every other one."""
        return messages_of_rows(loads, row_nbytes, self.pair_count(len(loads.worker_in), relay), rate)


class Peer(RowsFromPeers):
    """The least loaded holder of a sample sends it."""

    name = "peer"
    plan = staticmethod(plan_peer)


PEER = Peer()
