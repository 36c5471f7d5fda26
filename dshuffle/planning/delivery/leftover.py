"""How many samples go from each worker to each other one, when every worker holds just its share (paper 001,
section III).

``leftover``: pairs, and chains of what pairs leave over, for caches without excess (paper 001).

Each sample is an arc from the worker that has it to the one that needs it. Two opposite arcs make one packet. The
arcs left over are sent in closed trails through one worker, the ignored one: a packet for each other worker on the
way XORs the sample that comes in there with the one that goes out. That worker holds the latter and gets the former.
The ignored worker holds the first sample of the trail, peels packet after packet from there, and ends up with the
last sample, the one it needs: one packet fewer than samples.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer, as_ranks
from dshuffle.errors import InvalidParameter
from dshuffle.planning.grouping import count_holders, group_by, lowest_bit
from dshuffle.planning.plan import SERVER, Plan, missing_samples
from dshuffle.planning.randomness import permutation
from dshuffle.planning.types import Holders, Ranks

Matrix = NDArray[np.int64]


def shuffle_matrix(owners: ArrayLike, destinations: ArrayLike, n_workers: int) -> Matrix:
    """``(n, n)`` int64: entry (i, j) counts the samples that worker i has and worker j is to train on.

    Rows add up to the shares before the shuffle, columns to those after it. Where every worker's share is as large
    as before, as many samples leave it as come in.

    Parameters
    ----------
    owners, destinations
        ``(q,)`` integers, the worker of each sample before and after the shuffle.

    References
    ----------
    Paper 001, definitions 1 and 2.

    Examples
    --------
    >>> shuffle_matrix([0, 0, 1, 1], [0, 1, 1, 0], 2)
    array([[1, 1],
           [1, 1]])
    """
    n_workers = as_integer("n_workers", n_workers, 1)
    before = as_ranks("owners", owners, n_workers)
    after = as_ranks("destinations", destinations, n_workers)
    if len(before) != len(after):
        raise InvalidParameter.of("destinations.shape", after.shape, f"({len(before)},), as owners has")
    arcs = before.astype(np.int64) * n_workers + after
    return np.bincount(arcs, minlength=n_workers**2).reshape(n_workers, n_workers)


def leftover_matrix(shuffle: ArrayLike) -> Matrix:
    """What a shuffle matrix leaves once all that two workers have for each other is sent in pairs.

    References
    ----------
    Paper 001, definition 3.

    Examples
    --------
    >>> leftover_matrix([[2, 1, 2], [2, 1, 2], [1, 3, 1]])
    array([[0, 0, 1],
           [1, 0, 0],
           [0, 1, 0]])
    """
    matrix = as_matrix("shuffle", shuffle)
    return matrix - np.minimum(matrix, matrix.T)


def as_matrix(name: str, values: ArrayLike) -> Matrix:
    """A square int64 matrix of counts, or :class:`InvalidParameter`."""
    matrix = np.asarray(values)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise InvalidParameter.of(f"{name}.shape", matrix.shape, "(n_workers, n_workers)")
    if not np.issubdtype(matrix.dtype, np.integer):
        raise InvalidParameter.of(f"{name}.dtype", str(matrix.dtype), "an integer dtype")
    if (matrix < 0).any():
        raise InvalidParameter.of(name, int(matrix.min()), "counts of samples, none below 0")
    return matrix.astype(np.int64)


def plan_leftover(holders: Holders, destinations: Ranks, n_workers: int, *, seed: int) -> Plan:
    """Packets of at most two samples from the server, as many as Theorem 1 of paper 001 says.

    The seed chooses among the workers that are equally good to ignore.

    Raises
    ------
    InvalidParameter
        If a sample is held by more than one worker.

    References
    ----------
    Paper 001, section V. The paper asks that the ignored worker decode everything in two steps (definition 4),
    which not every shuffle allows: its arcs may not be connected by single arcs. We take the shortest trails that
    there are, so that more steps are taken only where they must be. The theorem is about shuffles in which as many
    samples leave each worker as come in; in others, samples that are on no closed trail are sent as they are.
    """
    needed = missing_samples(holders, destinations)
    owners = np.empty(len(destinations), dtype=np.int64)
    shared = _find_owners(holders, n_workers, owners)
    if shared >= 0:
        raise InvalidParameter.of(
            f"holders[{shared}]",
            holders[shared].tolist(),
            "one worker for the delivery 'leftover', which is for caches without excess",
            "With excess use 'clique' or 'ubershuffle'.",
        )
    # Samples that nobody holds come from a node of their own, to which no arc leads.
    nodes = n_workers + 1
    order, offsets = group_by(owners[needed] * nodes + destinations[needed], nodes**2)
    leftovers = leftover_matrix(np.diff(offsets).reshape(nodes, nodes))
    ignored, trails = _best_ignored(leftovers, seed)
    packets = np.zeros(len(needed) + 1, dtype=np.int64)
    samples = np.empty(2 * len(needed), dtype=np.int64)
    workers = np.empty(2 * len(needed), dtype=np.int32)
    n_packets = _emit(needed[order], offsets, trails, ignored, packets, samples, workers)
    packets = packets[: n_packets + 1]
    return Plan(packets, samples[: packets[-1]], workers[: packets[-1]], np.full(n_packets, SERVER, dtype=np.int32))


@numba.njit(nogil=True, cache=True)
def _find_owners(holders, n_workers, owners):  # type: ignore[no-untyped-def]
    """Write each sample's holder, ``n_workers`` for none; the first sample with several, or -1."""
    for sample in range(owners.size):
        if count_holders(holders, sample) > 1:
            return sample
        owners[sample] = n_workers
        for word in range(holders.shape[1]):
            if holders[sample, word] != 0:
                owners[sample] = word * 64 + lowest_bit(holders[sample, word])
    return -1


