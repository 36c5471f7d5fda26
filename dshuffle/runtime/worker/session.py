"""One session on one worker: its cache partition, its part of every exchange, and the access of tasks to it.

All code here runs on the worker's event loop and returns quickly. Executors plan, pack, read and build indexes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import sys
import threading
import time
import zlib
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
from distributed import Worker
from distributed.protocol.serialize import to_serialize
from numpy.typing import NDArray

from dshuffle.errors import CacheBudgetError, DShuffleError, ExchangeError, PeerFailed
from dshuffle.exchange.cache_partition import CachePartition, Swap
from dshuffle.exchange.comms import BufferPool, DaskNetwork, Refusal, Reply, RowsReply, sent
from dshuffle.exchange.endpoints import JobQueue, Meter, Receiver, Sender, has_result
from dshuffle.exchange.kept_partition import PartitionOnDisk
from dshuffle.exchange.mailboxes import Inbox, MessageId, Outbox, rows_per_message
from dshuffle.exchange.transports import RowSink, RowSource, Transport, transport_of
from dshuffle.planning import SERVER, STORE, EpochPlan, EpochPlanner, ShuffleSpec, get_delivery, name_of
from dshuffle.planning.planner import OwnPlanner, plans_own_parts
from dshuffle.planning.randomness import DRAW_VERSION
from dshuffle.planning.remainder import SAME_BUILD, SampleDigest, due_in_an_epoch
from dshuffle.records import Measures
from dshuffle.rows import RowLayout
from dshuffle.runtime.collective import Collective
from dshuffle.runtime.dataset_inputs import for_workers
from dshuffle.runtime.messages import (
    Arrays,
    CommitReply,
    Counts,
    MemberState,
    OpenOrder,
    Report,
    TrainingTime,
    Vote,
    message_in,
    to_fields,
)
from dshuffle.runtime.partition import EpochLock, Partition, View
from dshuffle.runtime.process import ProcessorTimes, for_partition, partition_nbytes
from dshuffle.runtime.session_spec import SessionSpec
from dshuffle.runtime.settings import Settings
from dshuffle.runtime.worker.loading import (
    READING_COST,
    READING_NBYTES,
    Load,
    Loader,
    LocalRows,
    ServerRows,
    StoreReader,
    answer_limit,
    readers_of,
)
from dshuffle.store import Dataset
from dshuffle.store.places import is_local
from dshuffle.store.row_blocks import RowBlocks

logger = logging.getLogger(__name__)

RESTORE = "restore"
"""In place of a delivery: load the whole partition, for a rank whose worker was lost."""


class Planned(NamedTuple):
    """The parts of an epoch's plan that concern this process.

    ``summary`` is what participants report in their votes; the digest must be the same for all of them. ``shares`` are
    the smallest and the largest number of samples that a worker trains on, and ``broadcast`` those that all train on.
    """

    transport: Transport
    summary: dict[str, int]
    seconds: float
    shares: tuple[int, int]
    broadcast: NDArray[np.int64]


def planned(
    planner: OwnPlanner | EpochPlanner,
    epoch: int,
    delivery: str,
    participants: Sequence[int],
    layout: RowLayout,
    settings: Settings,
) -> Planned:
    """Plan an epoch: the planner's next one, one that it has just planned, or with :data:`RESTORE` any one."""
    started, spec, restores = time.perf_counter(), planner.spec, delivery == RESTORE
    made: EpochPlan | None = None
    if isinstance(planner, OwnPlanner):
        if restores:
            planner = OwnPlanner(dataclasses.replace(spec, first_epoch=epoch), planner.rank)
            delivery = spec.choices.delivery
        own = planner.plan(epoch, delivery)
        parts, shares, broadcast = {planner.rank: own}, planner.shares(epoch), own.own[:0]
        summary = dict.fromkeys(("packets", "needed", "expected"), own.n_received) | {
            "leaving": own.n_sent,
            "digest": zlib.crc32(f"{DRAW_VERSION} {spec.n_samples} {spec.history} {spec.choices} {epoch}".encode()),
        }
    else:
        made = planner.load(epoch) if restores else planner.current or planner.load()
        if made.epoch < epoch:
            made = planner.advance(delivery)
        elif epoch > spec.first_epoch and not restores:  # planned by an earlier call, perhaps for another delivery
            made = planner.again(epoch, delivery)
        parts = {participant: made.for_worker(participant) for participant in participants}
        shares, broadcast = made.shares, made.broadcast
        summary = {} if restores else {
            "packets": made.packets.n_packets,
            "needed": made.n_needed,
            "expected": made.packets.n_components,
            "digest": made.digest(),
        }  # fmt: skip
    moves = epoch > spec.first_epoch and spec.choices.has_exchange(epoch) and not restores
    kind = transport_of(delivery) if moves else Transport
    transport = kind(spec, parts, made, layout, settings.message_bytes, settings.window_bytes).routed()
    return Planned(transport, summary, time.perf_counter() - started, shares, broadcast)


