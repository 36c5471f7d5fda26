"""Counters among Dask's Prometheus metrics, if prometheus_client is installed, and what a worker logs of its memory.

Dask counts the rows of partitions as unmanaged memory, because they are not results of tasks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from dshuffle.records import Measures
from dshuffle.runtime.messages import EpochExchange, TrainingTime
from dshuffle.units import human_bytes

logger = logging.getLogger("distributed.worker.dshuffle")
"""Dask shows what it logs on the dashboard and in ``Client.get_worker_logs``."""

COUNTED = {
    "epochs": "Epochs of all sessions",
    "exchange_seconds": "Time of exchanges",
    "waited_seconds": "Time that clients waited for exchanges",
    "sent_bytes": "Bytes of messages between workers",
    "store_bytes": "Bytes read from stores",
    "idle_seconds": "Time in which ranks waited until the slowest one had trained, summed over the ranks",
    "worker_exchanges": "Exchanges in which this worker took part",
    "worker_exchange_seconds": "Time of exchanges on this worker",
    "worker_sent_bytes": "Bytes of messages that this worker sent",
    "worker_received_bytes": "Bytes of messages that this worker received",
    "worker_store_bytes": "Bytes that this worker read from stores",
}
"""Name of each counter, and its description."""

_metrics: dict[str, Any] = {}
with contextlib.suppress(ImportError):
    from prometheus_client import Counter, Gauge

    _metrics |= {name: Counter(f"dshuffle_{name}", words) for name, words in COUNTED.items()}
    _ranks = Counter(
        "dshuffle_rank_training_seconds", "Time of the tasks of each rank, without waiting for others", ["rank"]
    )
    _partitions = Gauge("dshuffle_worker_partition_bytes", "Memory reserved for partitions and plans")


def _count(**amounts: float) -> None:
    if _metrics:
        for name, amount in amounts.items():
            _metrics[name].inc(max(0, amount))  # it refuses less


def count_exchange(exchange: EpochExchange) -> None:
    """Count an exchange of a session, and the training of the epoch before."""
    _count(
        epochs=1,
        exchange_seconds=exchange.exchange_seconds,
        waited_seconds=exchange.waited_seconds,
        sent_bytes=sum(exchange.measures.wire_received_bytes),
        store_bytes=exchange.measures.store_bytes,
    )
    count_training(exchange.training_before or ())


def count_training(ranks: Sequence[TrainingTime]) -> None:
    """Count the training of an epoch, rank by rank."""
    longest = max((rank.own for rank in ranks), default=0.0)
    _count(idle_seconds=sum(longest - rank.own for rank in ranks))
    if _metrics:
        for number, rank in enumerate(ranks):
            _ranks.labels(str(number)).inc(rank.own)


def count_measures(measures: Measures) -> None:
    """Count an exchange of this worker."""
    _count(
        worker_exchanges=1,
        worker_exchange_seconds=measures.watched_seconds,
        worker_sent_bytes=sum(measures.wire_sent_bytes) + measures.server_sent_bytes,
        worker_received_bytes=sum(measures.wire_received_bytes),
        worker_store_bytes=measures.store_bytes,
    )


def reserved(session_id: str, nbytes: int) -> None:
    """Note that a session reserves memory for a partition, or frees it if ``nbytes`` is negative."""
    if nbytes > 0:
        words = "reserves %s for its partition on this worker. Dask counts it as unmanaged memory."
        logger.info(f"dshuffle session %s {words}", session_id, human_bytes(nbytes))
    elif nbytes:
        logger.info("dshuffle session %s has freed its partition (%s).", session_id, human_bytes(-nbytes))
    if _metrics:
        _partitions.inc(nbytes)
