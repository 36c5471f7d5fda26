"""Deliveries of single rows: from peers, from a server, or from the store."""

from __future__ import annotations

import dataclasses
import math
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
from dshuffle.planning.epoch_plan import SERVER, STORE, Moves, Packets, split_by_worker
from dshuffle.planning.randomness import below, next_word, random_words
from dshuffle.planning.types import Amounts, count_holders, group_by, lowest_bit


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


def plan_server(plan_input: PlanInput) -> Packets:
    """Plan one packet from the server for every needed sample, by ascending sample."""
    # In this order, a server whose memory is smaller than the dataset streams through the store once.
    # The uncoded baseline of Chung et al. (2017) and Attia and Tandon (2016); see docs/papers.md.
    samples = plan_input.missing_samples()
    return Packets.uncoded(samples, plan_input.destinations[samples], np.full(len(samples), SERVER))


class RowsFromServer(Delivery):
    """Deliveries of single rows that one worker sends to all others."""

    name = "server"
    plan = staticmethod(plan_server)
    needs_server: ClassVar[bool] = True
    demands: ClassVar[int] = 1
    shows_link_rates: ClassVar[bool] = False

    @property
    def without_server(self) -> str:
        """Peers, which need nothing but the workers that train."""
        return PEER.name

    def counted_loads(self, demand: Demand, plan: Packets) -> Loads:
        """Every packet takes one hop."""
        return loads_of_one_hop(demand, plan)

    def pair_count(self, n_workers: int, relay: str) -> int:
        """The server sends to every worker."""
        return n_workers

    def message_count(self, loads: Loads, row_nbytes: int, relay: str, rate: float) -> float:
        """Messages are full."""
        return messages_of_rows(loads, row_nbytes, self.pair_count(len(loads.worker_in), relay), math.inf)


SERVER_ROWS = RowsFromServer()


def plan_storage(plan_input: PlanInput) -> Packets:
    """Plan one packet from the store for every needed sample, by ascending sample."""
    # A worker receives the samples of one chunk one after the other, so it fetches the chunk once.
    samples = plan_input.missing_samples()
    return Packets.uncoded(samples, plan_input.destinations[samples], np.full(len(samples), STORE))


class RowsFromStore(Delivery):
    """Deliveries of single rows that workers read from the dataset again."""

    name = "storage"
    plan = staticmethod(plan_storage)
    reads_store: ClassVar[bool] = True
    plans_own_parts: ClassVar[bool] = True

    def connections(self, n_workers: int) -> int:
        """Nobody sends anything to anybody."""
        return 0

    def own_part(self, moves: Moves, n_workers: int) -> tuple[PartsByWorker, PartsByWorker]:
        """Receive all from the store, and send nothing."""
        return ({STORE: moves.arriving} if len(moves.arriving) else {}), {}

    def counted_loads(self, demand: Demand, plan: Packets) -> Loads:
        """Count the chunks in the plan. For single samples of a larger job, estimate them."""
        received = np.bincount(plan.destinations, minlength=demand.n_workers) * demand.growth
        hits, read = _chunks(demand, plan)
        if demand.n_planned < demand.n_samples and not demand.in_chunks:
            q, c = demand.n_samples, min(demand.chunk_rows, demand.n_samples)
            hits = np.array([chunks_hit(q, c, rows) for rows in received.tolist()])
            read = hits * c * demand.row_nbytes
        return dataclasses.replace(
            demand.no_loads(packets=plan.n_packets * demand.growth),
            requests=hits,
            read=read,
            needed_nbytes=float(received.sum()) * demand.row_nbytes,
        )

    def pair_count(self, n_workers: int, relay: str) -> int:
        """No rows come from other participants."""
        return 0

    def message_count(self, loads: Loads, row_nbytes: int, relay: str, rate: float) -> float:
        """No rows come from other participants."""
        return 0.0


def chunks_hit(n_samples: int, chunk_rows: int, n_rows: float) -> float:
    """Expected number of distinct chunks that contain ``n_rows`` samples drawn at random without replacement."""
    # A chunk of c samples contains none of r samples out of q with probability of about ``(1 - r / q) ** c``.
    part = n_rows / n_samples
    chunks = n_samples / chunk_rows if n_samples > chunk_rows else 1.0
    return float(chunks * -np.expm1(chunk_rows * np.log1p(-part))) if part < 1 else float(chunks)


def _chunks(demand: Demand, plan: Packets) -> tuple[Amounts, Amounts]:
    """Count the chunks and the bytes that each worker reads, in the job; a worker reads each chunk once."""
    c, n, q = demand.chunk_rows, demand.n_workers, demand.n_planned
    n_chunks = -(-q // c)
    hit = np.unique(plan.destinations.astype(np.int64) * n_chunks + plan.samples // c)
    lengths = np.where(hit % n_chunks == n_chunks - 1, q - (n_chunks - 1) * c, c)
    rows = np.bincount(hit // n_chunks, lengths, minlength=n)
    hits = np.bincount(hit // n_chunks, minlength=n).astype(np.float64)
    return hits * demand.growth, rows * (demand.growth * demand.row_nbytes)


STORAGE = RowsFromStore()
