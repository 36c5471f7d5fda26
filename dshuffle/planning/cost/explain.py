"""Predictions in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dshuffle.planning.cost.cluster import Cluster
from dshuffle.planning.cost.prediction import PROCESSORS, Prediction

EQUALLY = 0.02
"""Times that differ by no more of themselves are called equal."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation in sentences."""

    verdict: str
    reason: str
    notes: tuple[str, ...]


def explain(
    cluster: Cluster,
    best: Prediction,
    instead: Prediction | None,
    whole_chunks: Prediction | None,
    single: Prediction | None,
    predictions: Sequence[Prediction],
) -> Advice:
    """Say what was found.

    Parameters
    ----------
    best, instead, whole_chunks
        As in :class:`~dshuffle.planning.cost.Recommendation`.
    single
        Re-reading with one sample a chunk.
    predictions
        Of all ways that were compared.
    """
    training = best.work.training_seconds
    took = seconds_of(best.exchange_seconds)
    if instead is not None:
        assert training is not None
        verdict = (
            f"Do not shuffle globally: the fastest way ({best.work.way}) takes {took} an epoch and training only "
            f"{seconds_of(training)}. Take {instead.work.way} ({seconds_of(instead.exchange_seconds)})."
        )
    elif best.work.delivery == "storage":
        verdict = f"Re-read from storage: {best.work.way} takes {took} an epoch."
    else:
        verdict = f"Take {best.work.way}: {took} an epoch."
    notes = []
    if training is not None and best.exchange_seconds <= training:
        notes.append(f"It is hidden behind {seconds_of(training)} of training.")
    elif training is not None:
        hidden = hidden_fraction(predictions, training)
        if hidden is not None and 0.001 <= hidden < 1:
            notes.append(f"Training hides an exchange of up to partial:{hidden:.2g}.")
        if instead is None:
            notes.append(f"It is longer than the {seconds_of(training)} of training, and makes epochs that long.")
    if whole_chunks is not None:
        notes.append(
            f"Moving whole chunks is {times(best.exchange_seconds, whole_chunks.exchange_seconds)} as fast "
            f"({whole_chunks.work.way}, {seconds_of(whole_chunks.exchange_seconds)}), but mixes less: rows of a chunk "
            "stay together."
        )
    if single is not None and best.work.delivery != "storage":
        faster = ", and be faster" if single.exchange_seconds < best.exchange_seconds else ""
        reading = seconds_of(single.exchange_seconds)
        notes.append(f"Were the dataset stored with one row a chunk, re-reading would take {reading}{faster}.")
    if best.bottleneck == PROCESSORS:
        links = max((seconds for name, seconds in best.resources if name != PROCESSORS), default=0.0)
        if links < dict(best.resources)[PROCESSORS] / 2:
            notes.append("Processors are its limit, not the network: more of them make it faster, faster links do not.")
        else:
            notes.append("Processors are as busy as the network: both would have to be faster.")
    return Advice(verdict, _reason(cluster, best, predictions), tuple(notes))


def hidden_fraction(predictions: Sequence[Prediction], training: float) -> float | None:
    """The largest Q of ``partial:Q`` whose exchange is no longer than training; None if none was predicted."""
    shares = [
        p for p in predictions if p.work.kind == "partial" and p.work.delivery != "storage" and p.exchange_seconds
    ]
    if not shares:
        return None
    fastest = min(shares, key=lambda p: p.exchange_seconds)
    return min(1.0, fastest.work.fraction * training / fastest.exchange_seconds)


def _reason(cluster: Cluster, best: Prediction, predictions: Sequence[Prediction]) -> str:
    sentences = [f"{best.work.delivery}: {_why(cluster, best)}"]
    others: dict[str, Prediction] = {}
    for p in predictions:
        if p.work.assignment in ("global", "aligned") and p.work.delivery != best.work.delivery:
            kind = "storage" if p.work.delivery == "storage" else "coded" if p.work.coded else p.work.delivery
            if not (best.work.coded and kind == "coded") and (
                kind not in others or p.exchange_seconds < others[kind].exchange_seconds
            ):
                others[kind] = p
    for other in sorted(others.values(), key=lambda p: p.exchange_seconds):
        ratio = times(other.exchange_seconds, best.exchange_seconds)
        about = abs(other.exchange_seconds / best.exchange_seconds - 1) < EQUALLY if best.exchange_seconds else False
        takes = "takes about as long" if about else f"would need {ratio} as long"
        sentences.append(f"{other.work.delivery} {takes}: {_why(cluster, other)}")
    return "; ".join(sentences) + "."


def _why(cluster: Cluster, p: Prediction) -> str:
    """Why a way takes as long as it does."""
    row = p.work.row_nbytes
    match p.bottleneck:
        case "":
            return "nothing has to move"
        case "worker ingress" if p.work.delivery == "storage":
            return f"every worker reads {bytes_of(p.most_ingress)}{_amplified(p)} over its link"
        case "worker ingress":
            rate = min(cluster.rates("link_down")) / (1 + cluster.wire_overhead)
            return f"every worker must receive {bytes_of(p.most_ingress)} at {bytes_of(rate)}/s whatever the code"
        case "worker egress":
            rate = min(cluster.rates("link_up")) / (1 + cluster.wire_overhead)
            return f"every worker sends {bytes_of(p.worker_egress / cluster.n_workers)} at {bytes_of(rate)}/s"
        case "server egress" | "scatter, then ring":
            rate = cluster.server_link / (1 + cluster.wire_overhead)
            coded = f", {p.needed / p.packets:.1f} rows in a packet" if p.packets < p.needed else ""
            return f"the server sends {bytes_of(p.server_egress)} at {bytes_of(rate)}/s{coded}"
        case "rack uplink":
            return f"the racks' uplinks are oversubscribed {cluster.oversubscription:g} times"
        case "storage":
            return f"the storage gives {bytes_of(p.storage_bytes)}{_amplified(p)} at {bytes_of(cluster.storage)}/s"
        case "storage for one worker":
            rate = bytes_of(cluster.storage_client)
            return f"every worker reads {bytes_of(p.storage_bytes / cluster.n_workers)}{_amplified(p)} at {rate}/s"
        case "storage requests":
            each = p.requests / cluster.n_workers
            return f"every worker makes {each:,.0f} requests, {cluster.requests_at_once} at a time"
    crossing = bytes_of(max(p.needed * row, p.storage_bytes))
    return f"processors are busy with {crossing} for {seconds_of(dict(p.resources)[PROCESSORS])}"


def _amplified(p: Prediction) -> str:
    return f" ({p.read_amplification:.3g} times what it needs)" if p.read_amplification > 1.05 else ""


def times(longer: float, shorter: float) -> str:
    """How many times: ``4.1 times``."""
    return f"{longer / shorter:.3g} times" if shorter else "many times"


def seconds_of(value: float) -> str:
    """Seconds in words, three figures."""
    return f"{value:.3g} s" if value >= 1 or not value else f"{1000 * value:.3g} ms"


def bytes_of(value: float | None) -> str:
    """Bytes in decimal units, three figures."""
    if not value:
        return "0 B"
    power = min(5, max(0, int(math.log10(value) // 3)))
    return f"{value / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"
