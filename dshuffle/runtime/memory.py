"""Check that a cache partition fits a worker before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dshuffle.errors import CacheBudgetError, InvalidParameter
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.planning import ShuffleSpec, WorkerHistory, get_delivery
from dshuffle.planning.planner import plan_nbytes, plans_own_parts
from dshuffle.rows import RowLayout
from dshuffle.runtime.session_spec import SessionSpec


def check_budget(
    shuffle: ShuffleSpec, layout: RowLayout, limit: int | None, *, on_disk: bool = False, rank: int | None = None
) -> None:
    """Refuse a session whose cache partitions do not fit, or that of a rank. With ``on_disk``, rows do not count."""
    needed = member_nbytes(shuffle, layout, on_disk=on_disk, rank=rank)
    capacity, incoming = shuffle.room(rank)
    if limit is None or needed <= limit:
        return
    workers = None if on_disk else workers_that_fit(shuffle, layout, limit)
    if workers is None:
        way_out = "Raise memory_limit; more workers would not help"
        if shuffle.choices.cache_fraction is not None:
            way_out += f" with cache_fraction={shuffle.choices.cache_fraction}, but a lower cache_fraction may"
    else:
        way_out = f"Use {workers} workers, a memory_limit of {needed} bytes, or rows on a local disk (cache_directory)"
    relayed = ""
    if _relayed(shuffle):
        relayed = f", and for {_relayed(shuffle)} packets to pass on"
    planning = ""
    if plan := _plan_nbytes(shuffle):
        planning = f", and {plan} bytes for plans of all {shuffle.n_samples} samples"
    raise CacheBudgetError(
        f"a cache partition needs {needed} bytes on each of {shuffle.n_workers} workers ({capacity} rows of "
        f"{layout.nbytes} bytes and room for {incoming} incoming ones{relayed}{planning}); memory_limit "
        f"allows {limit} bytes. {way_out}"
    )


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """The memory of a worker process, and what open sessions have reserved of it.

    Parameters
    ----------
    limit
        Memory limit of the worker in bytes; ``None`` or 0 if there is none.
    pause_fraction
        Fraction of the limit at which Dask pauses the worker; ``None`` if it does not.
    process_nbytes
        Bytes that the process takes, and will take for partitions that are still being filled.
    reserved
        Session -> bytes reserved for it.
    """

    limit: int | None
    pause_fraction: float | None
    process_nbytes: int
    reserved: Mapping[str, int]

    def room(self, messages_nbytes: int) -> int | None:
        """Bytes that a partition may take without Dask pausing the worker; ``None`` if Dask does not.

        ``messages_nbytes`` are taken by messages.
        """
        if not self.limit or self.pause_fraction is None:
            return None
        allowed = int(self.limit * self.pause_fraction)
        return max(0, allowed - self.process_nbytes - messages_nbytes)

    def check(self, spec: SessionSpec, rank: int | None) -> tuple[int | None, int]:
        """Check that a session fits, and return its byte limit, if it has one, and the bytes of its partition.

        ``rank`` is None for a worker that only serves.
        """
        layout, settings = spec.dataset.layout, spec.settings
        user_limit, limit = spec.options.memory_limit, spec.options.memory_limit
        if user_limit is None and self.limit:
            limit = max(0, int(settings.memory_fraction * self.limit) - sum(self.reserved.values()))
        room = self.room(settings.messages_nbytes)
        on_disk = spec.options.on_disk
        needed = 0 if rank is None else member_nbytes(spec.shuffle, layout, on_disk=on_disk, rank=rank)
        if rank is not None:
            try:
                check_budget(spec.shuffle, layout, limit, on_disk=on_disk, rank=rank)
            except CacheBudgetError as error:
                if user_limit is not None or not self.reserved:
                    raise
                raise CacheBudgetError(f"{error}. {self._others()}") from None
            if room is not None and needed > room:
                raise CacheBudgetError(
                    f"a cache partition needs {needed} bytes, but this worker has room for {room}: Dask would pause it "
                    f"at {self.pause_fraction:.0%} of its memory limit of {self.limit} bytes, its process takes "
                    f"{self.process_nbytes} bytes, and messages take up to {settings.messages_nbytes}. Use more "
                    f"workers, workers with more memory, or a lower cache_fraction. {self._others()}".rstrip()
                )
        if room is not None:
            limit = room if limit is None else min(limit, room)
        return limit, needed

    def _others(self) -> str:
        if not self.reserved:
            return ""
        names = ", ".join(f"{session_id} ({nbytes} bytes)" for session_id, nbytes in self.reserved.items())
        return f"Open sessions on this worker: {names}. Close sessions that are no longer used"


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


def workers_that_fit(shuffle: ShuffleSpec, layout: RowLayout, limit: int) -> int | None:
    """Smallest number of workers whose partitions fit, or nearly so; None if there is no such number.

    More workers have smaller partitions, but plans of all samples have wider masks. So the number is doubled until it
    fits, and only then bisected.
    """

    def fits(n_workers: int) -> bool:
        try:
            resized = shuffle.with_history(WorkerHistory(n_workers), shuffle.first_epoch)
            return member_nbytes(resized, layout) <= limit
        except InvalidParameter:  # too few workers: the cache fraction must be at least 1/n
            return False

    low, most = shuffle.n_workers, shuffle.most_workers
    supported = get_delivery(shuffle.choices.delivery).most_workers
    if supported is not None:
        most = min(most, supported)
    high = low
    while not fits(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
