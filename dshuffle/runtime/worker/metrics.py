"""What a worker's partitions take and its exchanges move, in its log and among its Prometheus metrics.

Dask counts the rows of partitions as unmanaged memory, because they are not results of tasks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from dshuffle.records import Measures
from dshuffle.units import human_bytes

logger = logging.getLogger("distributed.worker.dshuffle")
"""Dask shows what it logs on the dashboard and in ``Client.get_worker_logs``."""

COUNTED: dict[str, tuple[str, Callable[[Measures], float]]] = {
    "dshuffle_worker_exchanges": ("Exchanges in which this worker took part", lambda measures: 1),
    "dshuffle_worker_exchange_seconds": ("Time of exchanges on this worker", lambda measures: measures.watched_seconds),
    "dshuffle_worker_sent_bytes": (
        "Bytes of messages that this worker sent",
        lambda measures: sum(measures.wire_sent_bytes) + measures.server_sent_bytes,
    ),
    "dshuffle_worker_received_bytes": (
        "Bytes of messages that this worker received",
        lambda measures: sum(measures.wire_received_bytes),
    ),
    "dshuffle_worker_store_bytes": ("Bytes that this worker read from stores", lambda measures: measures.store_bytes),
}
"""Name of each counter, its description, and what an exchange adds to it."""

_metrics: dict[str, Any] = {}
with contextlib.suppress(ImportError):
    from prometheus_client import Counter, Gauge

    _metrics |= {name: Counter(name, words) for name, (words, _) in COUNTED.items()}
    _metrics["partitions"] = Gauge("dshuffle_worker_partition_bytes", "Memory reserved for partitions and plans")


def count(measures: Measures) -> None:
    """Add an exchange to the counters. Without prometheus_client this does nothing."""
    for name, (_, amount) in COUNTED.items():
        if name in _metrics:
            _metrics[name].inc(max(0, amount(measures)))  # it refuses less


def reserved(session_id: str, nbytes: int) -> None:
    """Note that a session reserves memory for a partition."""
    if nbytes:
        logger.info(
            "dshuffle session %s reserves %s for its partition on this worker. Dask counts it as unmanaged memory.",
            session_id,
            human_bytes(nbytes),
        )
    _add(nbytes)


def released(session_id: str, nbytes: int) -> None:
    """Note that the memory of a partition is free again."""
    if nbytes:
        logger.info("dshuffle session %s has freed its partition (%s).", session_id, human_bytes(nbytes))
    _add(-nbytes)


def _add(nbytes: int) -> None:
    if "partitions" in _metrics:
        _metrics["partitions"].inc(nbytes)
