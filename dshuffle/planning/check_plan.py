"""Check that a plan delivers every needed sample exactly once."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_ranks
from dshuffle.errors import PlanError
from dshuffle.kernels import kernel
from dshuffle.planning.grouping import count_held, holds
from dshuffle.planning.holders import as_holders
from dshuffle.planning.packets import SERVER, STORE, Packets


def check_plan(
    plan: Packets, holders: ArrayLike, destinations: ArrayLike, n_workers: int, *, capacity: int | None = None
) -> None:
    """Raise an error unless a plan delivers every needed sample exactly once.

    A component may also deliver a sample to a worker that does not train on it, but only if the worker needs the
    sample to decode another packet. Leftover coding decodes in two such steps (Attia and Tandon, 2016).

    Parameters
    ----------
    plan
        Plan to check.
    holders
        ``(q, words)`` masks of the workers that hold each sample before the exchange.
    destinations
        ``(q,)`` integers, the worker that will train on each sample.
    capacity
        Maximum number of samples that a worker may hold or be assigned; None for no limit.

    Raises
    ------
    PlanError
        If the plan has a fault. The message names the first sample, worker and packet at fault.
    """
    masks = as_holders(holders, n_workers)
    ranks = as_ranks("destinations", destinations, n_workers)
    if len(masks) != len(ranks):
        raise PlanError(f"holders has {len(masks)} samples, but destinations has {len(ranks)}")
    if capacity is not None:
        _check_capacity("holds", count_held(masks, n_workers), capacity)
        _check_capacity("is assigned", np.bincount(ranks, minlength=n_workers), capacity)
    fault, packet, entry, other = _find_fault(
        plan.offsets, plan.samples, plan.destinations, plan.senders, masks, ranks, n_workers
    )
    if fault == _SOUND:
        return
    if fault == _MISSING:
        raise PlanError(f"sample {entry} is not delivered to worker {ranks[entry]}, which needs it")
    if fault == _SENDER_UNKNOWN:
        raise PlanError(
            f"packet {packet} is sent by {plan.senders[packet]}, which is neither a worker "
            f"in [0, {n_workers}) nor SERVER ({SERVER}) nor STORE ({STORE})"
        )
    sample, worker = int(plan.samples[entry]), int(plan.destinations[entry])
    text = _FAULTS[fault].format(
        sample=sample,
        worker=worker,
        packet=packet,
        sender=plan.senders[packet],
        other=other,
        q=len(ranks),
        n=n_workers,
    )
    raise PlanError(text)


def _check_capacity(verb: str, counts: NDArray[np.int64], capacity: int) -> None:
    worker = int(np.argmax(counts))
    if counts[worker] > capacity:
        raise PlanError(f"worker {worker} {verb} {counts[worker]} samples, over the capacity of {capacity}")


_SOUND, _MISSING, _SENDER_UNKNOWN, _OUT_OF_RANGE, _NO_WORKER, _TO_ITSELF, _SENDER_LACKS = range(7)
_HELD, _TWICE, _SAME_PACKET, _LACKS, _CIRCULAR, _NOT_WANTED = range(7, 13)

_FAULTS = {
    _OUT_OF_RANGE: "packet {packet} for worker {worker} has sample {sample}, which is not in [0, {q})",
    _NO_WORKER: "packet {packet} delivers sample {sample} to worker {worker}, which is not in [0, {n})",
    _TO_ITSELF: "packet {packet} with sample {sample} is sent by worker {worker} to itself",
    _SENDER_LACKS: "packet {packet} for worker {worker} has sample {sample}, which its sender {sender} does not hold",
    _HELD: "packet {packet} delivers sample {sample} to worker {worker}, which already holds it",
    _TWICE: "packet {packet} delivers sample {sample} to worker {worker} again, after packet {other}",
    _SAME_PACKET: "packet {packet} has samples {other} and {sample} for worker {worker}; it can decode only one",
    _LACKS: "worker {worker} cannot decode sample {sample} from packet {packet}: it lacks sample {other}",
    _CIRCULAR: (
        "worker {worker} cannot decode sample {sample} from packet {packet}: "
        "it needs sample {other} first, which it cannot decode earlier"
    ),
    _NOT_WANTED: (
        "packet {packet} delivers sample {sample} to worker {worker}, "
        "which neither trains on it nor needs it to decode another sample"
    ),
}


@kernel("(i8[::1], i8[::1], i4[::1], i4[::1], u8[:,::1], i4[::1], i8)")
def _find_fault(  # type: ignore[no-untyped-def]
    offsets, samples, destinations, senders, holders, wanted, n_workers
):
    """Return the first fault as (kind, packet, component, other sample or packet)."""
    q, n_packets, n_entries = wanted.size, senders.size, samples.size
    # The components of a sample form a linked list for looking up (sample, worker) pairs.
    last = np.full(q, -1, dtype=np.int64)
    before = np.empty(n_entries, dtype=np.int64)
    packet_of = np.empty(n_entries, dtype=np.int64)
    for p in range(n_packets):
        sender = senders[p]
        if sender >= n_workers or sender < STORE:
            return _SENDER_UNKNOWN, p, offsets[p], 0
        for e in range(offsets[p], offsets[p + 1]):
            j, d = samples[e], destinations[e]
            if j < 0 or j >= q:
                return _OUT_OF_RANGE, p, e, 0
            if d < 0 or d >= n_workers:
                return _NO_WORKER, p, e, 0
            if d == sender:
                return _TO_ITSELF, p, e, 0
            if sender >= 0 and not holds(holders, j, sender):
                return _SENDER_LACKS, p, e, 0
            if holds(holders, j, d):
                return _HELD, p, e, 0
            twin = _entry(j, d, last, before, destinations)
            if twin >= 0:
                return _TWICE, p, e, packet_of[twin]
            for i in range(offsets[p], e):
                if destinations[i] == d:
                    return _SAME_PACKET, p, e, samples[i]
            packet_of[e] = p
            before[e] = last[j]
            last[j] = e

    # A component is decoded once its destination has all other samples of the packet.
    decoded = np.zeros(n_entries, dtype=np.bool_)
    helps = np.zeros(n_entries, dtype=np.bool_)
    waiting = np.arange(n_entries)
    n_waiting = n_entries
    while n_waiting > 0:
        still = 0
        for w in range(n_waiting):
            e = waiting[w]
            p, d = packet_of[e], destinations[e]
            ready = True
            for i in range(offsets[p], offsets[p + 1]):
                if i == e or holds(holders, samples[i], d):
                    continue
                source = _entry(samples[i], d, last, before, destinations)
                if source < 0:
                    return _LACKS, p, e, samples[i]
                helps[source] = True
                ready = ready and decoded[source]
            decoded[e] = ready
            if not ready:
                waiting[still] = e
                still += 1
        if still == n_waiting:
            e = waiting[0]
            p, d = packet_of[e], destinations[e]
            for i in range(offsets[p], offsets[p + 1]):
                known = i == e or holds(holders, samples[i], d)
                if not known and not decoded[_entry(samples[i], d, last, before, destinations)]:
                    return _CIRCULAR, p, e, samples[i]
        n_waiting = still

    for e in range(n_entries):
        if destinations[e] != wanted[samples[e]] and not helps[e]:
            return _NOT_WANTED, packet_of[e], e, 0
    for j in range(q):
        if not holds(holders, j, wanted[j]) and _entry(j, wanted[j], last, before, destinations) < 0:
            return _MISSING, 0, j, 0
    return _SOUND, 0, 0, 0


@kernel()
def _entry(sample, worker, last, before, destinations):  # type: ignore[no-untyped-def]
    """Return the component that delivers ``sample`` to ``worker``, or -1."""
    e = last[sample]
    while e >= 0 and destinations[e] != worker:
        e = before[e]
    return e
