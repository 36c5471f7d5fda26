"""``clique``: packets grown greedily around the samples that are hardest to place (ours)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.planning.delivery.clique_cycles import find_cycles
from dshuffle.planning.delivery.clique_packing import pack_cliques
from dshuffle.planning.delivery.clique_pairs import pack_small_cliques
from dshuffle.planning.delivery.encoding_tables import Tables
from dshuffle.planning.delivery.ubershuffle import plan_ubershuffle
from dshuffle.planning.plan import SERVER, Plan, missing_samples
from dshuffle.planning.types import Holders, Ranks, Samples

_FEW_SAMPLES = 20_000
_FEW_TABLES = 4096


def plan_clique(holders: Holders, destinations: Ranks, n_workers: int, *, seed: int, start: Plan | None = None) -> Plan:
    """Few packets from the server, for any caches and any number of workers.

    Never more than ``ubershuffle`` needs: where both come close to what is possible, because the samples are few or
    have few sets of holders, both are tried. What stays alone goes around in cycles where it can, as in ``leftover``.

    Parameters
    ----------
    start
        Packets that are kept as they are, such as those that an ``aligned`` assignment was drawn with; only what they
        do not deliver is packed.

    Raises
    ------
    InvalidParameter
        If ``start`` delivers a sample that is not needed, or twice.

    References
    ----------
    Paper 000 builds packets within the tables of one set, and Algorithm 4 fills gaps from tables of larger sets. A
    packet may as well be any clique: samples with different destinations each of which is held by all others.
    """
    rest = missing_samples(holders, destinations)
    if start is not None:
        rest = rest[_not_delivered(start, rest, destinations)]
    alternatives: list[tuple[Samples, Samples]] = []
    if n_workers <= 64:
        tables = Tables.of(holders[rest], destinations[rest], n_workers)
        members, offsets = pack_cliques(tables, n_workers, seed=seed)
        alternatives.append((rest[tables.samples[members]], offsets))
        if start is None and (len(rest) <= _FEW_SAMPLES or len(tables.masks) <= _FEW_TABLES):
            other = plan_ubershuffle(holders, destinations, n_workers, seed=seed)
            alternatives.append((other.samples, other.offsets))
    else:
        members, offsets = pack_small_cliques(holders[rest], destinations[rest].astype(np.int64), n_workers, seed=seed)
        alternatives.append((rest[members], offsets))
    plans = [_with_cycles(*packets, holders, destinations, n_workers) for packets in alternatives]
    plan = min(plans, key=lambda each: each.n_packets)
    if start is None:
        return plan
    return _plan(
        np.concatenate([np.diff(start.offsets), np.diff(plan.offsets)]),
        np.concatenate([start.samples, plan.samples]),
        np.concatenate([start.destinations, plan.destinations]),
    )


def _not_delivered(start: Plan, needed: Samples, destinations: Ranks) -> NDArray[np.bool_]:
    times = np.bincount(start.samples, minlength=len(destinations))
    ours = times[needed]
    if len(times) > len(destinations) or ours.sum() != start.n_components or ours.max(initial=0) > 1:
        raise InvalidParameter.of(
            "start", f"{start.n_packets} packets", "a plan that delivers no sample twice and none that is not needed"
        )
    missing: NDArray[np.bool_] = ours == 0
    return missing


def _with_cycles(samples: Samples, offsets: Samples, holders: Holders, destinations: Ranks, n_workers: int) -> Plan:
    """The plan of these packets, those of one sample in cycles where there are any."""
    sizes = np.diff(offsets)
    alone = samples[offsets[:-1][sizes == 1]]
    members, cycles = find_cycles(holders[alone], destinations[alone].astype(np.int64), n_workers)
    members = alone[members]
    kept = (sizes > 1) | ~np.isin(samples[offsets[:-1]], members)
    samples = samples[np.repeat(kept, sizes)]
    # Around a cycle, every packet has a sample and the next, which goes to the destination of the cycle's last.
    links = np.delete(np.arange(len(members)), cycles[1:] - 1)
    ends = np.repeat(destinations[members[cycles[1:] - 1]], np.diff(cycles) - 1)
    chained = np.stack([members[links], members[links + 1]], axis=1).ravel()
    receivers = np.stack([destinations[members[links]], ends], axis=1).ravel()
    return _plan(
        np.concatenate([sizes[kept], np.full(len(links), 2)]),
        np.concatenate([samples, chained]),
        np.concatenate([destinations[samples], receivers]),
    )


def _plan(sizes: Samples, samples: Samples, destinations: Ranks) -> Plan:
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Plan(offsets, samples, destinations, np.full(len(sizes), SERVER, dtype=np.int32))
