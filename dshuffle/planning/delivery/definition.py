"""What a delivery is to the rest of dshuffle, and those of single rows: by peers, by a server, or from the store."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dshuffle.kernels import kernel
from dshuffle.planning.delivery.relay import RELAYS
from dshuffle.planning.epoch_plan import SERVER, STORE, Packets
from dshuffle.planning.exchange_epochs import Weights
from dshuffle.planning.randomness import below, next_word, random_words
from dshuffle.planning.types import Holders, Ranks, Samples, each_holder, group_by, missing_samples


@dataclass(frozen=True, slots=True, eq=False)
class PlanInput:
    """Where samples are, where they must go, and what else a plan may depend on; all of it is checked."""

    holders: Holders  # ``(q, words)`` uint64 masks of the workers that hold each sample.
    destinations: Ranks  # ``(q,)`` int32, the worker that will train on each sample.
    n_workers: int
    seed: int
    start: Packets | None = None  # Good packets that are known beforehand.
    hosts: Sequence[int] = ()  # Host of each worker, numbered; empty if every worker has its own.
    weights: Weights = ()  # Relative share of each worker; empty if shares are equal.

    def missing_samples(self) -> Samples:
        """The samples whose workers do not hold them, ascending."""
        return missing_samples(self.holders, self.destinations)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A way to deliver the samples that workers do not hold; those that exist are in ``DELIVERIES``."""

    name: str
    # Plans its packets for a :class:`PlanInput`, and options. They must deliver every sample that a worker lacks
    # exactly once, so that workers can decode them, and depend on the arguments alone.
    plan: Callable[..., Packets]
    coded: bool = False  # Whether packets combine several samples. They come from a server that holds all rows.
    needs_server: bool = False  # Whether one worker must be able to send every sample.
    reads_store: bool = False  # Whether workers read the samples from the dataset again.
    refuses_excess: bool = False  # Whether it is made for caches without samples beyond the share.
    most_workers: int | None = None  # Largest number of workers that it supports; None for any.
    # Whether a worker can plan its own part, where the assignment allows it: the worker that had a sample sends it.
    plans_own_parts: bool = False

    @property
    def demands(self) -> int:
        """What a session must set aside for it: 0 for nothing, 1 for a server, 2 for a server with all rows."""
        return self.needs_server + self.coded

    @property
    def without_server(self) -> str:
        """The delivery that takes its place in a session whose server was lost."""
        return "peer" if self.needs_server else self.name

    @property
    def last_resort(self) -> str:
        """The delivery that takes its place in the last attempt at an epoch."""
        # A packet that cannot be decoded spoils the rows that depend on it.
        return "storage" if self.coded else self.name

    def supports(self, n_workers: int, *, excess: bool) -> bool:
        """Whether it can serve this many workers, with or without excess in their caches."""
        few = self.most_workers is None or n_workers <= self.most_workers
        return few and not (excess and self.refuses_excess)

    def gains_by(self, *, needs_holders: bool, in_chunks: bool, excess: bool) -> bool:
        """Whether it is a way of its own with an assignment; otherwise another assignment does the same."""
        # Chunks leave nothing to combine. Without excess, an assignment cannot be drawn for packets.
        return not in_chunks and (excess or not needs_holders) if self.coded else not needs_holders

    def packets_passed_on(self, relay: str, most_incoming: int) -> int:
        """Maximum number of packets that a worker keeps for others: it only relays what it decodes a sample from."""
        return most_incoming if self.coded and relay != "unicast" else 0

    @property
    def relays(self) -> tuple[str, ...]:
        """Relays that make a difference to it; a single one if none does."""
        return tuple(RELAYS) if self.coded else ("pipelined",)

    def label(self, relay: str) -> str:
        """Its name, for tables, with the relay if that makes a difference."""
        return f"{self.name}, {relay}" if self.coded else self.name

    @property
    def family(self) -> str:
        """Name of its family: deliveries of one family are alternatives, and the fastest stands for all of them."""
        return "any coded delivery" if self.coded else self.name


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
    counts = np.bitwise_count(holders[needed]).sum(axis=1, dtype=np.int64)
    choice = counts.max(initial=0) > 1
    scarce_first = group_by(counts, n_workers + 1)[0] if choice else np.arange(len(needed))
    senders = np.empty(len(needed), np.int32)
    ranks, state = plan_input.destinations[needed], random_words(1, "peer", plan_input.seed)[0]
    where = np.array(hosts if len(hosts) else range(n_workers), np.int32)
    _pick_senders(holders, needed, ranks, scarce_first, where, weights, state, senders)
    return Packets.uncoded(needed, ranks, senders)


@kernel("(u8[:,::1], i8[::1], i4[::1], i8[::1], i4[::1], i8[::1], u8, i4[::1])")
def _pick_senders(holders, needed, ranks, scarce_first, hosts, weights, state, senders):  # type: ignore[no-untyped-def]
    loads = np.zeros((2, hosts.size), np.int64)  # of rows to other hosts, and to the own one
    for i in scarce_first:
        best, ties, near = -1, 0, -1
        for worker in each_holder(holders, needed[i]):
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
