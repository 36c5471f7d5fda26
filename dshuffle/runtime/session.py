"""One session on one worker: its cache partition, its part of every exchange, and what tasks see of it.

Everything here runs on the worker's event loop and returns quickly; planning, packing, reading and index building
are handed to executors.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from distributed import Worker
from numpy.typing import NDArray

from dshuffle.errors import ExchangeError, StaleEpoch
from dshuffle.exchange.buffers import BufferPool
from dshuffle.exchange.cache import CachePartition, Swap
from dshuffle.exchange.comms import DaskNetwork
from dshuffle.exchange.driver import Receiver, Reply, Sender
from dshuffle.exchange.inbox import Inbox
from dshuffle.exchange.messages import Cut, MessageId
from dshuffle.exchange.outbox import Outbox
from dshuffle.planning import SERVER, STORE, EpochPlanner, WorkerPlan
from dshuffle.runtime.partition import Partition
from dshuffle.runtime.replies import unwrap
from dshuffle.runtime.server_rows import ServerRows
from dshuffle.runtime.spec import SessionSpec
from dshuffle.store import Dataset


@dataclass(frozen=True, slots=True)
class View:
    """What training sees of the committed epoch: its samples in order, and the slots that hold them."""

    epoch: int
    sample_ids: NDArray[np.int64]
    slots: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Planned:
    """The parts of an epoch's plan that concern this process, and what to say of the whole."""

    parts: dict[int, WorkerPlan]
    summary: dict[str, int]
    seconds: float


@dataclass(slots=True)
class Run:
    """One attempt at one epoch's exchange, as this worker sees it."""

    run_id: int
    epoch: int
    plan: WorkerPlan
    planned: Planned
    next_state: tuple[Swap, View] | None = None


