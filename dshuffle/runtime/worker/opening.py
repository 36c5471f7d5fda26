"""Open a session on a worker: its dataset, what earlier workers have kept on the disk, and its parts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from distributed import Worker

from dshuffle.exchange.kept_partition import KeptLabel
from dshuffle.exchange.transports import transport_of
from dshuffle.kernels import load_kernels
from dshuffle.planning import SERVER
from dshuffle.planning.sample_digest import SampleDigest
from dshuffle.runtime.dataset_inputs import with_data
from dshuffle.runtime.orders import Together
from dshuffle.runtime.session_options import LOCAL
from dshuffle.runtime.session_spec import PartitionSources, SessionSpec, base_id
from dshuffle.runtime.timeline import Timeline
from dshuffle.runtime.worker.disk import KeptPartitions, PartitionOnDisk, kept_here
from dshuffle.runtime.worker.loading import LocalRows
from dshuffle.runtime.worker.made_in_thread import made_in_thread
from dshuffle.runtime.worker.reports import ReportSender
from dshuffle.runtime.worker.reserved_memory import ReservedMemory
from dshuffle.runtime.worker.session import WorkerSession
from dshuffle.runtime.worker.signs_of_life import SignsOfLife
from dshuffle.store import Dataset

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What the sessions of a worker share."""

    worker: Worker
    executor: ThreadPoolExecutor
    reserved: ReservedMemory
    kept: KeptPartitions

    async def in_thread(self, call: Callable[..., T], *args: Any) -> T:
        """Call a function in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, call, *args)


def rank_on(address: str, spec: SessionSpec) -> int | None:
    """Rank of the worker with an address; None if it only serves."""
    ranks = (rank for rank, place in spec.addresses.items() if place == address and rank != SERVER)
    return next(ranks, None)


async def open_session(
    shared: SharedParts,
    spec: SessionSpec,
    rows_here: LocalRows,
    look: Callable[[], dict[int, float] | None],
    epoch: int | None,
    digest: SampleDigest | None,
    number: int,
    together: Together,
) -> tuple[WorkerSession, SignsOfLife]:
    """Open a session whose memory has been reserved. If that fails, everything is freed, the memory as well.

    Parameters
    ----------
    shared
        What the sessions of this worker share.
    spec
        The session.
    rows_here
        Returns rows of other sessions on this worker.
    look
        As for :class:`SignsOfLife`. They begin before the session is open.
    epoch, digest
        The epoch whose partition is read, and the digest of its samples if it is known. None for a first epoch that has
        not begun.
    number, together
        Number of the order, and who loads together with this worker.

    Raises
    ------
    CacheBudgetError, DatasetError, ExchangeError
        As for :meth:`.sessions.WorkerSessions.open`.
    """
    worker, threads, session_id = shared.worker, shared.executor, spec.session_id
    rank = rank_on(worker.address, spec)
    memory_limit = worker.memory_manager.memory_limit
    disk: PartitionOnDisk | None = None
    timeline = Timeline(f"the worker opens session {session_id}")
    async with contextlib.AsyncExitStack() as on_error:
        on_error.callback(shared.reserved.release, session_id)
        on_error.callback(shared.kept.close, session_id)
        reports = ReportSender(worker, session_id, SERVER if rank is None else rank, spec.secret)
        signs = SignsOfLife(reports, spec.settings.heartbeat, look)
        on_error.callback(signs.close)
        dataset = await made_in_thread(threads, spec.dataset.open, close=Dataset.close)
        on_error.callback(dataset.close)
        timeline.end_step("dataset opened")
        spec = spec.with_shuffle(await shared.in_thread(with_data, spec.shuffle, dataset))
        timeline.end_step("labels and shardings read")
        await shared.in_thread(load_kernels, *transport_of(spec.shuffle.choices.delivery).kernels)
        timeline.end_step("kernels loaded")
        if rank is not None and epoch is not None:
            former = await shared.in_thread(_former, spec, rank, epoch, worker.address)
            spec = spec if former is None else spec.with_former(former)
        if rank is not None and (directory := spec.options.cache_directory) is not None:
            directory = str(worker.local_directory) if directory == LOCAL else directory
            layout, n_slots = spec.dataset.layout, sum(spec.shuffle.room(rank))
            make = functools.partial(PartitionOnDisk, directory, layout, n_slots, memory_limit, _label(spec, rank))
            disk = await made_in_thread(threads, make, close=PartitionOnDisk.close)
            on_error.callback(disk.close)
        # Not earlier: what is open is not removed if there is no room on the disk for both.
        if spec.former is not None and spec.former.kept and (directory := spec.options.cache_directory) is not None:
            names = [name for address, name in spec.former.holders.values() if address == worker.address]
            layout = spec.dataset.layout
            await shared.kept.open(session_id, names, directory, layout, memory_limit, threads)
        session = WorkerSession(worker, spec, dataset, rank, reports, disk, rows_here)
        on_error.push_async_callback(session.close)
        if epoch is not None:
            await session.restore(epoch, digest, number, together)
            shared.kept.close(session_id)
            timeline.end_step("partition read")
        on_error.pop_all()
    timeline.log()
    return session, signs


def _label(spec: SessionSpec, rank: int) -> KeptLabel | None:
    """What the partition of a rank is of, if it outlives the session."""
    if spec.kept_as is None:
        return None
    shuffle, layout = spec.shuffle, spec.dataset.layout
    n_slots, session_id = sum(shuffle.room(rank)), base_id(spec.session_id)
    return KeptLabel(spec.dataset.identity, spec.kept_as, session_id, layout.nbytes, n_slots, shuffle.history, rank)


def _former(spec: SessionSpec, rank: int, epoch: int, address: str) -> PartitionSources | None:
    """Where the first partition of a worker that takes a rank is read from, except the dataset."""
    label, directory = _label(spec, rank), spec.options.cache_directory
    if spec.former is not None or label is None or directory is None:
        return spec.former
    return kept_here(directory, dataclasses.replace(label, epoch=epoch), address)
