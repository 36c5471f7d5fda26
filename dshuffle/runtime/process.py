"""What a process of a session uses: processors, open files, and what it says of them."""

from __future__ import annotations

import contextlib
import logging
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from dshuffle.records import Measures
from dshuffle.runtime.messages import EpochExchange, TrainingTime
from dshuffle.units import human_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Idle, total and stolen processor seconds of this host since it started, summed over all processors.

    Stolen time was used by other virtual machines.
    """

    idle: float
    total: float
    stolen: float = 0.0

    @classmethod
    def now(cls) -> ProcessorTimes:
        """Read the operating system's counters."""
        times = psutil.cpu_times()._asdict()
        waiting = times.get("iowait", 0.0)
        # Linux counts the time of guests twice: as guest time and as user time.
        total = sum(seconds for name, seconds in times.items() if not name.startswith("guest"))
        return cls(times["idle"] + waiting, total, times.get("steal", 0.0))

    @property
    def used(self) -> float:
        """Seconds that this host itself used its processors."""
        return self.total - self.idle - self.stolen

    def idle_since(self, before: ProcessorTimes) -> float:
        """Idle fraction of the time from ``before`` to now, in [0, 1]."""
        passed = self.total - before.total
        return min(1.0, max(0.0, (self.idle - before.idle) / passed)) if passed > 0 else 1.0


OWN_FILES = 64
"""Files that a worker needs beside its connections to other workers: those of Dask, kernels, and chunks being read."""

MOST_OUTGOING = 512
"""Connections that a worker opens to others at a time. Dask's pool of connections has this limit."""

MOST_IDLE = 256
"""Connections without a request that a worker keeps from one exchange to the next."""


def files_needed(connections: int) -> int:
    """Open files of a worker that exchanges messages with some others.

    Each pair of workers has a connection for the requests of either side.
    """
    return OWN_FILES + connections + min(connections, MOST_OUTGOING)


def raise_limit() -> int | None:
    """Raise the soft limit of this process to the hard one, and return it; None if there is none.

    The soft limit is often 1,024, because programs that call ``select`` cannot use more. Dask does not call it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # macOS refuses more than its kernel allows
            logger.debug("dshuffle: the limit of open files stays at %d: %s", soft, error)
        else:
            logger.debug("dshuffle: the limit of open files is raised from %d to %d", soft, hard)
            soft = hard
    return None if soft == resource.RLIM_INFINITY else soft


def too_few_files(limits: dict[str, int | None], connections: int) -> str:
    """What to do if some workers may not have enough open files; empty if all may."""
    needed = files_needed(connections)
    low = {address: limit for address, limit in limits.items() if limit is not None and limit < needed}
    if not low:
        return ""
    address, least = min(low.items(), key=lambda item: (item[1], item[0]))
    return (
        f"{len(low)} of {len(limits)} workers may have fewer than the {needed} open files that this session needs, "
        f"{address} only {least}. Raise the hard limit there (ulimit -Hn, or LimitNOFILE= of a systemd unit)"
    )


class Timeline:
    """Steps of a call, and the seconds of each.

    Parameters
    ----------
    call
        What the steps belong to.
    """

    def __init__(self, call: str) -> None:
        self.call = call
        self.steps: list[tuple[str, float]] = []
        self._began = time.perf_counter()

    def end_step(self, step: str) -> None:
        """Note that a step has ended, which began with the end of the one before."""
        now = time.perf_counter()
        self.steps.append((step, now - self._began))
        self._began = now

    def log(self) -> None:
        """Log all steps in a line."""
        text = ", ".join(f"{step} {seconds:.3f} s" for step, seconds in self.steps)
        logger.debug("dshuffle: %s: %s; %.3f s in all", self.call, text, sum(seconds for _, seconds in self.steps))


of_worker = logging.getLogger("distributed.worker.dshuffle")
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
        of_worker.info(f"dshuffle session %s {words}", session_id, human_bytes(nbytes))
    elif nbytes:
        of_worker.info("dshuffle session %s has freed its partition (%s).", session_id, human_bytes(-nbytes))
    if _metrics:
        _partitions.inc(nbytes)
