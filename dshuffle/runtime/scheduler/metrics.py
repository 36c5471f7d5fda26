"""Counters of all sessions, among the scheduler's Prometheus metrics if prometheus_client is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from dshuffle.runtime.messages import TrainingTime
from dshuffle.runtime.scheduler.snapshot import EpochFigures

COUNTED: dict[str, tuple[str, Callable[[EpochFigures], float]]] = {
    "dshuffle_epochs": ("Epochs of all sessions", lambda epoch: 1),
    "dshuffle_exchange_seconds": ("Time of exchanges", lambda epoch: epoch.exchange_seconds),
    "dshuffle_waited_seconds": ("Time that clients waited for exchanges", lambda epoch: epoch.waited_seconds),
    "dshuffle_sent_bytes": ("Bytes of messages between workers", lambda epoch: sum(epoch.received_bytes)),
    "dshuffle_store_bytes": ("Bytes read from stores", lambda epoch: epoch.store_bytes),
}
"""Name of each counter, its description, and what an epoch adds to it."""

RANK_TRAINING = "dshuffle_rank_training_seconds"
"""Name of the counter of training, which has a value for each rank."""

IDLE = "dshuffle_idle_seconds"
"""Name of the counter of the time in which ranks had nothing to do until the slowest one had trained."""

_counters: dict[str, Any] = {}
with contextlib.suppress(ImportError):
    from prometheus_client import Counter

    _counters |= {name: Counter(name, words) for name, (words, _) in COUNTED.items()}
    _rank_training: Any = Counter(RANK_TRAINING, "Time of the tasks of each rank, without waiting for others", ["rank"])
    _idle: Any = Counter(IDLE, "Time in which ranks waited until the slowest one had trained, summed over the ranks")


def count(epoch: EpochFigures) -> None:
    """Add an epoch to the counters. Without prometheus_client this does nothing."""
    for name, counter in _counters.items():
        counter.inc(max(0, COUNTED[name][1](epoch)))  # it refuses less


def count_training(ranks: Sequence[TrainingTime]) -> None:
    """Add the training of an epoch, rank by rank. Without prometheus_client this does nothing."""
    if not _counters or not ranks:
        return
    longest = max(rank.own for rank in ranks)
    for number, rank in enumerate(ranks):
        _rank_training.labels(str(number)).inc(rank.own)
    _idle.inc(sum(longest - rank.own for rank in ranks))
