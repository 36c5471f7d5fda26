"""What the runs of one member share: its plans, as its exchange uses them, its rows and its endpoints."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from distributed import Worker
from numpy.typing import NDArray

from dshuffle.errors import CacheBudgetError, PlanError
from dshuffle.exchange.cache_partition import CachePartition, RowFile
from dshuffle.exchange.comms import BufferPool, DaskNetwork
from dshuffle.exchange.endpoints import Receiver, Sender
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.mailboxes import Inbox, Outbox
from dshuffle.exchange.messages import Flow, rows_per_message
from dshuffle.exchange.transports import MessageLimits, Transport, transport_of
from dshuffle.planning import SERVER, STORE, EpochPlanner, Remainder, ShuffleSpec, WorkerPart, get_delivery
from dshuffle.planning.planner import OwnPlanner, plans_own_parts
from dshuffle.planning.randomness import DRAW_VERSION
from dshuffle.rows import RowLayout
from dshuffle.runtime.memory import for_partition, partition_nbytes
from dshuffle.runtime.session_spec import SessionSpec
from dshuffle.runtime.worker.epoch_lock import EpochLock
from dshuffle.runtime.worker.loading import Loader, LocalRows, answer_limit
from dshuffle.runtime.worker.server_rows import ServerRows
from dshuffle.runtime.worker.store_reader import READING_COST, READING_NBYTES, StoreReader
from dshuffle.store import Dataset
from dshuffle.store.row_blocks import RowBlocks


@dataclass(frozen=True, slots=True)
class MemberExchange:
    """The parts of an epoch's plan that concern this process, and a summary of the plan.

    Parameters
    ----------
    transport
        What the participants of this process send and receive, and how.
    summary
        Values that participants report in their votes. The digest must be the same for all of them.
    shares
        Smallest and largest number of samples that a worker trains on.
    broadcast
        The samples that all workers train on.
    """

    transport: Transport
    summary: dict[str, int]
    seconds: float
    shares: tuple[int, int]
    broadcast: NDArray[np.int64]

    @classmethod
    def alone(
        cls, planner: OwnPlanner, epoch: int, layout: RowLayout, limits: MessageLimits, delivery: str
    ) -> MemberExchange:
        """Plan this rank's part of an epoch, and nothing else."""
        started = time.perf_counter()
        spec, own = planner.spec, planner.plan(epoch, delivery)
        rank = planner.rank
        expected = own.n_received
        summary = {
            "packets": expected,
            "needed": expected,
            "expected": expected,
            "arriving": expected - len(own.receives.get(STORE, ())),
            "leaving": own.n_sent,
            "digest": zlib.crc32(f"{DRAW_VERSION} {spec.n_samples} {spec.history} {spec.choices} {epoch}".encode()),
        }
        seconds = time.perf_counter() - started
        transport = _transport(spec, epoch, delivery)(spec, {rank: own}, None, layout, limits)
        return cls(transport.routed(), summary, seconds, planner.shares(epoch), own.own[:0])

    @classmethod
    def restoring(
        cls, planner: OwnPlanner | EpochPlanner, epoch: int, rank: int, layout: RowLayout, limits: MessageLimits
    ) -> MemberExchange:
        """Plan to read all that a rank holds in an epoch from the store."""
        if isinstance(planner, OwnPlanner):
            spec = dataclasses.replace(planner.spec, first_epoch=epoch)
            return cls.alone(OwnPlanner(spec, rank), epoch, layout, limits, spec.choices.delivery)
        started = time.perf_counter()
        made = planner.load(epoch)
        transport = Transport(planner.spec, {rank: made.for_worker(rank)}, made, layout, limits)
        seconds = time.perf_counter() - started
        return cls(transport, {}, seconds, made.shares, made.broadcast)

    @classmethod
    def make(
        cls,
        planner: EpochPlanner,
        epoch: int,
        participants: Sequence[int],
        layout: RowLayout,
        limits: MessageLimits,
        delivery: str,
    ) -> MemberExchange:
        """Plan the given epoch: the planner's next one, or one that it has just planned."""
        started = time.perf_counter()
        made = planner.current or planner.load()
        if made.epoch < epoch:
            made = planner.advance(delivery)
        elif epoch > planner.spec.first_epoch:  # an earlier call planned this epoch, perhaps for another delivery
            made = planner.again(epoch, delivery)
        if made.epoch != epoch:
            raise PlanError(f"epoch {epoch} was to be planned, but the planner is at epoch {made.epoch}")
        packets = made.packets
        parts = {participant: made.for_worker(participant) for participant in participants}
        transport = _transport(planner.spec, epoch, delivery)(planner.spec, parts, made, layout, limits).routed()
        summary = {
            "packets": packets.n_packets,
            "needed": made.n_needed,
            "expected": packets.n_components,
            "digest": made.digest(),
        }
        return cls(transport, summary, time.perf_counter() - started, made.shares, made.broadcast)

    @property
    def parts(self) -> Mapping[int, WorkerPart]:
        """Participant of this process -> its part of the plan."""
        return self.transport.parts

    def for_disk(self, n_free: int) -> MemberExchange:
        """The same exchange with rows in the order in which disks read them (:mod:`dshuffle.planning.epoch_plan`).

        ``n_free`` is the number of free slots of this worker.
        """
        return dataclasses.replace(self, transport=self.transport.for_disk(n_free))

    def with_messages(self, rate: float | None) -> MemberExchange:
        """The same exchange with its rows cut into messages, for links of a rate (bytes per second into a worker)."""
        return dataclasses.replace(self, transport=self.transport.with_messages(rate))

    def outgoing(self, participant: int) -> dict[int, Flow]:
        """Flows that a participant of this process sends, by destination."""
        return self.transport.messages.sends[participant][1]

    def incoming(self, rank: int) -> dict[int, Flow]:
        """Flows that the rank of this process receives, by sender."""
        return self.transport.messages.receives[rank][1]


