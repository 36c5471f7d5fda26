"""``leftover``: pairs of samples, and chains of the remaining samples, for caches without excess.

Each sample is an arc from the worker that has it to the worker that needs it. Two opposite arcs make one packet. The
remaining arcs are sent in closed trails through one worker, the ignored worker. For every other worker on a trail,
one packet XORs the sample that arrives there with the sample that leaves. That worker holds the leaving sample and
decodes the arriving one. The ignored worker holds the first sample of the trail. It decodes packet after packet from
there, up to the last sample, which it needs. A trail has one packet fewer than samples.

References
----------
Attia and Tandon (2016), sections III and V; see docs/papers.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.kernels import kernel
from dshuffle.planning.delivery.definition import Delivery, PlanInput
from dshuffle.planning.epoch_plan import SERVER, Packets
from dshuffle.planning.randomness import permutation
from dshuffle.planning.types import count_holders, group_by, lowest_bit

Matrix = NDArray[np.int64]


def shuffle_matrix(owners: ArrayLike, destinations: ArrayLike, n_workers: int) -> Matrix:
    """Count the samples that worker i has and worker j will train on, ``(n, n)`` int64."""
    # Rows add up to the shares before the shuffle, columns to the shares after it. If a worker's share keeps its size,
    # as many samples leave the worker as arrive. Attia and Tandon (2016), definitions 1 and 2; see docs/papers.md.
    arcs = np.asarray(owners, np.int64) * n_workers + np.asarray(destinations, np.int64)
    return np.bincount(arcs, minlength=n_workers**2).reshape(n_workers, n_workers)


def plan_leftover(plan_input: PlanInput) -> Packets:
    """Plan packets of at most two samples from the server."""
    # The seed chooses among the workers that are equally good to ignore.
    # Attia and Tandon (2016), section V and Theorem 1 for the number of packets; see docs/papers.md. The paper requires
    # that the ignored worker decode everything in two steps (definition 4). Not every shuffle allows this, because
    # single arcs may not connect the worker's arcs. We take the shortest trails, so there are more steps only where
    # necessary. The theorem covers shuffles in which as many samples leave each worker as arrive. In other shuffles,
    # samples that are not on a closed trail are sent uncoded.
    holders, destinations, n_workers = plan_input.holders, plan_input.destinations, plan_input.n_workers
    needed = plan_input.missing_samples()
    owners = np.empty(len(destinations), dtype=np.int64)
    shared = _find_owners(holders, n_workers, owners)
    if shared >= 0:
        raise InvalidParameter.of(
            f"holders[{shared}]",
            holders[shared].tolist(),
            "a mask of one worker for the delivery 'leftover', which is for caches without excess",
            "Use 'clique' or 'ubershuffle' for caches with excess.",
        )
    # Samples without a holder start at an extra node, to which no arc leads.
    nodes = n_workers + 1
    order, offsets = group_by(owners[needed] * nodes + destinations[needed], nodes**2)
    shuffle = np.diff(offsets).reshape(nodes, nodes)
    # Without the samples that are sent in pairs: Attia and Tandon (2016), definition 3.
    leftovers = shuffle - np.minimum(shuffle, shuffle.T)
    ignored, trails = _best_ignored(leftovers, plan_input.seed)
    packets = np.zeros(len(needed) + 1, dtype=np.int64)
    samples = np.empty(2 * len(needed), dtype=np.int64)
    workers = np.empty(2 * len(needed), dtype=np.int32)
    n_packets = _emit(needed[order], offsets, trails, ignored, packets, samples, workers)
    packets = packets[: n_packets + 1]
    return Packets(packets, samples[: packets[-1]], workers[: packets[-1]], np.full(n_packets, SERVER, dtype=np.int32))


@kernel("(u8[:,::1], i8, i8[::1])")
def _find_owners(holders, n_workers, owners):  # type: ignore[no-untyped-def]
    """Write each sample's holder, or ``n_workers``; return the first sample with several holders, or -1."""
    for sample in range(owners.size):
        if count_holders(holders, sample) > 1:
            return sample
        owners[sample] = n_workers
        for word in range(holders.shape[1]):
            if holders[sample, word] != 0:
                owners[sample] = word * 64 + lowest_bit(holders[sample, word])
    return -1


