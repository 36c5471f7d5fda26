"""Explain predictions and recommendations in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dshuffle.planning.cost.cluster import ClusterRates
from dshuffle.planning.cost.prediction import FIXED, PROCESSORS, Prediction

EQUALLY = 0.02
"""Relative tolerance for equal times."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation in sentences."""

    verdict: str
    reason: str
    notes: tuple[str, ...]


def explain(
    cluster: ClusterRates,
    best: Prediction,
    instead: Prediction | None,
    whole_chunks: Prediction | None,
    single: Prediction | None,
    predictions: Sequence[Prediction],
) -> Advice:
    """Explain a recommendation.

    Parameters
    ----------
    best, instead, whole_chunks
        As in :class:`~dshuffle.planning.cost.Recommendation`.
    single
        Prediction for re-reading with one sample per chunk, if any.
    predictions
        Predictions for all ways compared.
    """
    training = best.work.training_seconds
    took = f"{seconds_of(best.exchange_seconds)} per {'epoch' if best.work.choices.every == 1 else 'exchange'}"
    if instead is not None:
        assert training is not None
        verdict = (
            f"Do not shuffle globally: the fastest way ({best.work.way}) takes {took}, but training takes "
            f"only {seconds_of(training)}. Use {instead.work.way} ({seconds_of(instead.exchange_seconds)})."
        )
    else:
        verdict = best.work.delivery.headline(best.work.way, took)
    notes = []
    if training is not None and best.exchange_seconds <= training:
        notes.append(f"The exchange is hidden behind {seconds_of(training)} of training.")
    elif training is not None:
        hidden = hidden_fraction(predictions, training)
        if hidden is not None and 0.001 <= hidden < 1:
            notes.append(f"Training can hide the exchange of up to partial:{hidden:.2g}.")
        if instead is None:
            notes.append(
                f"The exchange takes longer than training ({seconds_of(training)}), so epochs take "
                f"{seconds_of(best.epoch_seconds)}{'' if best.work.choices.every == 1 else ' on average'}."
            )
    if whole_chunks is not None:
        notes.append(
            f"Moving whole chunks is {times(best.exchange_seconds, whole_chunks.exchange_seconds)} as fast "
            f"({whole_chunks.work.way}, {seconds_of(whole_chunks.exchange_seconds)}), but mixes less, because the rows "
            "of a chunk stay together."
        )
    if single is not None and not best.storage_bytes:
        faster = ", and be faster" if single.exchange_seconds < best.exchange_seconds else ""
        reading = seconds_of(single.exchange_seconds)
        notes.append(f"With one row per chunk, re-reading would take {reading}{faster}.")
    if best.bottleneck == PROCESSORS:
        if best.wire_seconds < dict(best.resources)[PROCESSORS] / 2:
            notes.append("Processors are the bottleneck. More processors would make it faster; faster links would not.")
        else:
            notes.append("Processors are the bottleneck, followed by the network. Both would have to be faster.")
    return Advice(verdict, _reason(cluster, best, predictions), tuple(notes))


def hidden_fraction(predictions: Sequence[Prediction], training: float) -> float | None:
    """Estimate the largest Q such that training hides ``partial:Q``; None if no ``partial:Q`` was predicted."""
    shares = [p for p in predictions if exchanges_part(p) and p.exchange_seconds and not p.storage_bytes]
    if not shares:
        return None
    fastest = min(shares, key=lambda p: p.exchange_seconds)
    return min(1.0, fastest.work.fraction * training / fastest.exchange_seconds)


def exchanges_part(prediction: Prediction) -> bool:
    """Whether every worker exchanges a part of its samples, one by one."""
    assignment = prediction.work.choices.assignment
    return assignment.moves and not (assignment.redraws_all or assignment.in_chunks or assignment.needs_holders)


def _reason(cluster: ClusterRates, best: Prediction, predictions: Sequence[Prediction]) -> str:
    sentences = [f"{best.work.delivery.name}: {_why(cluster, best)}"]
    slower: dict[str, Prediction] = {}
    for p in predictions:
        family = p.work.delivery.family
        if not p.work.choices.assignment.redraws_all or family == best.work.delivery.family:
            continue
        if family not in slower or p.exchange_seconds < slower[family].exchange_seconds:
            slower[family] = p
    for other in sorted(slower.values(), key=lambda p: p.exchange_seconds):
        ratio = times(other.exchange_seconds, best.exchange_seconds)
        about = abs(other.exchange_seconds / best.exchange_seconds - 1) < EQUALLY if best.exchange_seconds else False
        takes = "takes about as long" if about else f"would take {ratio} as long"
        sentences.append(f"{other.work.delivery.name} {takes}: {_why(cluster, other)}")
    return "; ".join(sentences) + "."


def _why(cluster: ClusterRates, p: Prediction) -> str:
    """Explain what limits the speed of a way."""
    row = p.work.row_nbytes
    match p.bottleneck:
        case "":
            return "nothing has to move"
        case _ if p.bottleneck == FIXED:
            return f"{seconds_of(dict(p.resources)[FIXED])} are its fixed cost: the order, first messages, and votes"
        case "worker ingress":
            rate = min(cluster.rates("link_down")) / (1 + cluster.wire_overhead)
            return p.work.delivery.explain_ingress(bytes_of(p.most_ingress), _amplified(p), bytes_of(rate))
        case "worker egress":
            rate = min(cluster.rates("link_up")) / (1 + cluster.wire_overhead)
            return f"every worker sends {bytes_of(p.worker_egress / cluster.n_workers)} at {bytes_of(rate)}/s"
        case "server egress" | "scatter, then ring":
            rate = cluster.server_link / (1 + cluster.wire_overhead)
            coded = f", {p.needed / p.packets:.1f} rows per packet" if p.packets < p.needed else ""
            return f"the server sends {bytes_of(p.server_egress)} at {bytes_of(rate)}/s{coded}"
        case "storage":
            return f"the storage delivers {bytes_of(p.storage_bytes)}{_amplified(p)} at {bytes_of(cluster.storage)}/s"
        case "storage for one worker":
            rate = bytes_of(cluster.storage_client)
            return f"every worker reads {bytes_of(p.storage_bytes / cluster.n_workers)}{_amplified(p)} at {rate}/s"
        case "storage requests":
            each = p.requests / cluster.n_workers
            return f"every worker makes {each:,.0f} requests, {cluster.requests_at_once} at a time"
    crossing = bytes_of(max(p.needed * row, p.storage_bytes))
    return f"processors need {seconds_of(dict(p.resources)[PROCESSORS])} for {crossing}"


def _amplified(p: Prediction) -> str:
    return f" ({p.read_amplification:.3g} times what it needs)" if p.read_amplification > 1.05 else ""


def times(longer: float, shorter: float) -> str:
    """Format a ratio, for instance ``4.1 times``."""
    return f"{longer / shorter:.3g} times" if shorter else "many times"


def seconds_of(value: float) -> str:
    """Format a time in s or ms with three significant digits."""
    return f"{value:.3g} s" if value >= 1 or not value else f"{1000 * value:.3g} ms"


def bytes_of(value: float | None) -> str:
    """Format bytes in decimal units with three significant digits."""
    if not value:
        return "0 B"
    power = min(5, max(0, int(math.log10(value) // 3)))
    return f"{value / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"
