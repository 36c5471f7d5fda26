"""Build what a session has on one worker: its cache partition, the ends of its exchanges, its plans."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from distributed import Worker

from dshuffle.errors import CacheBudgetError
from dshuffle.exchange.buffers import BufferPool
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.comms import DaskNetwork
from dshuffle.exchange.forwarder import Forwarder
from dshuffle.exchange.inbox import Inbox
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.messages import rows_per_message
from dshuffle.exchange.outbox import Outbox
from dshuffle.exchange.receiver import Receiver
from dshuffle.exchange.row_file import RowFile
from dshuffle.exchange.sender import Sender
from dshuffle.exchange.transports import transport_of
from dshuffle.planning import SERVER, STORE, get_delivery
from dshuffle.planning.packets import FORWARDER, forwarder_of
from dshuffle.runtime.memory import for_partition, partition_nbytes
from dshuffle.runtime.session_spec import SessionSpec
from dshuffle.runtime.worker.epoch_lock import EpochLock
from dshuffle.runtime.worker.loading import Loader, LocalRows, answer_limit
from dshuffle.runtime.worker.member_parts import MemberParts, TrainingState
from dshuffle.runtime.worker.plans import Plans, planner_of
from dshuffle.runtime.worker.server_rows import ServerRows
from dshuffle.runtime.worker.store_reader import READING_COST, READING_NBYTES, StoreReader
from dshuffle.store import Dataset
from dshuffle.store.row_blocks import RowBlocks

EndOfRun = Callable[[int, str | None, bool], None]
"""Called with the number of a run, why it has failed (None if it has not), and whether another one may succeed."""


@dataclass(frozen=True, slots=True)
class Carriers:
    """What carries the messages of one session, and runs its jobs.

    Each session has threads of its own, so that none waits for the reads of another one.
    """

    network: DaskNetwork
    jobs: JobQueue
    reading: JobQueue

    async def finish_jobs(self) -> None:
        """Wait for the jobs that run, and end the threads."""
        await self.jobs.close()
        await self.reading.close()


def build_parts(
    worker: Worker,
    spec: SessionSpec,
    dataset: Dataset,
    rank: int | None,
    carriers: Carriers,
    report: EndOfRun,
    file: RowFile | None,
    rows_here: LocalRows | None,
) -> MemberParts:
    """Build the parts of a session on one worker.

    Parameters
    ----------
    worker, spec, dataset, rank, rows_here
        As for :class:`~dshuffle.runtime.worker.session.WorkerSession`.
    carriers
        Network and threads of the session.
    report
        Called when a run has received all rows, or has failed.
    file
        The file for the rows; ``None`` to keep them in memory.
    """
    in_chunks = spec.shuffle.chunk_rows if spec.shuffle.choices.assignment.in_chunks else 1
    blocks = RowBlocks(dataset, spec.shuffle.n_workers, in_chunks)
    _check_reading(worker, spec, blocks, rank)
    layout, settings = dataset.layout, spec.settings
    senders: dict[int, Sender] = {}

    def add_sender(participant: int) -> Sender:
        full = rows_per_message(layout.nbytes, settings.message_bytes)
        buffers = BufferPool(layout, full, settings.window)
        outbox = Outbox(participant, window=settings.window)
        senders[participant] = Sender(outbox, buffers, carriers.network, carriers.jobs)
        return senders[participant]

    budget = for_partition(spec.shuffle, spec.memory_limit)
    training: TrainingState | None = None
    if rank is not None:
        own = add_sender(rank)
        forwarder = None
        if any(transport_of(delivery).forwards for delivery in spec.deliveries):
            sender = add_sender(forwarder_of(rank))
            forwarder = Forwarder(forwarder_of(rank), sender, carriers.network, carriers.jobs, timeout=settings.timeout)
        training = _training_state(spec, dataset, rank, carriers, report, own, forwarder, file, budget)
    server_rows = None
    if spec.addresses.get(SERVER) == worker.address:
        if budget is not None and training is not None:  # training and serving share the budget
            budget -= partition_nbytes(spec.shuffle, layout, on_disk=spec.options.on_disk, rank=rank)
        try:
            server_rows = _server_rows(spec, dataset, budget)
        except BaseException:
            if training is not None:
                training.lock.close()
                training.cache.close()
            raise
        add_sender(SERVER)
    reader = StoreReader(blocks, carriers.reading, carriers.jobs, answer_limit(settings))
    loader = Loader(
        worker,
        spec.session_id,
        dataset,
        blocks,
        settings,
        carriers.jobs,
        carriers.reading,
        reader,
        spec.former,
        rows_here,
    )
    planned = [participant for participant in senders if participant > FORWARDER]
    plans = Plans(planner_of(spec.shuffle, spec.deliveries, rank), layout, settings, planned)
    shuffle, start, deliveries = spec.shuffle, spec.start, spec.deliveries
    return MemberParts(
        shuffle, start, deliveries, dataset, plans, senders, training, server_rows, spec.loads_server, loader, reader
    )


def _check_reading(worker: Worker, spec: SessionSpec, blocks: RowBlocks, rank: int | None) -> None:
    """Refuse a dataset whose chunks cannot be read beside the partition."""
    limit, nbytes = worker.memory_manager.memory_limit, blocks.largest_nbytes
    partition = 0
    if rank is not None:
        partition = partition_nbytes(spec.shuffle, spec.dataset.layout, on_disk=spec.options.on_disk, rank=rank)
    if limit and READING_COST * nbytes > READING_NBYTES and partition + READING_COST * nbytes > limit:
        raise CacheBudgetError(
            f"reading a chunk of {nbytes} bytes takes {READING_COST * nbytes} bytes; beside a partition of {partition} "
            f"bytes the worker's memory limit of {limit} bytes does not allow that. Use workers with more memory, or "
            "copy the dataset with a smaller chunk_rows"
        )


def _training_state(
    spec: SessionSpec,
    dataset: Dataset,
    rank: int,
    carriers: Carriers,
    report: EndOfRun,
    sender: Sender,
    forwarder: Forwarder | None,
    file: RowFile | None,
    budget: int | None,
) -> TrainingState:
    capacity, incoming = spec.shuffle.room(rank)
    cache = CachePartition(
        dataset.layout,
        capacity=capacity,
        incoming=incoming,
        budget=budget,
        file=file,
    )
    receiver = Receiver(
        Inbox(rank, window=spec.settings.window),
        carriers.network,
        carriers.jobs,
        store=STORE,
        report=report,
        timeout=spec.settings.timeout,
        open_gate=sender.open_gate,
    )
    loop = asyncio.get_running_loop()
    lock = EpochLock(dataset.layout, cache.rows, rank, spec.shuffle.choices.seed, loop, cache.file)
    return TrainingState(rank, cache, receiver, lock, forwarder)


def _server_rows(spec: SessionSpec, dataset: Dataset, budget: int | None) -> ServerRows:
    return ServerRows(
        dataset,
        budget=budget,
        window_bytes=spec.settings.window_bytes * spec.shuffle.n_workers,
        whole=get_delivery(spec.shuffle.choices.delivery).server_holds_all,
    )