class Training(NamedTuple):
    """Objects that only a worker that trains has, not a dedicated server."""

    rank: int
    cache: CachePartition
    receiver: Receiver


READS_AT_ONCE = 8
"""Blocks that are read at a time from a store whose answers take long, as far as memory allows."""

READS_FROM_DISK = 2
"""Blocks that are read at a time from a file system. With more, the first ones are there later."""


LOOK_EVERY = 0.1
"""Seconds between looks at whether rank 0 has left."""

BUSY_AFTER = 3.0
"""Seconds that a commit waits for tasks of the previous epoch before it says so. The scheduler then asks again."""


class MemberAddresses(dict[int, str]):
    """Address of each participant: of the ranks, and of the server."""

    closed = False

    async def until_left(self, participant: int, address: str) -> None:
        """Wait until a participant is not at an address any more, or the session is closed."""
        while not self.closed and self.get(participant) == address:
            await asyncio.sleep(LOOK_EVERY)


def as_participant(spec: SessionSpec, rank: int | None) -> dict[str, Any]:
    """The fields with which a worker reports to the scheduler."""
    return {"session_id": spec.session_id, "participant": SERVER if rank is None else rank}


class WorkerSession:
    """The state of one session on one worker.

    Orders of the scheduler may arrive twice, or after a later order. Those that are out of date change nothing.

    ``rank`` is None on a worker that only serves, and ``disk`` if rows are in memory. ``rows_here`` returns rows of
    other sessions on this worker. Threads are those of this session alone, so that none waits for reads of another one.
    """

    def __init__(
        self,
        worker: Worker,
        spec: SessionSpec,
        dataset: Dataset,
        rank: int | None,
        disk: PartitionOnDisk | None,
        rows_here: LocalRows,
    ) -> None:
        shuffle, settings, layout = spec.shuffle, spec.settings, dataset.layout
        self.spec = spec
        self.dataset = dataset
        self.rank = rank
        self.participant = SERVER if rank is None else rank
        self.epoch = shuffle.first_epoch - 1
        self.number = -1  # of the last order that set the members
        self.addresses = MemberAddresses(spec.addresses)
        self._worker = worker
        self._disk = disk
        self._run: ExchangeRun | None = None
        self._aborted: ExchangeRun | None = None
        self._last_run = 0
        self._committed: tuple[int, CommitReply] | None = None
        self._collective: Collective | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._cause: DShuffleError | None = None  # with which the session has ended
        self._closed = False

        in_chunks = shuffle.chunk_rows if shuffle.choices.assignment.in_chunks else 1
        blocks = RowBlocks(dataset, shuffle.n_workers, in_chunks)
        held = 0 if rank is None else partition_nbytes(shuffle, layout, on_disk=spec.options.on_disk, rank=rank)
        limit = worker.memory_manager.memory_limit
        largest = READING_COST * max(blocks.nbytes(one.first) for one in blocks.groups)
        if limit and largest > READING_NBYTES and held + largest > limit:
            raise CacheBudgetError(
                f"reading a chunk takes {largest} bytes beside a partition of {held} bytes; the worker's memory limit "
                f"is {limit} bytes. Use workers with more memory, or copy the dataset with a smaller chunk_rows"
            )
        budget, serves = for_partition(shuffle, spec.memory_limit), spec.addresses.get(SERVER) == worker.address
        cache: CachePartition | None = None
        if rank is not None:
            capacity, incoming = shuffle.room(rank)
            file = None if disk is None else disk.file
            cache = CachePartition(layout, capacity=capacity, incoming=incoming, file=file)
        self.server_rows: ServerRows | None = None
        if serves:
            self.server_rows = ServerRows(
                dataset,
                budget=None if budget is None else budget - held,  # training and serving share it
                window_bytes=settings.window_bytes * shuffle.n_workers,
                whole=get_delivery(shuffle.choices.delivery).coded,
            )
        self.jobs = JobQueue(2, "dshuffle")
        self.reading = JobQueue(READS_FROM_DISK if is_local(dataset.url) else READS_AT_ONCE, "dshuffle-read")
        self.planning = ThreadPoolExecutor(1, thread_name_prefix="dshuffle-plan")
        self._network = network = DaskNetwork(
            worker,
            spec.session_id,
            self.addresses,
            serve_here=self.serve,
            acknowledge_here=self.acknowledge,
            shares_memory=settings.shared_memory,
        )
        window, full = settings.window, rows_per_message(layout.nbytes, settings.message_bytes)
        self.senders = {
            of: Sender(Outbox(of, window=window), BufferPool(layout, full, window), network, self.jobs)
            for of in ([] if rank is None else [rank]) + [SERVER] * serves
        }
        self.training: Training | None = None
        if rank is not None and cache is not None:
            receiver = Receiver(
                Inbox(rank, window=window),
                network,
                self.jobs,
                timeout=settings.timeout,
                open_gate=self.senders[rank].open_gate,
            )
            self.training = Training(rank, cache, receiver)
        self.lock = EpochLock(self.participant, shuffle.choices.seed, asyncio.get_running_loop())
        self.reader = StoreReader(blocks, self.reading, self.jobs, answer_limit(settings))
        self.loader = Loader(worker, spec, dataset, blocks, self.jobs, self.reading, self.reader, rows_here)
        self._planner: OwnPlanner | EpochPlanner
        if rank is not None and all(plans_own_parts(shuffle, delivery) for delivery in spec.deliveries):
            self._planner = OwnPlanner(shuffle, rank)
        else:
            self._planner = EpochPlanner(shuffle)
        self._plans: dict[tuple[int, str], asyncio.Future[Planned]] = {}

    @property
    def is_loading(self) -> bool:
        """Whether the partition is still being filled for the first time."""
        return self.epoch < self.spec.shuffle.first_epoch

    def partition(self, epoch: int) -> AbstractContextManager[Partition]:
        """The partition of an epoch, valid for one task. Called from the task's thread."""
        if self._cause is not None:
            raise self._cause.raised_by(f"the task of rank {self.rank} cannot run")
        return self.lock.partition(epoch)

    def take_training_time(self) -> TrainingTime:
        """Time of training in this session on this worker since the last call."""
        return self.lock.take_training_time()

    def trained(self, epoch: int) -> SampleDigest:
        """Digest of the samples of an epoch that tasks have said to be trained on."""
        return self.lock.trained(epoch)

    def status(self) -> MemberState:
        """The current run, the fraction of its rows that have arrived, and its vote if that is known."""
        run, training = self._run, self.training
        arrived = None if run is None or training is None else training.receiver.arrived
        epoch, vote = None if self.is_loading else self.epoch, None if run is None else run.vote
        return MemberState(open=True, epoch=epoch, run_id=self._last_run, arrived=arrived, vote=vote)

    def heard(self) -> dict[int, float] | None:
        """Participant -> seconds since bytes came from it, as far as it is known; None if no run is under way."""
        return None if self._run is None else self._network.heard()

    async def restore(self, order: OpenOrder) -> None:
        """Load the partition of an epoch, in place of a worker that was lost."""
        assert order.epoch is not None
        if self.rank is None:  # a server reads its rows when they are asked for
            await self.plan(order.epoch, RESTORE)
            self.epoch = order.epoch
            return
        self.epoch = order.epoch - 1
        self._run = run = ExchangeRun(self, 0, order.epoch, RESTORE, None, (), self._restoring(order))
        await run.start()
        assert run.vote is not None
        if run.vote.reason is not None:
            raise ExchangeError(run.vote.reason)
        assert run.prepared is not None
        if order.digest is not None and run.prepared.digest != order.digest:
            raise ExchangeError(
                f"this worker would train on other samples of epoch {order.epoch} than the worker that was lost. "
                + SAME_BUILD,
                transient=False,
            )
        await self.commit(0)

    def change_members(self, addresses: Mapping[int, str], number: int) -> None:
        """Use the addresses of workers that have taken lost ranks, unless a later order has been carried out."""
        if number > self.number:
            self.number = number
            self.addresses.update(addresses)

    async def go_on(self, addresses: Mapping[int, str], order: OpenOrder) -> None:
        """Drop the run that the others have given up while this worker did not answer, and refuse all earlier ones.

        It has its partition, so it needs nothing from those that load together now.
        """
        await self.abort(order.last_run)
        self.change_members(addresses, order.number)
        if self.rank in order.together.ranks and self.training is not None and not self._closed:
            self._spawn(self.loader.join(self._restoring(order), self.training.cache))

    def _restoring(self, order: OpenOrder) -> Load:
        """The load of ranks that are taken by other workers."""
        ranks, readers = order.together.ranks, order.together.readers
        return Load(f"restore {order.number}", self.participant, len(ranks), tuple(readers))

    def begin(self, run_id: int, epoch: int, delivery: str, rate: float | None) -> None:
        """Start an attempt at an epoch's exchange. The result on this worker is reported to the scheduler.

        ``rate`` is that of the workers' links in bytes per second, as far as it is known.
        """
        if run_id <= self._last_run:
            return
        if epoch != self.epoch + 1 or self._run is not None:
            raise ExchangeError(f"run {run_id} of epoch {epoch} cannot begin on a worker in epoch {self.epoch}")
        before, self._aborted = self._aborted, None
        self._last_run = run_id
        shuffle, serves, readers = self.spec.shuffle, self.spec.loads_server, readers_of(self.addresses)
        load: Load | None = None
        if epoch == shuffle.first_epoch:  # all participants take part in it
            alone = not (serves or shuffle.has_excess or shuffle.n_broadcast)
            load = Load(f"run {run_id}", self.participant, shuffle.n_workers + serves, readers, alone)
        self._run = run = ExchangeRun(self, run_id, epoch, delivery, rate, readers, load, before)
        self._spawn(self._carry_out(run))

    async def _carry_out(self, run: ExchangeRun) -> None:
        """Report whether this worker is ready. If that fails, the scheduler asks for the vote."""
        await run.start()
        if run is not self._run:
            return
        try:
            vote = {"run_id": run.run_id, "vote": to_fields(run.vote)}
            report = self._worker.scheduler.dshuffle_report(**as_participant(self.spec, self.rank), **vote)
            message_in(await report, type(None), "the scheduler")
        except (OSError, DShuffleError) as error:
            logger.warning("dshuffle: the vote on run %d did not reach the scheduler: %s", run.run_id, error)

    def plan_ahead(self, run_id: int, delivery: str) -> None:
        """Plan the next epoch, unless that was done; called when all participants are ready.

        The plan depends only on seeds. If planning fails, the epoch that needs the plan reports the error.
        """
        if self._run is not None and self._run.run_id == run_id:
            self.plan(self._run.epoch + 1, delivery)

    async def commit(self, run_id: int) -> CommitReply:
        """Swap to the prepared epoch once no task reads the current one."""
        if self._committed is not None and self._committed[0] == run_id:
            return self._committed[1]
        run, training = self._run, self.training
        if run is None or run.run_id != run_id or not run.ready:
            raise ExchangeError(f"run {run_id} cannot be committed: it is not ready here")
        started = time.perf_counter()
        install, prepared = functools.partial(self._install, run), run.prepared
        if training is not None and prepared is not None:
            try:
                await asyncio.wait_for(self.lock.swap(prepared.view, install), BUSY_AFTER)
            except TimeoutError:
                readers = self.lock.readers
                tasks = "task" if readers == 1 else "tasks"
                return CommitReply(busy=f"{readers} {tasks} of epoch {self.epoch} still running")
        else:
            install()
        if self._closed:
            raise ExchangeError(f"run {run_id} cannot be committed: the session was closed")
        if self._committed is None or self._committed[0] != run_id:  # else another call has waited, too
            report = run.report(time.perf_counter() - started, self.take_training_time())
            self._committed = run_id, CommitReply(report=report)
            run.forget()
            if self._disk is not None and training is not None:
                self._disk.keep(run.epoch, training.cache, self.jobs)
        return self._committed[1]

    def _install(self, run: ExchangeRun) -> bool:
        """Make the epoch of a run the current one, while no task reads the partition."""
        if self._run is not run:  # another call has done it, or the session was closed
            return False
        for sender in self.senders.values():
            sender.end()
        if self.training is not None and run.prepared is not None:
            self.training.receiver.commit()
            self.training.cache.commit(run.prepared.swap)
        self.reader.end_load()
        self._plans = {of: plan for of, plan in self._plans.items() if of[0] > run.epoch}
        self.epoch, self._run = run.epoch, None
        return True

    async def abort(self, run_id: int) -> None:
        """Abort a run. The worker stays on its epoch, and keeps the plan and the rows that have arrived."""
        self._last_run = max(self._last_run, run_id)  # the order to begin it may come later
        run = self._run
        if run is None or run.run_id > run_id:
            return
        await run.stop()
        self.reader.stop_load()
        if self._run is run:
            self._run, self._aborted = None, run

    async def end(self, cause: DShuffleError) -> None:
        """Abort the current run, and keep the partition as a source. Tasks that come later raise the cause."""
        self._cause = cause
        self.end_collective()
        self.addresses.closed = True  # nobody waits for rank 0 any more
        await self.abort(sys.maxsize)

    async def close(self, cause: DShuffleError | None = None) -> None:
        """Abort the current run and free everything. Tasks that come later raise the ``cause``, if there is one."""
        self._cause = self._cause or cause
        self.end_collective()
        self.addresses.closed = True
        if self._closed:
            return
        self._closed = True
        runs, self._run, self._aborted = (self._run, self._aborted), None, None
        for run in filter(None, runs):
            await run.stop()
            run.forget()
        for task in self._background:
            task.cancel()
        if self._disk is not None:
            await self._disk.settle()
        self.reader.close()  # so that its reads end soon
        await self.jobs.close()
        await self.reading.close()
        for sender in self.senders.values():
            sender.end(closes=True)
        if (training := self.training) is not None:
            await training.receiver.close()
            training.cache.close()  # tasks that run keep the rows
        self.lock.close()
        if self.server_rows is not None:
            await asyncio.to_thread(self.server_rows.close)  # it waits for a read that is under way
        for plan in self._plans.values():
            plan.cancel()
        self.planning.shutdown(wait=False, cancel_futures=True)
        self.dataset.close()
        if self._disk is not None:
            self._disk.close()
        self._network.close()

    async def bring(self, *rows: Any, recovers: bool, **state: Any) -> None:
        """Bring rows that no message has: all of a load, those of a delivery that reads the store, or lost ones.

        They are for the current run, which may go on with the rows of an aborted one.
        """
        run, training = self._run, self.training
        if run is None or training is None:
            raise ExchangeError("the run has ended")
        load = run.load
        if recovers:  # not one of many workers that need rows of the same chunks reads them by itself
            load = Load(f"recovery {run.run_id}", self.participant, 0, run.readers)
        elif load is None:
            load = Load(f"storage {run.run_id}", self.participant, 0, ())
        await self.loader.bring(load, training.cache, *rows, former=run.load is not None, **state)

    def plan(self, epoch: int, delivery: str) -> asyncio.Future[Planned]:
        """The plan of an epoch, made once, even if its exchange is retried. If planning failed, it is tried again."""
        plan = self._plans.get((epoch, delivery))
        if plan is None or (plan.done() and plan.exception() is not None):
            make = functools.partial(planned, self._planner, epoch, delivery, list(self.senders))
            loop = asyncio.get_running_loop()
            plan = loop.run_in_executor(self.planning, make, self.dataset.layout, self.spec.settings)
            self._plans[epoch, delivery] = plan
        return plan

    async def serve(self, message: MessageId, *, shared: bool = False) -> Reply:
        """Answer another participant's request for a message. ``shared``: it can map memory of this process."""
        sender = self.senders.get(message.sender)
        if sender is None or self._closed:
            return Refusal(f"{name_of(message.sender)} is not on this worker")
        return await sender.serve(message, shared=shared)

    def acknowledge(self, message: MessageId) -> None:
        """Note that another participant has received the message."""
        if (sender := self.senders.get(message.sender)) is not None:
            sender.acknowledged(message)

    async def rows_of(self, epoch: int, sample_ids: NDArray[np.int64]) -> RowsReply:
        """Rows of samples of this worker's partition, for a worker whose first partition has them."""
        if self.training is None or self.epoch != epoch:
            raise ExchangeError(f"there is no partition of epoch {epoch} on {self._worker.address}")
        rows, checksums = self.dataset.layout.empty(len(sample_ids)), np.empty(len(sample_ids), np.uint32)
        await self.jobs.run(self.training.cache.pack, sample_ids, rows, checksums, nbytes=rows.nbytes)
        return RowsReply(rows, checksums)

    async def send_block(self, load: str, owner: int, n_owners: int, block: int, numbers: NDArray[Any]) -> Arrays:
        """Rows of a block of the store, for another worker; or note which blocks it will ask for."""
        if block < 0:
            self.reader.announce(load, owner, n_owners, numbers.tolist())
            return Arrays()
        reply = await self.reader.rows(load, owner, block, numbers)
        self.reader.sent_bytes += reply.nbytes if isinstance(reply, RowsReply) else 0
        return Arrays(await sent(self._worker, reply))

    async def mean(self, number: int, *, values: NDArray[Any], **part: Any) -> Arrays:
        """Wait for the mean of the values of all ranks in a call of :meth:`dshuffle.Epoch.together`."""
        if self._cause is not None:  # the other ranks do not come any more
            raise self._cause.raised_by("there is no mean")
        return Arrays(mean=to_serialize(await self._call(number).mean(values=values, **part)))

    def fail_collective(self, number: int, reason: str, transient: bool = True) -> None:
        """Fail the ranks that wait for a mean."""
        self._call(number).fail(reason, transient=transient)

    def _call(self, number: int) -> Collective:
        """State of a call of ``together``, by its number. Calls that have ended are refused."""
        collective = self._collective
        if collective is None or collective.number < number:
            self.end_collective()
            self._collective = collective = Collective(number)
        elif collective.number > number:
            raise PeerFailed(f"call {number} of Epoch.together has ended: the ranks are at call {collective.number}")
        return collective

    def end_collective(self) -> None:
        """Fail all ranks that still wait in the last call of ``together``."""
        if self._collective is not None:
            self._collective.fail("the session has moved on to another call of Epoch.together, or was closed")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class Prepared(NamedTuple):
    """What a commit installs on a worker that trains, and what shows that all workers together train on every sample.

    ``digest`` is that of the samples in the view. ``due`` is the rank's part of the digest of all samples that are to
    be trained on; it does not depend on the draw.
    """

    swap: Swap
    view: View
    digest: SampleDigest
    due: SampleDigest


