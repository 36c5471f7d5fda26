"""One session on one worker: its cache partition, its part of every exchange, and the access of tasks to it.

All code here runs on the worker's event loop and returns quickly. Executors plan, pack, read and build indexes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from distributed import Worker
from numpy.typing import NDArray

from dshuffle.errors import DShuffleError, ExchangeError, StaleEpoch
from dshuffle.exchange.comms import DaskNetwork, Refusal, Reply, RowsReply
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.kept_partition import KeptLabel
from dshuffle.exchange.messages import MessageId
from dshuffle.exchange.transports import transport_of
from dshuffle.kernels import load_kernels
from dshuffle.planning import SERVER, name_of
from dshuffle.planning.remainder import SAME_BUILD, SampleDigest
from dshuffle.runtime.dataset_inputs import with_data
from dshuffle.runtime.memory import WorkerMemory
from dshuffle.runtime.messages import CommitReply, MemberState, Together, TrainingTime
from dshuffle.runtime.partition import Partition
from dshuffle.runtime.process import MOST_IDLE, Timeline, count_measures, reserved
from dshuffle.runtime.session_spec import LOCAL, PartitionSources, SessionSpec
from dshuffle.runtime.worker.disk import KeptPartitions, PartitionOnDisk, kept_here, made_in_thread
from dshuffle.runtime.worker.loading import Load, LocalRows, readers_of
from dshuffle.runtime.worker.member_parts import Carriers, MemberParts, build_parts
from dshuffle.runtime.worker.reports import MemberAddresses, ReportSender, SignsOfLife
from dshuffle.runtime.worker.run import RESTORE, ExchangeRun
from dshuffle.runtime.worker.store_reader import StoreReader
from dshuffle.store import Dataset
from dshuffle.store.places import is_local

READS_AT_ONCE = 8
"""Blocks that are read at a time from a store whose answers take long, as far as memory allows."""

READS_FROM_DISK = 2
"""Blocks that are read at a time from a file system. With more, the first ones are there later."""

BUSY_AFTER = 3.0
"""Seconds that a commit waits for tasks of the previous epoch before it says so. The scheduler then asks again."""


class WorkerSession:
    """The state of one session on one worker.

    Orders of the scheduler may arrive twice, or after a later order. Those that are out of date change nothing.

    Parameters
    ----------
    dataset
        The session's dataset, open in this process.
    rank
        Rank of this worker, or ``None`` if it only serves.
    reports
        What this worker reports to the scheduler.
    disk
        Where the rows are on the worker's disk; ``None`` to keep them in memory.
    rows_here
        Returns rows of other sessions on this worker; needed if the first partition is read from former ones.
    """

    def __init__(
        self,
        worker: Worker,
        spec: SessionSpec,
        dataset: Dataset,
        rank: int | None,
        reports: ReportSender,
        disk: PartitionOnDisk | None = None,
        rows_here: LocalRows | None = None,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.epoch = spec.shuffle.first_epoch - 1
        self.number = -1  # of the last order that set the members
        self._worker = worker
        self._reports = reports
        self._disk = disk
        self._loop = asyncio.get_running_loop()
        self._run: ExchangeRun | None = None
        self._aborted: ExchangeRun | None = None
        self._last_run = 0
        self._committed: tuple[int, CommitReply] | None = None
        self._restored: asyncio.Future[str | None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._cause: DShuffleError | None = None  # with which the session has ended

        self.addresses = MemberAddresses(spec.addresses)
        network = DaskNetwork(
            worker,
            spec.session_id,
            self.addresses,
            serve_here=self.serve,
            acknowledge_here=self.acknowledge,
            shares_memory=spec.settings.shared_memory,
        )
        reads = READS_FROM_DISK if is_local(dataset.url) else READS_AT_ONCE
        self._carriers = Carriers(network, JobQueue(2, "dshuffle"), JobQueue(reads, "dshuffle-read"))
        file = None if disk is None else disk.file
        try:
            self._parts: MemberParts | None = build_parts(
                worker, spec, dataset, rank, self._carriers, self._received, file, rows_here
            )
        except BaseException:
            network.close()  # it has methods of this session
            raise

    @property
    def is_loading(self) -> bool:
        """Whether the partition is still being filled for the first time."""
        return self.epoch < self.spec.shuffle.first_epoch

    def partition(self, epoch: int) -> AbstractContextManager[Partition]:
        """The partition of an epoch, valid for one task. Called from the task's thread."""
        parts = self._parts
        if self._cause is not None:
            raise self._cause.raised_by(f"the task of rank {self.rank} cannot run")
        if parts is None or parts.training is None:
            raise StaleEpoch(
                f"session {self.spec.session_id} does not have a partition on this worker: it has been closed, or the "
                "worker only serves"
            )
        return parts.training.lock.partition(epoch)

    def take_training_time(self) -> TrainingTime:
        """Time of training in this session on this worker since the last call."""
        training = None if self._parts is None else self._parts.training
        return TrainingTime() if training is None else training.lock.take_training_time()

    def trained(self, epoch: int) -> SampleDigest:
        """Digest of the samples of an epoch that tasks have said to be trained on."""
        training = self._open_parts.training
        return SampleDigest() if training is None else training.lock.trained(epoch)

    def status(self) -> MemberState:
        """The current run, the fraction of its rows that have arrived, and its vote if that is known."""
        run, training = self._run, None if self._parts is None else self._parts.training
        arrived = None if run is None or training is None else training.receiver.arrived
        epoch, vote = None if self.is_loading else self.epoch, None if run is None else run.vote
        return MemberState(open=True, epoch=epoch, run_id=self._last_run, arrived=arrived, vote=vote)

    def heard(self) -> dict[int, float] | None:
        """Participant -> seconds since bytes came from it, as far as it is known; None if no run is under way.

        Requests for messages of these participants get more time.
        """
        if self._run is None or self._parts is None:
            return None
        ages = self._carriers.network.heard()
        if (training := self._parts.training) is not None:
            training.receiver.hear(ages)
        return ages

    async def restore(self, epoch: int, digest: SampleDigest | None, number: int, together: Together) -> None:
        """Load the partition of an epoch, in place of a worker that was lost."""
        if self.rank is None:  # a server reads its rows when they are asked for
            await self._open_parts.plans.restoring(epoch, SERVER)
            self.epoch = epoch
            return
        self.epoch = epoch - 1
        self._restored = self._loop.create_future()
        load = self._restoring(number, together)
        self._run = run = ExchangeRun(self._open_parts, 0, epoch, RESTORE, None, self._voted, (), load)
        self._spawn(run.start())
        reason = await self._restored
        self._restored = None
        if reason is not None:
            raise ExchangeError(reason)
        assert run.prepared is not None
        if digest is not None and run.prepared.digest != digest:
            raise ExchangeError(
                f"this worker would train on other samples of epoch {epoch} than the worker that was lost. "
                + SAME_BUILD,
                transient=False,
            )
        await self.commit(0)

    def change_members(self, addresses: Mapping[int, str], number: int) -> None:
        """Use the addresses of workers that have taken lost ranks, unless a later order has been carried out."""
        if number > self.number:
            self.number = number
            self.addresses.change(addresses)

    async def go_on(self, addresses: Mapping[int, str], number: int, last_run: int, together: Together) -> None:
        """Drop the run that the others have given up while this worker did not answer, and refuse all earlier ones.

        It has its partition, so it needs nothing from those that load together now.
        """
        await self.abort(last_run)
        self.change_members(addresses, number)
        parts = self._open_parts
        if self.rank in together.ranks and parts.training is not None:
            self._spawn(parts.loader.join(self._restoring(number, together), parts.training.cache))

    def _restoring(self, number: int, together: Together) -> Load:
        """The load of ranks that are taken by other workers, whose order has a number."""
        owner = SERVER if self.rank is None else self.rank
        return Load(f"restore {number}", owner, len(together.ranks), tuple(together.readers))

    def begin(self, run_id: int, epoch: int, delivery: str, rate: float | None) -> None:
        """Start an attempt at an epoch's exchange. The result on this worker is reported to the scheduler.

        ``rate`` is that of the workers' links in bytes per second, as far as it is known.
        """
        if run_id <= self._last_run:
            return
        if epoch != self.epoch + 1:
            raise ExchangeError(f"epoch {epoch} cannot be prepared on a worker whose next epoch is {self.epoch + 1}")
        if self._run is not None:
            raise ExchangeError(f"run {run_id} cannot begin: run {self._run.run_id} has not ended")
        before, self._aborted = self._aborted, None
        self._last_run = run_id
        readers = readers_of(self.addresses)
        load = self._first_load(run_id, readers) if epoch == self.spec.shuffle.first_epoch else None
        self._run = ExchangeRun(self._open_parts, run_id, epoch, delivery, rate, self._voted, readers, load, before)
        self._spawn(self._run.start())

    def _first_load(self, run_id: int, readers: tuple[str, ...]) -> Load:
        """The load of the first partitions, in which all participants take part."""
        shuffle, serves = self.spec.shuffle, self.spec.loads_server
        owner, n_owners = SERVER if self.rank is None else self.rank, shuffle.n_workers + serves
        alone = not (serves or shuffle.has_excess or shuffle.n_broadcast)
        return Load(f"run {run_id}", owner, n_owners, readers, alone)

    @property
    def reader(self) -> StoreReader:
        """What this worker reads of the store for all."""
        return self._open_parts.reader

    def plan_ahead(self, run_id: int, delivery: str) -> None:
        """Plan the next epoch, unless that was done; called when all participants are ready.

        The plan depends only on seeds. If planning fails, the epoch that needs the plan reports the error.
        """
        if self._run is not None and self._run.run_id == run_id:
            self._open_parts.plans.plan(self._run.epoch + 1, delivery)

    async def commit(self, run_id: int) -> CommitReply:
        """Swap to the prepared epoch once no task reads the current one."""
        if self._committed is not None and self._committed[0] == run_id:
            return self._committed[1]
        run, parts = self._run, self._open_parts
        if run is None or run.run_id != run_id or not run.ready:
            raise ExchangeError(f"run {run_id} cannot be committed: it is not ready here")
        started = time.perf_counter()

        def install() -> bool:
            if self._run is not run:  # another call has done it, or the session was closed
                return False
            for sender in parts.senders.values():
                sender.end()
            if parts.training is not None and run.prepared is not None:
                parts.training.receiver.commit(run_id)
                parts.training.cache.commit(run.prepared.swap)
            parts.reader.end_load()
            parts.plans.forget(run.epoch)
            self.epoch, self._run = run.epoch, None
            return True

        await run.settle()
        if parts.training is not None and run.prepared is not None:
            try:
                await asyncio.wait_for(parts.training.lock.swap(run.prepared.view, install), BUSY_AFTER)
            except TimeoutError:
                readers = parts.training.lock.readers
                tasks = "task" if readers == 1 else "tasks"
                return CommitReply(busy=f"{readers} {tasks} of epoch {self.epoch} still running")
        else:
            install()
        if self._parts is None:
            raise ExchangeError(f"run {run_id} cannot be committed: the session was closed")
        if self._committed is None or self._committed[0] != run_id:  # else another call has waited, too
            report = run.report(time.perf_counter() - started, self.take_training_time())
            count_measures(report.measures)
            self._committed = run_id, CommitReply(report=report)
            run.forget()
            self._carriers.network.close_idle(MOST_IDLE)
            if self._disk is not None and parts.training is not None:
                self._disk.keep(run.epoch, parts.training.cache, self._carriers.jobs)
        return self._committed[1]

    async def abort(self, run_id: int) -> None:
        """Abort a run. The worker stays on its epoch, and keeps the plan and the rows that have arrived."""
        self._last_run = max(self._last_run, run_id)  # the order to begin it may come later
        run = self._run
        if run is None or run.run_id > run_id:
            return
        await run.stop()
        if self._parts is not None:
            self._parts.reader.stop_load()
        if self._run is run:
            self._run, self._aborted = None, run

    async def end(self, cause: DShuffleError) -> None:
        """Abort the current run, and keep the partition as a source. Tasks that come later raise the cause."""
        self._cause = cause
        self.addresses.close()  # nobody waits for rank 0 any more
        await self.abort(sys.maxsize)

    async def close(self, cause: DShuffleError | None = None) -> None:
        """Abort the current run and free everything. Tasks that come later raise the ``cause``, if there is one."""
        self._cause = self._cause or cause
        parts, self._parts = self._parts, None
        self.addresses.close()
        if parts is None:
            return
        run, self._run = self._run, None
        if self._restored is not None and not self._restored.done():
            self._restored.set_result(f"session {self.spec.session_id} has been closed on this worker")
        if run is not None:
            await run.stop()
            run.forget()
        if self._aborted is not None:
            self._aborted.forget()
        self._aborted = None
        for task in self._background:
            task.cancel()
        if self._disk is not None:
            await self._disk.settle()
        parts.reader.close()  # so that its reads end soon
        await self._carriers.finish_jobs()
        await parts.close()
        if self._disk is not None:
            self._disk.close()
        self._carriers.network.close()

    async def serve(self, message: MessageId, *, shared: bool = False) -> Reply:
        """Answer another participant's request for a message. ``shared``: it can map memory of this process."""
        sender = None if self._parts is None else self._parts.senders.get(message.sender)
        if sender is None:
            return Refusal(f"{name_of(message.sender)} is not on this worker")
        return await sender.serve(message, shared=shared)

    def acknowledge(self, message: MessageId) -> None:
        """Note that another participant has received the message."""
        sender = None if self._parts is None else self._parts.senders.get(message.sender)
        if sender is not None:
            sender.acknowledged(message)

    async def rows_of(self, epoch: int, sample_ids: NDArray[np.int64]) -> RowsReply:
        """Rows of samples of this worker's partition, for a worker whose first partition has them."""
        training, layout = self._open_parts.training, self.spec.dataset.layout
        if training is None or self.epoch != epoch:
            raise ExchangeError(f"there is no partition of epoch {epoch} on {self._worker.address}")
        rows, checksums = layout.empty(len(sample_ids)), np.empty(len(sample_ids), np.uint32)
        await self._carriers.jobs.run(training.cache.pack, sample_ids, rows, checksums, nbytes=rows.nbytes)
        return RowsReply(rows, checksums)

    @property
    def _open_parts(self) -> MemberParts:
        if self._parts is None:
            raise ExchangeError(f"session {self.spec.session_id} has been closed on this worker")
        return self._parts

    def _received(self, run_id: int, reason: str | None, again: bool) -> None:
        if self._run is not None:
            self._run.received(run_id, reason, again)

    def _voted(self, run: ExchangeRun) -> None:
        if run is not self._run:
            return
        assert run.vote is not None
        if self._restored is not None:
            if not self._restored.done():
                self._restored.set_result(run.vote.reason)
        else:
            self._spawn(self._reports.send_vote(run.run_id, run.vote))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class ReservedMemory(Mapping[str, int]):
    """Session -> bytes of its partition."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._nbytes: dict[str, int] = {}

    def __getitem__(self, session_id: str) -> int:
        return self._nbytes[session_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nbytes)

    def __len__(self) -> int:
        return len(self._nbytes)

    def memory(self, loaded: Collection[str]) -> WorkerMemory:
        """The memory of the process, for a check that another partition fits."""
        manager = self._worker.memory_manager
        loading = sum(nbytes for session_id, nbytes in self._nbytes.items() if session_id not in loaded)
        return WorkerMemory(
            limit=manager.memory_limit,
            pause_fraction=manager.memory_pause_fraction or None,
            process_nbytes=self._worker.monitor.get_process_memory() + loading,
            reserved=dict(self._nbytes),
        )

    def reserve(self, session_id: str, nbytes: int) -> None:
        """Reserve the memory of a session."""
        self.release(session_id)  # of an opening that was cancelled
        self._nbytes[session_id] = nbytes
        reserved(session_id, nbytes)

    def release(self, session_id: str) -> None:
        """Free the memory of a session."""
        if (nbytes := self._nbytes.pop(session_id, None)) is not None:
            reserved(session_id, -nbytes)


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
    """Open a session whose memory has been reserved. If that fails, everything is freed, the memory as well."""
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
    kept_as, n_slots = spec.kept_as, sum(shuffle.room(rank))
    return KeptLabel(spec.dataset.identity, kept_as, spec.session_id, layout.nbytes, n_slots, shuffle.history, rank)


def _former(spec: SessionSpec, rank: int, epoch: int, address: str) -> PartitionSources | None:
    """Where the first partition of a worker that takes a rank is read from, except the dataset."""
    label, directory = _label(spec, rank), spec.options.cache_directory
    if spec.former is not None or label is None or directory is None:
        return spec.former
    return kept_here(directory, dataclasses.replace(label, epoch=epoch), address)
