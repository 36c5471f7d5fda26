"""``clique``: packets grown greedily around the samples with the fewest holders (our own scheme)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.planning.delivery.clique_cycles import find_cycles
from dshuffle.planning.delivery.clique_packing import pack_cliques
from dshuffle.planning.delivery.clique_pairs import pack_small_cliques
from dshuffle.planning.delivery.encoding_tables import Tables
from dshuffle.planning.delivery.packets_from_server import PacketsFromServer
from dshuffle.planning.delivery.plan_input import PlanInput
from dshuffle.planning.delivery.ubershuffle import plan_ubershuffle
from dshuffle.planning.packets import SERVER, Packets
from dshuffle.planning.types import Holders, Ranks, Samples

_FEW_SAMPLES = 20_000
_FEW_TABLES = 4096


def plan_clique(plan_input: PlanInput) -> Packets:
    """Plan few packets from the server, for any caches and any number of workers.

    If there are few samples or few sets of holders, this and ``ubershuffle`` both come close to the optimum. For such
    instances both are tried and the better plan is taken, so it never needs more packets than ``ubershuffle``. For
    larger ones this was observed, but is not guaranteed.

    Samples that remain alone in a packet are sent in cycles where possible, as in ``leftover``.

    Packets to start from, such as those that an ``aligned`` assignment was drawn with, are kept unchanged. Only the
    samples that they do not deliver are packed.

    Raises
    ------
    InvalidParameter
        If ``start`` delivers a sample twice, or one that is not needed.

    References
    ----------
    Chung et al. (2017); see docs/papers.md. The paper builds packets within the table of one set, and Algorithm 4
    fills gaps from tables of larger sets. We allow any clique as a packet: samples with different destinations, where
    every destination holds all samples but its own.
    """
    holders, destinations, n_workers = plan_input.holders, plan_input.destinations, plan_input.n_workers
    seed, start = plan_input.seed, plan_input.start
    rest = plan_input.missing_samples()
    if start is not None:
        rest = rest[_not_delivered(start, rest, destinations)]
    alternatives: list[tuple[Samples, Samples]] = []
    if n_workers <= 64:
        tables = Tables.of(holders[rest], destinations[rest], n_workers)
        members, offsets = pack_cliques(tables, n_workers, seed=seed)
        alternatives.append((rest[tables.samples[members]], offsets))
        if start is None and (len(rest) <= _FEW_SAMPLES or len(tables.masks) <= _FEW_TABLES):
            other = plan_ubershuffle(plan_input)
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


def _not_delivered(start: Packets, needed: Samples, destinations: Ranks) -> NDArray[np.bool_]:
    times = np.bincount(start.samples, minlength=len(destinations))
    ours = times[needed]
    if len(times) > len(destinations) or ours.sum() != start.n_components or ours.max(initial=0) > 1:
        raise InvalidParameter.because(
            "start",
            f"its {start.n_packets} packets deliver a sample twice or one that is not needed",
            "Give packets that deliver needed samples only, each once.",
        )
    missing: NDArray[np.bool_] = ours == 0
    return missing


def _with_cycles(samples: Samples, offsets: Samples, holders: Holders, destinations: Ranks, n_workers: int) -> Packets:
    """Return the plan of these packets, with packets of one sample combined in cycles where possible."""
    sizes = np.diff(offsets)
    alone = samples[offsets[:-1][sizes == 1]]
    members, cycles = find_cycles(holders[alone], destinations[alone].astype(np.int64), n_workers)
    members = alone[members]
    kept = (sizes > 1) | ~np.isin(samples[offsets[:-1]], members)
    samples = samples[np.repeat(kept, sizes)]
    # Each packet has a sample and the next one, which goes to the destination of the cycle's last sample.
    links = np.delete(np.arange(len(members)), cycles[1:] - 1)
    ends = np.repeat(destinations[members[cycles[1:] - 1]], np.diff(cycles) - 1)
    chained = np.stack([members[links], members[links + 1]], axis=1).ravel()
    receivers = np.stack([destinations[members[links]], ends], axis=1).ravel()
    return _plan(
        np.concatenate([sizes[kept], np.full(len(links), 2)]),
        np.concatenate([samples, chained]),
        np.concatenate([destinations[samples], receivers]),
    )


def _plan(sizes: Samples, samples: Samples, destinations: Ranks) -> Packets:
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Packets(offsets, samples, destinations, np.full(len(sizes), SERVER, dtype=np.int32))


class Clique(PacketsFromServer):
    """Packets grown around the samples with the fewest holders."""

    name = "clique"
    plan = staticmethod(plan_clique)


CLIQUE = Clique()