class Rows(NamedTuple):
    """What a run sends and receives on a worker that trains, and the next epoch with these rows."""

    source: asyncio.Future[RowSource]
    sink: asyncio.Future[RowSink]
    prepared: asyncio.Future[Prepared]


class ExchangeRun:
    """One attempt at an epoch's exchange.

    Parameters
    ----------
    delivery
        Its delivery, or :data:`RESTORE`.
    rate
        Rate of the workers' links in bytes per second, as far as it is known. Messages are cut for it.
    readers
        Addresses of the workers that read the store for others.
    load
        The load that all take part in; None if partitions are exchanged.
    before
        An aborted attempt at the same epoch. If its messages are the same, those that arrived are not requested again.
    """

    def __init__(
        self,
        session: WorkerSession,
        run_id: int,
        epoch: int,
        delivery: str,
        rate: float | None,
        readers: tuple[str, ...],
        load: Load | None = None,
        before: ExchangeRun | None = None,
    ) -> None:
        self.run_id = run_id
        self.epoch = epoch
        self.vote: Vote | None = None
        self._session = session
        self._delivery = delivery
        self._rate = rate
        self.readers = readers
        self.load = load
        self._before = before if before is not None and before._is_like(epoch, delivery, rate) else None
        self._made: tuple[Planned, Transport] | None = None  # the plan, and its rows cut into messages
        self._arrived: asyncio.Future[tuple[str | None, bool]] = asyncio.get_running_loop().create_future()
        self._rows: Rows | None = None
        self._loading: list[asyncio.Future[None]] = []  # what the server loads
        self._joining: list[asyncio.Future[None]] = []  # of what need not be loaded again; the vote does not wait
        self._ends = threading.Event()  # set so that nobody reads from the store any more
        self._traffic = session.dataset.traffic
        self._loaded = session.reader.sent_bytes, session.loader.received_bytes
        self._processors = ProcessorTimes.now()
        self._started = time.perf_counter()
        self._cpu_idle = self._watched_seconds = 0.0

    @property
    def ready(self) -> bool:
        """Whether all rows have arrived and the swap is prepared."""
        return self.vote is not None and self.vote.reason is None

    @property
    def prepared(self) -> Prepared | None:
        """What a commit installs, on a worker that trains."""
        return None if self._rows is None else self._rows.prepared.result()

    async def start(self) -> None:
        """Plan the epoch, send and receive, until the vote is known. Cancelled if the run is stopped."""
        try:
            reason, again = await self._exchange()
        except Exception as error:  # any error must be reported to the scheduler, or the epoch would never end
            logger.exception("dshuffle: run %d failed on this worker", self.run_id)
            again = error.transient if isinstance(error, DShuffleError) else isinstance(error, OSError)
            reason = f"{type(error).__name__}: {error}"
        self._cpu_idle = ProcessorTimes.now().idle_since(self._processors)
        self._watched_seconds = time.perf_counter() - self._started  # what comes later is not part of the exchange
        self.vote = Vote(reason=reason, again=again, counts=None if reason is not None else self._counts())

    async def stop(self) -> None:
        """Abort. Returns when nothing of this run can access the cache partition any more."""
        self._arrived.cancel()
        self._ends.set()  # otherwise reading from a slow store could continue for a long time
        for sender in self._session.senders.values():
            sender.end()
        if (training := self._session.training) is not None:
            await training.receiver.abort()
        if touching := [*(self._rows or ()), *self._loading, *self._joining]:
            await asyncio.wait(touching)  # they reserve slots, or write rows
        self._before = None

    def forget(self) -> None:
        """Drop the references to rows and packets, so that they do not outlive the run."""
        self._rows = self._before = None

    def received(self, reason: str | None, again: bool) -> None:
        """Note that everything has arrived, or that the receiver has given up; called by the receiver."""
        if not self._arrived.done():
            self._arrived.set_result((reason, again))

    async def _exchange(self) -> tuple[str | None, bool]:
        """Why this worker is not ready (None if it is), and whether another attempt may succeed."""
        session, loop = self._session, asyncio.get_running_loop()
        training, server_rows, load = session.training, session.server_rows, self.load
        before, self._before = self._before, None
        if before is None:
            plan = await session.plan(self.epoch, self._delivery)
            cache = None if training is None else training.cache
            transport = await loop.run_in_executor(None, plan.transport.with_messages, self._rate, cache)
        else:
            assert before._made is not None
            plan, transport = before._made
        self._made = plan, transport
        if self._arrived.cancelled():
            raise asyncio.CancelledError
        # The first messages are requested while the sources and sinks of their rows are still being prepared.
        served: asyncio.Future[RowSource] | None = None
        if server_rows is not None and self._delivery != RESTORE:
            if load is not None and session.spec.loads_server:
                bring = functools.partial(session.loader.bring, load._replace(owner=SERVER, alone=False))
                self._loading.append(asyncio.ensure_future(server_rows.load(bring, self._ends.is_set)))
            # In a separate thread: with a coded plan this waits until all rows have been read.
            served = loop.run_in_executor(None, transport.source, SERVER, server_rows)
            self._begin_sending(transport, SERVER, served)
        if training is not None:
            if before is None:
                rank, held, submit = training.rank, training.cache, session.planning.submit
                source = submit(transport.source, rank, held)
                sink = submit(lambda: transport.sink(rank, held, source.result(), session.bring))
                # The sink has reserved the slots by then, so the next index can be built while its rows arrive.
                prepared = submit(self._prepare, plan, transport)
                self._rows = Rows(*map(asyncio.wrap_future, (source, sink, prepared)))  # type: ignore[arg-type]
            else:
                self._rows = before._rows
                before.forget()
            assert self._rows is not None
            self._begin_sending(transport, training.rank, self._rows.source)
            if before is not None and load is not None and training.receiver.has_arrived(STORE):
                joins = session.loader.join(load, training.cache, self._ends.is_set)
                self._joining.append(asyncio.ensure_future(joins))
            training.receiver.begin(
                self.run_id,
                transport.messages.receives[training.rank][1],
                self._rows.sink,
                self.received,
                window=transport.messages.requests,
                resumed=before is not None,
                stop=self._ends.is_set,
            )
        for end in (*(self._rows or ()), *self._loading, *self._joining, served):
            if end is not None:
                end.add_done_callback(self._give_up)
        if training is None and served is not None:
            served.add_done_callback(lambda _: self.received(None, False))
        reason, again = await self._arrived
        for waits in (*(self._rows or ()), *self._loading) if reason is None else ():
            await asyncio.shield(waits)
        return reason, again

    def _give_up(self, end: asyncio.Future[Any]) -> None:
        """Let the run fail with an error."""
        error = None if end.cancelled() else end.exception()
        if error is not None and not self._arrived.done():
            self._arrived.set_exception(error)

    def _is_like(self, epoch: int, delivery: str, rate: float | None) -> bool:
        """Whether this run's messages are the same as those of another attempt, and its rows can be kept."""
        if self._made is None or (self.epoch, self._delivery, self._rate) != (epoch, delivery, rate):
            return False
        if self._session.training is None:
            return True
        rows = self._rows
        return rows is not None and all(has_result(future) for future in rows) and rows.sink.result().intact

    def _begin_sending(self, transport: Transport, participant: int, source: asyncio.Future[RowSource]) -> None:
        messages = transport.messages
        window, to_one = (participant == SERVER and messages.of_server) or (messages.answers, None)
        self._session.senders[participant].begin(
            self.run_id,
            messages.sends[participant][1],
            source,
            window=window,
            to_one=to_one,
            acknowledged=messages.acknowledged,
        )

    def _prepare(self, plan: Planned, transport: Transport) -> Prepared:
        """Prepare an epoch whose slots have been reserved."""
        session, training, spec = self._session, self._session.training, self._session.spec
        assert training is not None
        shuffle, start, rank, cache = spec.shuffle, spec.start, training.rank, training.cache
        mine, shares = transport.parts[rank], plan.shares
        swap = cache.prepare(mine.held)
        # Without excess, a worker holds exactly what it trains on, and the slots are already known.
        own = swap.index.slots if len(mine.own) == len(mine.held) else swap.index.find(mine.own)
        sample_ids, slots = mine.order, own[mine.permutation]
        due = due_in_an_epoch(shuffle, rank)
        if start.trained and start.epoch == self.epoch:

            def spec_for(n_workers: int) -> ShuffleSpec:
                return for_workers(shuffle, n_workers, session.dataset)

            keep, shares = start.left(shuffle, rank, spec_for)
            sample_ids, slots = sample_ids[keep], slots[keep]
            if rank == 0:
                due -= start.trained_digest(shuffle, spec_for)
        broadcast = plan.broadcast
        if len(broadcast):
            broadcast = broadcast[np.isin(broadcast, sample_ids)]
        make = functools.partial(
            Partition,
            cache.layout,
            cache.rows,
            slots,
            sample_ids,
            rank=rank,
            epoch=self.epoch,
            shares=shares,
            broadcast=broadcast,
            weights=shuffle.weights,
            unequal=shuffle.choices.shares.may_change,
            file=cache.file,
        )
        view = View(self.epoch, sample_ids, make)
        return Prepared(swap, view, SampleDigest.of(sample_ids, shuffle.choices.seed), due)

    def _counts(self) -> Counts | None:
        """What this worker has counted; None if it read its partition again, of which nothing is to be compared."""
        training, prepared = self._session.training, self.prepared
        if self._made is None or self._delivery == RESTORE:
            return None
        return Counts(
            **self._made[0].summary,
            rows=0 if training is None else training.receiver.meter.rows,
            drawn=None if prepared is None else prepared.digest,
            due=None if prepared is None else prepared.due,
        )

    def report(self, commit_seconds: float, training_time: TrainingTime) -> Report:
        """What was measured, once the exchange is committed."""
        assert self._made is not None
        session, training, (plan, transport) = self._session, self._session.training, self._made
        traffic = session.dataset.traffic - self._traffic
        senders = {participant: sender.meter for participant, sender in session.senders.items()}
        sent, server = senders.values(), senders.get(SERVER, Meter())
        meter = Meter() if training is None else training.receiver.meter
        read, loaded = session.reader.sent_bytes - self._loaded[0], session.loader.received_bytes - self._loaded[1]
        sent_bytes = sum(one.sent_bytes for one in sent) - server.sent_bytes
        measures = Measures(
            wire_sent_bytes=() if training is None else (sent_bytes + read,),
            wire_received_bytes=() if training is None else (meter.received_bytes + loaded,),
            server_sent_bytes=server.sent_bytes + (read if training is None else 0),
            metadata_bytes=sum(one.sent_checksum_bytes for one in sent),
            shared_memory_bytes=sum(one.shared_bytes for one in sent),
            recovered_rows=meter.recovered_rows,
            store_requests=traffic.requests,
            store_bytes=traffic.fetched_bytes,
            store_delivered_bytes=traffic.delivered_bytes,
            store_retries=traffic.retries,
            plan_seconds=plan.seconds,
            gather_seconds=sum(one.gather_seconds for one in sent),
            transfer_seconds=meter.transfer_seconds,
            scatter_seconds=meter.scatter_seconds,
            store_seconds=traffic.seconds,
            commit_seconds=commit_seconds,
            encode_seconds=server.gather_seconds * transport.encodes,
            decode_seconds=meter.scatter_seconds * transport.encodes,
            watched_seconds=self._watched_seconds,
            cpu_idle=self._cpu_idle,
        )
        return Report(
            measures=measures,
            training=training_time,
            held=0 if training is None else len(training.cache.index.sample_ids),
        )