def _best_ignored(leftovers: Matrix, seed: int) -> tuple[int, Matrix]:
    """The worker with the most closed trails through it, and how many of these take each arc."""
    bounds = np.minimum(leftovers.sum(axis=0), leftovers.sum(axis=1))
    mixed = permutation(len(bounds), "leftover", seed)
    best, most, trails = 0, -1, leftovers
    for worker in mixed[np.argsort(-bounds[mixed], kind="stable")].tolist():
        # If as many samples leave as come in everywhere, the first worker reaches its bound.
        if bounds[worker] <= most:
            break
        count, flow = _closed_trails(leftovers, worker)
        if count > most:
            best, most, trails = worker, count, flow
    return best, trails


@numba.njit(nogil=True, cache=True)
def _closed_trails(arcs, hub):  # type: ignore[no-untyped-def]
    """Closed trails through ``hub`` of which no two share an arc: how many, and how many take each arc.

    One shortest trail after the other. Where as many arcs leave every node as come in, that stays so when a trail
    is taken out; hence none of them is ever in the way of another, and the hub's arcs are all used up.
    """
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


@numba.njit(nogil=True, cache=True)
def _emit(  # type: ignore[no-untyped-def]
    arcs, offsets, trails, ignored, packets, samples, workers
):
    """Write all packets, of which ``packets`` gets the offsets, and return how many there are.

    ``arcs`` are the needed samples, those from node i to node j at ``offsets[i * n + j]``. Uses up ``trails``.
    """
    n = trails.shape[0]
    heads = offsets[:-1].copy()
    p, e = 0, 0
    for i in range(n):
        for j in range(i):
            there, back = i * n + j, j * n + i
            while heads[there] < offsets[there + 1] and heads[back] < offsets[back + 1]:
                samples[e], workers[e] = arcs[heads[there]], j
                samples[e + 1], workers[e + 1] = arcs[heads[back]], i
                heads[there] += 1
                heads[back] += 1
                p, e = p + 1, e + 2
                packets[p] = e
    # All arcs to the nodes before this one are used up.
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
