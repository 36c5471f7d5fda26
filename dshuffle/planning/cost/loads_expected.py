"""Loads in expectation, from formulas alone: for any number of samples and workers, in no time."""

from __future__ import annotations

import math

import numpy as np

from dshuffle.planning.cost.cluster import Amounts, Cluster
from dshuffle.planning.cost.expected_packets import HolderSets, expected_packets
from dshuffle.planning.cost.job import CHUNKS, Work
from dshuffle.planning.cost.loads import CHECKSUM_NBYTES, Loads, nothing

RING_WAITS = 1.6
"""How much longer rings take than links that are never idle: rounds wait for each other. Fitted to measurements with 8
workers: 1.3 and 1.4 at cache fractions of 0.2 and 0.35, 1.9 at 0.5; 1.6 with more samples at 0.5."""

MANY_TRIALS = 10_000
"""Groups a worker from which on the luckiest and the unluckiest are nearly alike."""


def needed_rows(work: Work, n_workers: int) -> float:
    """Samples that some worker is to train on and does not hold (U of DESIGN's table), on average.

    References
    ----------
    Paper 000, Theorem 1 (equation 1): ``q - s`` for a fresh draw over all samples, whatever the excess, since a
    worker holds any sample with probability s/q. ``partial:Q`` sends ``Q q`` samples to others than their owners
    (paper 004, Algorithm 1, here without fixed points), who hold each with the probability of the excess.

    Examples
    --------
    >>> needed_rows(Work(1000, 8, cache_fraction=0.5), 10), needed_rows(Work(1000, 8, assignment="partial:0.1"), 10)
    (500.0, 100.0)
    """
    if n_workers == 1 or work.kind == "local":
        return 0.0
    if work.kind == "partial":
        return work.fraction * work.n_samples * (1 - work.excess(n_workers))
    return work.fraction * work.n_samples * (1 - work.alpha(n_workers))


def chunks_hit(n_samples: int, chunk_rows: int, n_rows: float) -> float:
    """Different chunks in which so many of all samples, drawn at random without repeats, stand on average.

    A chunk of c samples is missed with probability about ``(1 - r / q) ** c``.

    Examples
    --------
    >>> chunks_hit(6400, 64, 6400), round(chunks_hit(6400, 64, 100), 1), round(chunks_hit(6400, 1, 100), 1)
    (100.0, 63.5, 100.0)
    """
    part = n_rows / n_samples
    chunks = n_samples / chunk_rows if n_samples > chunk_rows else 1.0
    return float(chunks * -np.expm1(chunk_rows * np.log1p(-part))) if part < 1 else float(chunks)


