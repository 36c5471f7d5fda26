"""Expected loads from formulas, which are fast for any number of samples and workers."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dshuffle.planning.cost.cluster import Amounts, ClusterRates
from dshuffle.planning.cost.expected_packets import HolderSets, expected_packets
from dshuffle.planning.cost.job import Work
from dshuffle.planning.cost.loads import CHECKSUM_NBYTES, Loads, nothing
from dshuffle.planning.delivery.grid import WorkerGrid

RING_WAITS = 1.6
"""Time of a ring relative to links that are never idle; it is longer because rounds wait for each other.

Fitted to measurements with 8 workers: 1.3 and 1.4 at cache fractions of 0.2 and 0.35, 1.9 at 0.5, and 1.6 at 0.5 with
more samples.
"""

MANY_TRIALS = 10_000
"""Number of groups per worker above which the maximum over workers is close to the mean."""


def needed_rows(work: Work, n_workers: int) -> float:
    """Expected number of samples that a worker is to train on and does not hold (U in docs/design.md, "Predicting").

    A new ``global`` assignment needs ``q - s`` samples whatever the excess, since a worker holds any sample with
    probability s/q. ``partial:Q`` sends ``Q q`` samples to other workers than their owners. These workers hold each of
    the samples with the probability of the excess.

    References
    ----------
    Chung et al. (2017), Theorem 1 (equation 1), for ``global``; Nguyen et al. (2022), Algorithm 1, for ``partial:Q``,
    here without fixed points. See docs/papers.md.

    Examples
    --------
    >>> from dshuffle.planning import Choices
    >>> needed_rows(Work(1000, 8, Choices(cache_fraction=0.5)), 10)
    500.0
    >>> needed_rows(Work(1000, 8, Choices("partial:0.1")), 10)
    100.0
    """
    if n_workers == 1:
        return 0.0
    return work.n_samples * work.choices.assignment.missing_fraction(work.alpha(n_workers), work.excess(n_workers))


def chunks_hit(n_samples: int, chunk_rows: int, n_rows: float) -> float:
    """Expected number of distinct chunks that contain ``n_rows`` samples drawn at random without replacement.

    A chunk of c samples contains none of r samples out of q with probability of about ``(1 - r / q) ** c``.

    Examples
    --------
    >>> chunks_hit(6400, 64, 6400), round(chunks_hit(6400, 64, 100), 1), round(chunks_hit(6400, 1, 100), 1)
    (100.0, 63.5, 100.0)
    """
    part = n_rows / n_samples
    chunks = n_samples / chunk_rows if n_samples > chunk_rows else 1.0
    return float(chunks * -np.expm1(chunk_rows * np.log1p(-part))) if part < 1 else float(chunks)


def expected_loads(work: Work, cluster: ClusterRates) -> Loads:
    """Compute the expected loads of every part of the cluster.

    These are the bytes behind each line of the table of times in docs/design.md, "Predicting". All workers have the
    same load, except with ``chunks``, where one worker lacks the most groups. Coded packets are those of
    :func:`~dshuffle.planning.cost.expected_packets.expected_packets`.
    """
    n = cluster.n_workers
    rows = needed_rows(work, n)
    loads = nothing(n, cluster.n_racks, exact=False)
    loads["needed"] = loads["packets"] = rows
    if not rows:
        return Loads(**loads)  # type: ignore[arg-type]
    row = work.row_nbytes + CHECKSUM_NBYTES
    share = _shares(work, n, rows)
    if work.delivery.reads_store:
        return Loads(**loads | storage_loads(work, n, share))  # type: ignore[arg-type]
    if work.delivery.two_hops:
        return Loads(**loads | two_hop_loads(cluster, share * row))  # type: ignore[arg-type]
    loads["worker_in"] = share * row
    sizes = np.bincount(cluster.racks(), minlength=cluster.n_racks)
    if not work.delivery.needs_server:
        loads["worker_out"] = share * row
        loads |= _across(sizes, share[0] * row)
        return Loads(**loads)  # type: ignore[arg-type]
    packets = rows
    if work.coded:
        packets = expected_packets(work.delivery.name, HolderSets.of(work, n, rows))
        loads["encoded"] = rows * work.row_nbytes
        loads["decoded"] = share * work.row_nbytes * max(1.0, rows / packets)
    sent = packets if work.coded and work.choices.relay != "unicast" else rows
    loads["packets"], loads["server_out"] = packets, sent * row
    loads["worker_out"] = (rows - sent) / n * row + np.zeros(n)
    if work.coded and work.choices.relay == "ring":
        loads["passed_on"] = ring_bytes(rows, packets, n) * row
    relayed = _across(sizes, (rows - sent) / n * row)
    loads["rack_out"] = relayed["rack_out"]
    loads["rack_in"] = relayed["rack_in"] + sizes * (sent / n * row)  # the server is outside all racks
    return Loads(**loads)  # type: ignore[arg-type]


def ring_bytes(components: float, packets: float, n_workers: int) -> float:
    """Duration of a ring's second stage on a link, in rows.

    It is ``(U - P) / n`` if the rings of all groups keep all links busy, and ``P (m - 1) / m`` if one group follows the
    other. Measured durations are between the two.

    References
    ----------
    Chung et al. (2017), Theorem 4; see docs/papers.md. Scatter then ring takes ``P (2 m - 1) / m`` for a single group
    of m workers, and scattering takes P of it.
    """
    if not components:
        return 0.0
    return min(RING_WAITS * (components - packets) / n_workers, packets * (1 - packets / components))


def storage_loads(work: Work, n_workers: int, share: np.ndarray) -> dict[str, object]:
    """Compute bytes and requests to the storage for ``(n,)`` rows that workers lack.

    A worker reads each chunk once. With ``chunks`` it needs whole groups of rows, and skips a group only if it already
    holds all of its rows.
    """
    c, g = min(work.chunk_rows, work.n_samples), work.group_rows
    if work.in_chunks:
        part = _groups(work, n_workers) * (1 - work.excess(n_workers) ** g) * (g / work.n_samples)
        of_chunk = (c + g - math.gcd(g, c)) / g  # groups with rows of a chunk: 1 if groups are chunks
        hit = work.n_samples / c * (1 - (1 - np.minimum(1.0, part)) ** of_chunk)
    else:
        hit = np.array([chunks_hit(work.n_samples, c, rows) for rows in share.tolist()])
    return {
        "requests": hit,
        "read": hit * c * work.row_nbytes,
        "wanted": float(share.sum()) * work.row_nbytes,
    }


def two_hop_loads(cluster: ClusterRates, received: Amounts) -> dict[str, object]:
    """Return the loads of links if ``(n,)`` bytes reach each worker over a grid, equally from all other workers."""
    n, racks, n_racks = cluster.n_workers, cluster.racks(), cluster.n_racks
    grid = WorkerGrid(n)
    through, columns = grid.first_hops(), np.arange(grid.n_columns)
    ranks = np.arange(n)
    members = np.bincount(ranks % grid.n_columns)  # of each column

    def by_rack(ends: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.int64]:
        counts = np.bincount((racks[ends] * grid.n_columns + columns).ravel(), minlength=n_racks * grid.n_columns)
        return counts.reshape(n_racks, grid.n_columns)

    # In units of what one worker gets from another. First hop: a bundle for each column.
    sent = (through != ranks[:, None]) * members
    crossing = (racks[through] != racks[:, None]) * members
    forwarded = np.bincount(through.ravel(), minlength=n)  # senders whose rows pass through each worker
    bundles = np.bincount(through.ravel(), sent.ravel(), minlength=n)
    # Second hop: the rows of each of these senders for the other members of the column.
    held, passing = by_rack(ranks, ranks % grid.n_columns), by_rack(through, np.broadcast_to(columns, through.shape))
    rows_out, rows_in = forwarded * (members[ranks % grid.n_columns] - 1), n - forwarded
    rack_out = np.bincount(racks, crossing.sum(axis=1), minlength=n_racks) + (passing * (members - held)).sum(axis=1)
    rack_in = np.bincount(racks[through].ravel(), crossing.ravel(), minlength=n_racks)
    rack_in = rack_in + (held * (n - passing)).sum(axis=1)
    each = received.mean() / max(1, n - 1)
    # A worker that receives more than others also does so in the second hop.
    more = received / received.mean() if received.any() else np.ones(n)
    return {
        "worker_out": (sent.sum(axis=1) + rows_out) * each,
        "worker_in": (bundles + rows_in * more) * each,
        "rack_out": rack_out * each,
        "rack_in": rack_in * each,
    }


def _shares(work: Work, n_workers: int, rows: float) -> Amounts:
    """Return the expected number of rows that each worker lacks."""
    if not work.in_chunks:
        return np.full(n_workers, rows / n_workers)
    groups = _groups(work, n_workers)
    shares: Amounts = groups * (rows / float(groups.sum()))
    return shares


def _groups(work: Work, n_workers: int) -> Amounts:
    """Return the expected number of groups that each worker is assigned and that were not in its share before."""
    groups = work.n_samples / work.group_rows
    absent = 1 - 1 / n_workers
    most = math.ceil(math.ceil(groups) / n_workers)
    busiest = math.ceil(groups) - (most - 1) * n_workers  # number of workers with the most groups
    lacks = (most - (np.arange(n_workers) >= busiest)) * (groups / math.ceil(groups) * absent)
    # The exchange waits for the worker that lacks the most groups. The others share the rest.
    total, rest = float(lacks.sum()), float(lacks[1:].sum())
    largest = min(_largest(most, absent, busiest), total)
    lacks[1:] *= (total - largest) / rest if rest else 1.0
    lacks[0] = largest
    return lacks.astype(np.float64)


def _largest(trials: int, chance: float, workers: int) -> float:
    """Expected maximum of ``workers`` binomial variables; their mean if there are many trials, where it is close."""
    if trials > MANY_TRIALS:
        return trials * chance
    if not chance:
        return 0.0
    counts = np.arange(trials)
    # Logarithms of the binomial coefficients.
    choices = np.concatenate([[0.0], np.log((trials - counts[:-1]) / (counts[:-1] + 1)).cumsum()])
    at_most = np.exp(choices + counts * math.log(chance) + (trials - counts) * math.log1p(-chance)).cumsum()
    return float((1 - np.minimum(1.0, at_most) ** workers).sum())


def _across(sizes: np.ndarray, each: float) -> dict[str, np.ndarray]:
    """Return bytes out of and into each rack if each worker sends ``each`` bytes, equally to all others."""
    n = int(sizes.sum())
    outside = each * sizes * ((n - sizes) / max(1, n - 1))
    return {"rack_out": outside, "rack_in": outside}
