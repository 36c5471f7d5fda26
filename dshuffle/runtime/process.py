"""What a process of a session uses: memory, processors, open files, and what it says of them."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from dshuffle.errors import CacheBudgetError
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.planning import ShuffleSpec, get_delivery
from dshuffle.planning.planner import plan_nbytes, plans_own_parts
from dshuffle.rows import RowLayout
from dshuffle.runtime.session_spec import SessionSpec


def check_budget(
    shuffle: ShuffleSpec, layout: RowLayout, limit: int | None, *, on_disk: bool = False, rank: int | None = None
) -> None:
    """Refuse a session whose cache partitions do not fit, or that of a rank. With ``on_disk``, rows do not count."""
    needed = member_nbytes(shuffle, layout, on_disk=on_disk, rank=rank)
    if limit is None or needed <= limit:
        return
    capacity, incoming = shuffle.room(rank)
    fewer_rows = "more workers" if shuffle.choices.cache_fraction is None else "a lower cache_fraction"
    raise CacheBudgetError(
        f"a cache partition needs {needed} bytes on each of {shuffle.n_workers} workers ({capacity} rows of "
        f"{layout.nbytes} bytes, room for {incoming} incoming ones, {_relayed(shuffle)} packets to pass on, "
        f"{_plan_nbytes(shuffle)} bytes of plans for all samples); memory_limit allows {limit} bytes. Use a larger "
        f"memory_limit, {fewer_rows}, or rows on a local disk (cache_directory)"
    )


def check_memory(
    spec: SessionSpec,
    rank: int | None,
    *,
    limit: int | None,
    pause_fraction: float | None,
    process_nbytes: int,
    reserved: Mapping[str, int],
) -> tuple[int | None, int]:
    """Check that a session fits a worker, and return its byte limit, if it has one, and the bytes of its partition.

    Parameters
    ----------
    rank
        Rank of the worker; None if it only serves.
    limit, pause_fraction
        Memory limit of the worker in bytes (None or 0 if there is none), and the fraction of it at which Dask pauses
        the worker; None if it does not.
    process_nbytes
        Bytes that the process takes, and will take for partitions that are still being filled.
    reserved
        Session -> bytes reserved for it.
    """
    layout, settings, on_disk = spec.dataset.layout, spec.settings, spec.options.on_disk
    allowed, room = spec.options.memory_limit, None
    if allowed is None and limit:
        allowed = max(0, int(settings.memory_fraction * limit) - sum(reserved.values()))
    if limit and pause_fraction is not None:
        room = max(0, int(limit * pause_fraction) - process_nbytes - settings.messages_nbytes)
    needed = 0 if rank is None else member_nbytes(spec.shuffle, layout, on_disk=on_disk, rank=rank)
    try:
        if rank is not None:
            check_budget(spec.shuffle, layout, allowed, on_disk=on_disk, rank=rank)
        if room is not None and needed > room:
            raise CacheBudgetError(
                f"a cache partition needs {needed} bytes, but this worker has room for {room}: Dask would pause it at "
                f"{pause_fraction:.0%} of its memory limit of {limit} bytes, its process takes {process_nbytes} bytes, "
                f"and messages take up to {settings.messages_nbytes}. Use more workers, workers with more memory, or a "
                "lower cache_fraction"
            )
    except CacheBudgetError as error:
        if not reserved:
            raise
        names = ", ".join(f"{session_id} ({nbytes} bytes)" for session_id, nbytes in reserved.items())
        words = f"{error}. Open sessions on this worker: {names}. Close sessions that are no longer used"
        raise CacheBudgetError(words) from None
    return min((each for each in (allowed, room) if each is not None), default=None), needed


def member_nbytes(shuffle: ShuffleSpec, layout: RowLayout, *, on_disk: bool = False, rank: int | None = None) -> int:
    """Maximum bytes of memory that a worker, or that of a rank, needs for its partition and its plans."""
    return partition_nbytes(shuffle, layout, on_disk=on_disk, rank=rank) + _plan_nbytes(shuffle)


def for_partition(shuffle: ShuffleSpec, limit: int | None) -> int | None:
    """What plans of all samples leave of a limit, for a partition or for the rows of a server."""
    return None if limit is None else max(0, limit - _plan_nbytes(shuffle))


def _plan_nbytes(shuffle: ShuffleSpec) -> int:
    # A worker's own part of a plan is small beside its rows, and is not counted.
    return 0 if plans_own_parts(shuffle, shuffle.choices.delivery) else plan_nbytes(shuffle)


def partition_nbytes(shuffle: ShuffleSpec, layout: RowLayout, *, on_disk: bool = False, rank: int | None = None) -> int:
    """Maximum bytes of memory that a worker needs for its rows, for incoming rows, and for what it passes on."""
    slots = CachePartition.nbytes_for(layout, sum(shuffle.room(rank)), on_disk=on_disk)
    return slots + CachePartition.nbytes_for(layout, _relayed(shuffle))


def _relayed(shuffle: ShuffleSpec) -> int:
    choices = shuffle.choices
    return get_delivery(choices.delivery).packets_passed_on(choices.relay, shuffle.max_incoming)


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Idle and total processor seconds of this host since it started, summed over all processors."""

    idle: float
    total: float

    @classmethod
    def now(cls) -> ProcessorTimes:
        """Read the operating system's counters."""
        times = psutil.cpu_times()._asdict()
        # Linux counts the time of guests twice: as guest time and as user time.
        total = sum(seconds for name, seconds in times.items() if not name.startswith("guest"))
        return cls(times["idle"] + times.get("iowait", 0.0), total)

    def idle_since(self, before: ProcessorTimes) -> float:
        """Idle fraction of the time from ``before`` to now, in [0, 1]."""
        passed = self.total - before.total
        return min(1.0, max(0.0, (self.idle - before.idle) / passed)) if passed > 0 else 1.0


OWN_FILES = 64
"""Files that a worker needs beside its connections to other workers: those of Dask, kernels, and chunks being read."""

MOST_OUTGOING = 512
"""Connections that a worker opens to others at a time. Dask's pool of connections has this limit."""


def files_needed(connections: int) -> int:
    """Open files of a worker that exchanges messages with some others.

    Each pair of workers has a connection for the requests of either side.
    """
    return OWN_FILES + connections + min(connections, MOST_OUTGOING)


def raise_limit() -> None:
    """Raise the soft limit of this process to the hard one.

    The soft limit is often 1,024, because programs that call ``select`` cannot use more. Dask does not call it.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # macOS refuses more than its kernel allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