def _best_ignored(leftovers: Matrix, seed: int) -> tuple[int, Matrix]:
    """Return the worker with the most closed trails through it, and the number of trails over each arc."""
    bounds = np.minimum(leftovers.sum(axis=0), leftovers.sum(axis=1))
    mixed = permutation(len(bounds), "leftover", seed)
    best, most, trails = 0, -1, leftovers
    for worker in mixed[np.argsort(-bounds[mixed], kind="stable")].tolist():
        # If as many samples leave every worker as arrive, the first worker reaches its bound.
        if bounds[worker] <= most:
            break
        count, flow = _closed_trails(leftovers, worker)
        if count > most:
            best, most, trails = worker, count, flow
    return best, trails


@kernel("(i8[:,::1], i8)")
def _closed_trails(arcs, hub):  # type: ignore[no-untyped-def]
    """Return the number of arc-disjoint closed trails through ``hub``, and the number over each arc."""
    # Trails are found one by one, the shortest first. If as many arcs leave every node as enter it, this still holds
    # after a trail is removed. Trails then never block each other, and all arcs of the hub are used.
    n = arcs.shape[0]
    left = arcs.copy()
    parent = np.empty(n, dtype=np.int64)
    queue = np.empty(n, dtype=np.int64)
    count = 0
    while True:
        parent[:] = -1
        queue[0] = hub
        head, tail = 0, 1
        end = -1
        while head < tail and end < 0:
            node = queue[head]
            head += 1
            for other in range(n):
                if left[node, other] > 0 and parent[other] < 0:
                    parent[other] = node
                    if left[other, hub] > 0:
                        end = other
                        break
                    queue[tail] = other
                    tail += 1
        if end < 0:
            return count, arcs - left
        room = left[end, hub]
        node = end
        while node != hub:
            room = min(room, left[parent[node], node])
            node = parent[node]
        left[end, hub] -= room
        node = end
        while node != hub:
            left[parent[node], node] -= room
            node = parent[node]
        count += room


@kernel("(i8[::1], i8[::1], i8[:,::1], i8, i8[::1], i8[::1], i4[::1])")
def _emit(  # type: ignore[no-untyped-def]
    arcs, offsets, trails, ignored, packets, samples, workers
):
    """Write all packets, with their offsets in ``packets``, and return the number of packets."""
    # ``arcs`` are the needed samples; the samples from node i to node j begin at ``offsets[i * n + j]``. ``trails`` is
    # overwritten.
    n = trails.shape[0]
    heads = offsets[:-1].copy()
    p, e = 0, 0
    for i in range(n):
        for j in range(i):
            forward, back = i * n + j, j * n + i
            while heads[forward] < offsets[forward + 1] and heads[back] < offsets[back + 1]:
                samples[e], workers[e] = arcs[heads[forward]], j
                samples[e + 1], workers[e + 1] = arcs[heads[back]], i
                heads[forward] += 1
                heads[back] += 1
                p, e = p + 1, e + 2
                packets[p] = e
    # The trails use no more arcs from a node to the nodes before nearest[node].
    nearest = np.zeros(n, dtype=np.int64)
    node, comes_in = ignored, np.int64(-1)
    while True:
        while nearest[node] < n and trails[node, nearest[node]] == 0:
            nearest[node] += 1
        if nearest[node] == n:
            break
        other = nearest[node]
        trails[node, other] -= 1
        arc = node * n + other
        goes_out = arcs[heads[arc]]
        heads[arc] += 1
        if node != ignored:
            samples[e], workers[e] = comes_in, node
            samples[e + 1], workers[e + 1] = goes_out, ignored
            p, e = p + 1, e + 2
            packets[p] = e
        node, comes_in = other, goes_out
    for i in range(n):
        for j in range(n):
            for arc in range(heads[i * n + j], offsets[i * n + j + 1]):
                samples[e], workers[e] = arcs[arc], j
                p, e = p + 1, e + 1
                packets[p] = e
    return p


LEFTOVER = Delivery("leftover", plan_leftover, coded=True, needs_server=True, refuses_excess=True)