class WorkerSession:
    """The state of one session on one worker.

    Parameters
    ----------
    worker
        The Dask worker.
    spec
        The session.
    dataset
        Its dataset, open in this process.
    rank
        This worker's rank, or ``None`` if it only serves.
    executor
        For packing, unpacking and reading.
    """

    def __init__(
        self,
        worker: Worker,
        spec: SessionSpec,
        dataset: Dataset,
        rank: int | None,
        executor: ThreadPoolExecutor,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.epoch = -1
        self._worker = worker
        self._executor = executor
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="dshuffle-plan")
        self._dataset = dataset
        self._planner = EpochPlanner(spec.plan, checks=rank == 0)  # all compare digests, so one check does
        self._planned: asyncio.Future[Planned] | None = None
        self._run: Run | None = None
        self._view: View | None = None
        self._gate = threading.Lock()
        self._readers = 0
        self._no_readers = asyncio.Event()
        self._no_readers.set()
        self._loop = asyncio.get_running_loop()
        self._training_seconds = 0.0
        self._traffic = self._dataset.traffic
        self._background: set[asyncio.Task[None]] = set()

        settings = spec.settings
        layout = self._dataset.layout
        cut = Cut.of(row_nbytes=layout.nbytes, message_bytes=settings.message_bytes)
        network = DaskNetwork(
            worker, spec.session_id, spec.addresses, serve_here=self.serve, acknowledge_here=self.acknowledge
        )

        def buffers() -> BufferPool:
            return BufferPool(layout, cut.rows_per_message, settings.window)

        self._senders: dict[int, Sender] = {}
        self._server_rows: ServerRows | None = None
        self._cache: CachePartition | None = None
        self._receiver: Receiver | None = None
        if rank is not None:
            self._cache = CachePartition(
                layout, capacity=spec.plan.capacity, incoming=spec.plan.max_incoming, budget=spec.memory_limit
            )
            self._senders[rank] = Sender(
                Outbox(rank, window=settings.window), self._cache, buffers(), cut, network, executor
            )
            self._receiver = Receiver(
                Inbox(rank, window=settings.window),
                self._cache,
                cut,
                network,
                executor,
                read_store=self._read_store,
                store=STORE,
                report=self._report,
                timeout=settings.timeout,
            )
        if spec.addresses.get(SERVER) == worker.address:
            self._server_rows = ServerRows(
                self._dataset,
                budget=spec.memory_limit,
                window_bytes=settings.window_bytes * spec.plan.n_workers,
            )
            self._senders[SERVER] = Sender(
                Outbox(SERVER, window=settings.window), self._server_rows, buffers(), cut, network, executor
            )

    @property
    def participant(self) -> int:
        """As what this worker votes: its rank, or the server."""
        return SERVER if self.rank is None else self.rank

    # -- the exchange ------------------------------------------------------------------------------------------

    async def begin(self, run_id: int, epoch: int) -> None:
        """Start an attempt at an epoch's exchange; the scheduler is told when it has succeeded or failed here."""
        if epoch != self.epoch + 1:
            raise ExchangeError(f"epoch {epoch} cannot be prepared on a worker that is on epoch {self.epoch}")
        if self._run is not None:
            raise ExchangeError(f"run {run_id} cannot begin: run {self._run.run_id} is under way")
        planned = await self._plan()
        mine = planned.parts[self.participant]
        self._run = Run(run_id, epoch, mine, planned)
        self._traffic = self._dataset.traffic
        for participant, sender in self._senders.items():
            sender.begin(run_id, planned.parts[participant].sends)
        if self._receiver is None or self._cache is None:
            self._report(run_id, None)
            return
        flows = [mine.receives[sender] for sender in mine.receives]
        incoming = np.concatenate([np.empty(0, np.int64), *flows])
        slots = await self._loop.run_in_executor(self._planning, self._cache.reserve, incoming)
        self._receiver.begin(run_id, mine.receives, slots)

    async def commit(self, run_id: int) -> Reply:
        """Swap to the epoch that has been prepared, once no task reads the present one.

        Returns
        -------
        dict
            What this worker measured of the exchange, and the training seconds of the epoch that ended.
        """
        run = self._run
        if run is None or run.run_id != run_id or (self._receiver is not None and run.next_state is None):
            raise ExchangeError(f"run {run_id} cannot be committed: it is not ready here")
        started = time.perf_counter()
        while not self._swap(run):
            await self._no_readers.wait()
        report = self._measures(run)
        report["commit_seconds"] = time.perf_counter() - started
        report["training_seconds"] = self.take_training_seconds()
        return report

    async def abort(self) -> None:
        """Give up the present run; this worker stays on its epoch, and on its plan for the next."""
        for sender in self._senders.values():
            sender.end()
        if self._receiver is not None:
            await self._receiver.abort()
        self._run = None

    async def close(self) -> None:
        """Drop everything."""
        await self.abort()
        if self._planned is not None:
            await asyncio.wait([self._planned])
        self._planning.shutdown(wait=False)
        if self._server_rows is not None:
            await self._loop.run_in_executor(None, self._server_rows.close)
        self._cache = self._receiver = self._server_rows = None
        self._senders = {}
        self._view = None

    async def serve(self, message: MessageId) -> Reply:
        """Reply to another participant's request for a message."""
        sender = self._senders.get(message.sender)
        if sender is None:
            return {
                "status": "refused",
                "reason": f"participant {message.sender} is not here",
                "again": False,
            }
        return await sender.serve(message)

    def acknowledge(self, message: MessageId) -> None:
        """Another participant has the message."""
        sender = self._senders.get(message.sender)
        if sender is not None:
            sender.acknowledged(message)

    def _plan(self) -> asyncio.Future[Planned]:
        """The plan for the next epoch, made once however often its exchange is tried."""
        if self._planned is None:
            self._planned = self._loop.run_in_executor(self._planning, self._make_plan)
        return self._planned

    def _make_plan(self) -> Planned:
        started = time.perf_counter()
        plan = self._planner.load() if self.epoch < 0 else self._planner.advance()
        parts = {participant: plan.for_worker(participant) for participant in self._senders}
        summary = {
            "packets": plan.plan.n_packets,
            "needed": plan.n_needed,
            "expected": plan.plan.n_components,
            "digest": plan.digest(),
        }
        return Planned(parts, summary, time.perf_counter() - started)

    def _read_store(self, sample_ids: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        assert self._cache is not None
        self._dataset.read_into(self._cache.rows, slots, sample_ids)
        self._cache.seal(sample_ids, slots)

    def _report(self, run_id: int, reason: str | None) -> None:
        task = self._loop.create_task(self._tell_scheduler(run_id, reason))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _tell_scheduler(self, run_id: int, reason: str | None) -> None:
        run = self._run
        if run is None or run.run_id != run_id:
            return
        if reason is None and self._cache is not None:
            try:
                run.next_state = await self._loop.run_in_executor(self._planning, self._prepare, run)
            except ExchangeError as error:
                reason = f"the rows that arrived are not those of the plan: {error}"
        rows = self._receiver.meter.rows if self._receiver is not None else 0
        reply = await self._worker.scheduler.dshuffle_report(
            session_id=self.spec.session_id,
            run_id=run_id,
            participant=self.participant,
            rows=rows,
            reason=reason,
            **run.planned.summary,
        )
        unwrap(reply, "the scheduler")

    def _prepare(self, run: Run) -> tuple[Swap, View]:
        assert self._cache is not None
        swap = self._cache.prepare(run.plan.held)
        slots = swap.index.find(run.plan.own)[run.plan.permutation]
        return swap, View(run.epoch, run.plan.order, slots)

    def _measures(self, run: Run) -> Reply:
        traffic = self._dataset.traffic - self._traffic
        senders = list(self._senders.items())
        report: Reply = {
            "plan_seconds": run.planned.seconds,
            "gather_seconds": sum(sender.meter.gather_seconds for _, sender in senders),
            "sent_bytes": sum(sender.meter.sent_bytes for who, sender in senders if who != SERVER),
            "server_sent_bytes": sum(sender.meter.sent_bytes for who, sender in senders if who == SERVER),
            "received_bytes": 0,
            "transfer_seconds": 0.0,
            "scatter_seconds": 0.0,
            "store_requests": traffic.requests,
            "store_bytes": traffic.fetched_bytes,
            "store_delivered_bytes": traffic.delivered_bytes,
            "store_seconds": traffic.seconds,
        }
        if self._receiver is not None:
            meter = self._receiver.meter
            report |= {
                "received_bytes": meter.received_bytes,
                "transfer_seconds": meter.transfer_seconds,
                "scatter_seconds": meter.scatter_seconds,
            }
        return report

    # -- what tasks see ----------------------------------------------------------------------------------------

    @contextmanager
    def partition(self, epoch: int) -> Iterator[Partition]:
        """The partition of an epoch, for the length of one task; a commit waits until it is given back."""
        with self._gate:
            view = self._view
            if view is None or self._cache is None or view.epoch != epoch or self.epoch != epoch:
                raise StaleEpoch(
                    f"a task of epoch {epoch} came to rank {self.rank} when it was on epoch {self.epoch}; gather the "
                    "futures of an epoch before the iteration moves on"
                )
            self._readers += 1
        assert self.rank is not None
        partition = Partition(
            self._cache.layout, self._cache.rows, view.slots, view.sample_ids, rank=self.rank, epoch=epoch
        )
        started = time.perf_counter()
        try:
            yield partition
        finally:
            partition.close()
            with self._gate:
                self._training_seconds += time.perf_counter() - started
                self._readers -= 1
                if not self._readers:
                    self._loop.call_soon_threadsafe(self._no_readers.set)

    def take_training_seconds(self) -> float:
        """Seconds that tasks of this session took here since the last call."""
        with self._gate:
            seconds, self._training_seconds = self._training_seconds, 0.0
        return seconds

    def _swap(self, run: Run) -> bool:
        """Put the prepared epoch in place, unless a task is reading the present one."""
        with self._gate:
            if self._readers:
                self._no_readers.clear()
                return False
            for sender in self._senders.values():
                sender.end()
            if self._receiver is not None and self._cache is not None and run.next_state is not None:
                swap, self._view = run.next_state
                self._receiver.commit(run.run_id)
                self._cache.commit(swap)
            self.epoch, self._run, self._planned = run.epoch, None, None
            return True