def _transport(spec: ShuffleSpec, epoch: int, delivery: str) -> type[Transport]:
    """The transport of an epoch. All workers agree on it."""
    moves = epoch > spec.first_epoch and spec.choices.has_exchange(epoch)
    return transport_of(delivery) if moves else Transport


class Plans:
    """Plans of coming epochs. Each is made once, even if its exchange is retried.

    Parameters
    ----------
    layout, limits
        Layout of a row, and limits of messages.
    participants
        All participants of this process.
    """

    def __init__(
        self,
        planner: OwnPlanner | EpochPlanner,
        layout: RowLayout,
        limits: MessageLimits,
        participants: Sequence[int],
    ) -> None:
        self._planner = planner
        self._layout = layout
        self._limits = limits
        self._participants = participants
        self._loop = asyncio.get_running_loop()
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="dshuffle-plan")
        self._plans: dict[tuple[int, str], asyncio.Future[MemberExchange]] = {}

    def plan(self, epoch: int, delivery: str) -> asyncio.Future[MemberExchange]:
        """The plan of an epoch. If planning failed, another call tries again."""
        plan = self._plans.get((epoch, delivery))
        if plan is None or (plan.done() and plan.exception() is not None):
            plan = self._loop.run_in_executor(self.executor, self._make, epoch, delivery)
            self._plans[epoch, delivery] = plan
        return plan

    def restoring(self, epoch: int, rank: int) -> asyncio.Future[MemberExchange]:
        """A plan to read all that a rank holds in an epoch from the store."""
        return self._loop.run_in_executor(
            self.executor, MemberExchange.restoring, self._planner, epoch, rank, self._layout, self._limits
        )

    def forget(self, epoch: int) -> None:
        """Drop the plans of an epoch and of those before."""
        self._plans = {of: plan for of, plan in self._plans.items() if of[0] > epoch}

    def close(self) -> None:
        """Cancel all plans that have not been made."""
        for plan in self._plans.values():
            plan.cancel()
        self._plans.clear()
        self.executor.shutdown(wait=False, cancel_futures=True)

    def _make(self, epoch: int, delivery: str) -> MemberExchange:
        planner = self._planner
        if isinstance(planner, OwnPlanner):
            return MemberExchange.alone(planner, epoch, self._layout, self._limits, delivery)
        return MemberExchange.make(planner, epoch, self._participants, self._layout, self._limits, delivery)


def planner_of(shuffle: ShuffleSpec, deliveries: Sequence[str], rank: int | None) -> OwnPlanner | EpochPlanner:
    """The planner of a worker with a rank, or of one that only serves (None)."""
    if rank is not None and all(plans_own_parts(shuffle, delivery) for delivery in deliveries):
        return OwnPlanner(shuffle, rank)
    return EpochPlanner(shuffle)


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Objects that only a worker that trains has, not a dedicated server."""

    rank: int
    cache: CachePartition
    receiver: Receiver
    lock: EpochLock

    async def close(self) -> None:
        """Stop receiving, and free the rows that no task uses."""
        await self.receiver.close()
        self.lock.close()
        self.cache.close()


@dataclass(frozen=True, slots=True)
class MemberParts:
    """What the runs of a session on one worker share."""

    shuffle: ShuffleSpec
    start: Remainder
    deliveries: tuple[str, ...]
    dataset: Dataset
    plans: Plans
    senders: Mapping[int, Sender]
    training: TrainingState | None
    server_rows: ServerRows | None
    loads_server: bool
    loader: Loader
    reader: StoreReader

    async def close(self) -> None:
        """Free everything. Runs have ended, and so have the jobs that read or write rows."""
        for sender in self.senders.values():
            sender.close()
        self.reader.close()
        if self.training is not None:
            await self.training.close()
        if self.server_rows is not None:
            await asyncio.to_thread(self.server_rows.close)  # it waits for a read that is under way
        self.plans.close()
        self.dataset.close()


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
    """Build the parts of a session on one worker."""
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
        training = _training_state(spec, dataset, rank, carriers, report, own, file, budget)
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
    plans = Plans(planner_of(spec.shuffle, spec.deliveries, rank), layout, settings, list(senders))
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
    return TrainingState(rank, cache, receiver, lock)


def _server_rows(spec: SessionSpec, dataset: Dataset, budget: int | None) -> ServerRows:
    return ServerRows(
        dataset,
        budget=budget,
        window_bytes=spec.settings.window_bytes * spec.shuffle.n_workers,
        whole=get_delivery(spec.shuffle.choices.delivery).coded,
    )