def expected_loads(work: Work, cluster: Cluster) -> Loads:
    """What the work asks of every part of the cluster, if nobody has bad luck: all workers alike.

    References
    ----------
    DESIGN.md, "When coding pays": the bytes behind each line of its table. The packets are those of
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
    if work.delivery == "storage":
        return Loads(**loads | storage_loads(work, n, share))  # type: ignore[arg-type]
    loads["worker_in"] = share * row
    sizes = np.bincount(cluster.racks(), minlength=cluster.n_racks)
    if work.delivery == "peer":
        loads["worker_out"] = share * row
        loads |= _across(sizes, share[0] * row)
        return Loads(**loads)  # type: ignore[arg-type]
    packets = rows
    if work.coded:
        packets = expected_packets(work.delivery, HolderSets.of(work, n, rows))
        loads["encoded"] = rows * work.row_nbytes
        loads["decoded"] = share * work.row_nbytes * max(1.0, rows / packets)
    sent = packets if work.coded and work.relay != "unicast" else rows
    loads["packets"], loads["server_out"] = packets, sent * row
    loads["worker_out"] = (rows - sent) / n * row + np.zeros(n)
    if work.coded and work.relay == "ring":
        loads["passed_on"] = ring_bytes(rows, packets, n) * row
    relayed = _across(sizes, (rows - sent) / n * row)
    loads["rack_out"] = relayed["rack_out"]
    loads["rack_in"] = relayed["rack_in"] + sizes * (sent / n * row)  # the server stands in no rack
    return Loads(**loads)  # type: ignore[arg-type]


def ring_bytes(components: float, packets: float, n_workers: int) -> float:
    """Rows' worth of time that a ring's second stage takes on a link.

    If the rings of all groups kept all links busy, ``(U - P) / n``; with one group after the other, the theorem's
    ``P (m - 1) / m``. What was measured is between.

    References
    ----------
    Paper 000, Theorem 4 and DESIGN.md, "When coding pays": scatter then ring is ``P (2 m - 1) / m``, of which
    P is the scattering, for a single group of m workers.
    """
    if not components:
        return 0.0
    return min(RING_WAITS * (components - packets) / n_workers, packets * (1 - packets / components))


def storage_loads(work: Work, n_workers: int, share: np.ndarray) -> dict[str, object]:
    """Bytes and requests of the storage for ``(n,)`` rows that workers lack; each chunk is read once a worker.

    With ``chunks`` a worker needs whole groups of rows, of which it holds some: it skips one only if it holds all.
    """
    c, g = min(work.chunk_rows, work.n_samples), work.group_rows
    if work.kind == CHUNKS:
        part = _groups(work, n_workers) * (1 - work.excess(n_workers) ** g) * (g / work.n_samples)
        of_chunk = (c + g - math.gcd(g, c)) / g  # groups that have rows of a chunk: one, if groups are whole chunks
        hit = work.n_samples / c * (1 - (1 - np.minimum(1.0, part)) ** of_chunk)
    else:
        hit = np.array([chunks_hit(work.n_samples, c, rows) for rows in share.tolist()])
    return {
        "requests": hit,
        "read": hit * c * work.row_nbytes,
        "wanted": float(share.sum()) * work.row_nbytes,
    }


def _shares(work: Work, n_workers: int, rows: float) -> Amounts:
    """Rows that each worker lacks."""
    if work.kind != CHUNKS:
        return np.full(n_workers, rows / n_workers)
    groups = _groups(work, n_workers)
    shares: Amounts = groups * (rows / float(groups.sum()))
    return shares


def _groups(work: Work, n_workers: int) -> Amounts:
    """Groups of rows that are to come to each worker, of which some were of its share before."""
    groups = work.n_samples / work.group_rows
    absent = 1 - 1 / n_workers
    most = math.ceil(math.ceil(groups) / n_workers)
    busiest = math.ceil(groups) - (most - 1) * n_workers  # that have one more than others, or all
    lacks = (most - (np.arange(n_workers) >= busiest)) * (groups / math.ceil(groups) * absent)
    # All wait for the one that holds the fewest of its groups; the others have the rest.
    unlucky, others = min(_largest(most, absent, busiest), lacks.sum()), lacks[1:].sum()
    lacks[1:] *= (lacks.sum() - unlucky) / others if others else 1.0
    lacks[0] = unlucky
    return lacks.astype(np.float64)


def _largest(trials: int, chance: float, workers: int) -> float:
    """Expectation of the largest of some binomial numbers; of many trials their mean, where luck hardly matters."""
    if trials > MANY_TRIALS:
        return trials * chance
    if not chance:
        return 0.0
    counts = np.arange(trials)
    choices = np.concatenate([[0.0], np.log((trials - counts[:-1]) / (counts[:-1] + 1)).cumsum()])  # logarithms
    at_most = np.exp(choices + counts * math.log(chance) + (trials - counts) * math.log1p(-chance)).cumsum()
    return float((1 - np.minimum(1.0, at_most) ** workers).sum())


def _across(sizes: np.ndarray, each: float) -> dict[str, np.ndarray]:
    """What leaves and enters racks of some sizes if each worker sends so much, equally to all others."""
    n = int(sizes.sum())
    outside = each * sizes * ((n - sizes) / max(1, n - 1))
    return {"rack_out": outside, "rack_in": outside}
