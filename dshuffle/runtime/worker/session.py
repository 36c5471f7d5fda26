"""One session on one worker: its cache partition, its part of every exchange, and the access of tasks to it.

All code here runs on the worker's event loop and returns quickly. Executors plan, pack, read and build indexes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from distributed import Worker
from numpy.typing import NDArray

from dshuffle.errors import DShuffleError, ExchangeError, StaleEpoch
from dshuffle.exchange.buffers import BufferPool
from dshuffle.exchange.cache_partition import CachePartition, Swap
from dshuffle.exchange.comms import DaskNetwork
from dshuffle.exchange.endpoints import Receiver, Reply, RowSink, RowSource, Sender
from dshuffle.exchange.inbox import Inbox
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.messages import MessageId, rows_per_message
from dshuffle.exchange.outbox import Outbox
from dshuffle.planning import SERVER, STORE, EpochPlanner, name_of
from dshuffle.planning.own_part import OwnPlanner, plans_own_parts
from dshuffle.records import Measures
from dshuffle.runtime.measure.processors import ProcessorTimes
from dshuffle.runtime.memory import for_partition, member_nbytes, partition_nbytes
from dshuffle.runtime.partition import Partition
from dshuffle.runtime.replies import unwrap
from dshuffle.runtime.session_spec import SessionSpec
from dshuffle.runtime.worker.epoch_lock import EpochLock, View
from dshuffle.runtime.worker.member_exchange import MemberExchange
from dshuffle.runtime.worker.run import Run, TrainingState
from dshuffle.runtime.worker.server_rows import ServerRows
from dshuffle.store import Dataset

logger = logging.getLogger(__name__)


PLAN_AFTER = 1.0
"""Seconds into an exchange after which the worker starts to plan the next epoch. A shorter exchange ends before that
and keeps all cores; a longer one mostly waits for the network."""


class WorkerSession:
    """The state of one session on one worker.

    Parameters
    ----------
    worker
        The Dask worker.
    spec
        Description of the session.
    dataset
        The session's dataset, open in this process.
    rank
        Rank of this worker, or ``None`` if it only serves.
    """

    def __init__(
        self,
        worker: Worker,
        spec: SessionSpec,
        dataset: Dataset,
        rank: int | None,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.epoch = spec.shuffle.first_epoch - 1
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        # Each session has threads of its own, so that none waits for the reads of another one.
        self._planning = ThreadPoolExecutor(1, thread_name_prefix="dshuffle-plan")
        self._jobs = JobQueue(2, "dshuffle")
        self._reading = JobQueue(1, "dshuffle-read")
        self._dataset = dataset
        # All members compare digests of their plans, so one check is enough.
        self._planner: OwnPlanner | EpochPlanner
        if rank is not None and all(plans_own_parts(spec.shuffle, delivery) for delivery in spec.deliveries):
            self._planner = OwnPlanner(spec.shuffle, rank)
        else:
            self._planner = EpochPlanner(spec.shuffle, checks=rank == 0)
        self._plans: dict[int, asyncio.Future[MemberExchange]] = {}
        self._run: Run | None = None
        self._traffic = dataset.traffic
        self._stop_reading = threading.Event()
        self._background: set[asyncio.Task[None]] = set()

        settings, layout = spec.settings, dataset.layout
        network = DaskNetwork(
            worker, spec.session_id, spec.addresses, serve_here=self.serve, acknowledge_here=self.acknowledge
        )

        def sender(participant: int) -> Sender:
            full = rows_per_message(layout.nbytes, settings.message_bytes)
            buffers = BufferPool(layout, full, settings.window)
            return Sender(Outbox(participant, window=settings.window), buffers, network, self._jobs)

        self._senders: dict[int, Sender] = {}
        self._training: TrainingState | None = None
        self._server_rows: ServerRows | None = None
        budget = for_partition(spec.shuffle, spec.memory_limit)
        if rank is not None:
            cache = CachePartition(
                layout, capacity=spec.shuffle.capacity, incoming=spec.shuffle.max_incoming, budget=budget
            )
            receiver = Receiver(
                Inbox(rank, window=settings.window),
                network,
                self._jobs,
                self._reading,
                store=STORE,
                report=self._report,
                timeout=settings.timeout,
                open_gate=lambda run_id, gate: self._senders[rank].open_gate(run_id, gate),
            )
            self._training = TrainingState(cache, receiver, EpochLock(layout, cache.rows, rank, self._loop))
            self._senders[rank] = sender(rank)
        if spec.addresses.get(SERVER) == worker.address:
            if budget is not None and self._training is not None:  # training and serving share the budget
                budget -= partition_nbytes(spec.shuffle, layout)
            self._server_rows = ServerRows(
                dataset,
                budget=budget,
                window_bytes=settings.window_bytes * spec.shuffle.n_workers,
                whole=spec.shuffle.choices.coded,
            )
            self._senders[SERVER] = sender(SERVER)

    @property
    def nbytes(self) -> int:
        """Maximum size of the cache partition, and of plans of all samples, in bytes."""
        return 0 if self._training is None else member_nbytes(self.spec.shuffle, self._dataset.layout)

    @property
    def participant(self) -> int:
        """Participant as which this worker votes: its rank, or the server."""
        return SERVER if self.rank is None else self.rank

    def partition(self, epoch: int) -> AbstractContextManager[Partition]:
        """The partition of an epoch, valid for one task. Called from the task's thread."""
        training = self._training
        if training is None:
            raise StaleEpoch(
                f"session {self.spec.session_id} does not have a partition on this worker: it has been closed, or the "
                "worker only serves"
            )
        return training.lock.partition(epoch)

    def take_training_seconds(self) -> float:
        """Seconds of training in this session on this worker since the last call."""
        return 0.0 if self._training is None else self._training.lock.take_training_seconds()

    async def begin(self, run_id: int, epoch: int, delivery: str, rate: float | None) -> None:
        """Start an attempt at an epoch's exchange. The result on this worker is reported to the scheduler.

        ``rate`` is that of the workers' links in bytes per second, as far as it is known.
        """
        if epoch != self.epoch + 1:
            raise ExchangeError(f"epoch {epoch} cannot be prepared on a worker that is on epoch {self.epoch}")
        if self._run is not None:
            raise ExchangeError(f"run {run_id} cannot begin: run {self._run.run_id} has not ended")
        self._run = Run(run_id, epoch, delivery, rate)
        self._spawn(self._exchange(self._run))

    async def plan_ahead(self, run_id: int, delivery: str) -> None:
        """Plan the next epoch, unless that was done; called when all participants are ready.

        The plan depends only on seeds. If planning fails, the epoch that needs the plan reports the error.
        """
        if self._run is not None and self._run.run_id == run_id:
            self._plan(self._run.epoch + 1, delivery)

    async def commit(self, run_id: int) -> Reply:
        """Swap to the prepared epoch once no task reads the current one.

        Returns
        -------
        dict
            Measurements of the exchange on this worker, and the training seconds of the epoch that ended.
        """
        run = self._run
        if run is None or run.run_id != run_id or not run.ready:
            raise ExchangeError(f"run {run_id} cannot be committed: it is not ready here")
        started = time.perf_counter()

        def install() -> None:
            for sender in self._senders.values():
                sender.end()
            if self._training is not None and run.prepared is not None:
                self._training.receiver.commit(run_id)
                self._training.cache.commit(run.prepared.result()[0])
            self._plans.pop(run.epoch)
            self.epoch, self._run = run.epoch, None
            self._let_go(run)

        if self._training is not None and run.prepared is not None:
            await self._training.lock.swap(run.prepared.result()[1], install)
        else:
            install()
        measures = self._measures(run, time.perf_counter() - started)
        return {"measures": measures.to_dict(), "training_seconds": self.take_training_seconds()}

    async def abort(self) -> None:
        """Abort the current run. The worker stays on its epoch and keeps its plan for the next one."""
        run, self._run = self._run, None
        for sender in self._senders.values():
            sender.end()
        if self._training is not None:
            stop, self._stop_reading = self._stop_reading, threading.Event()
            stop.set()  # otherwise reading from a slow store could continue for a long time
            await self._training.receiver.abort()
        if run is not None:
            if run.ends:  # these tasks reserve slots and may write to them
                await asyncio.wait(run.ends)
            self._let_go(run)

    async def close(self) -> None:
        """Abort the current run and free everything."""
        await self.abort()
        for sender in self._senders.values():
            sender.close()
        for task in self._background:
            task.cancel()
        for plan in self._plans.values():
            plan.cancel()
        self._planning.shutdown(wait=False, cancel_futures=True)
        self._jobs.close()
        self._reading.close()
        if self._server_rows is not None:
            await self._loop.run_in_executor(None, self._server_rows.close)
        self._training = self._server_rows = None
        self._senders = {}

    async def serve(self, message: MessageId) -> Reply:
        """Answer another participant's request for a message."""
        sender = self._senders.get(message.sender)
        if sender is None:
            return {"status": "refused", "reason": f"{name_of(message.sender)} is not on this worker", "again": False}
        return await sender.serve(message)

    def acknowledge(self, message: MessageId) -> None:
        """Note that another participant has received the message."""
        sender = self._senders.get(message.sender)
        if sender is not None:
            sender.acknowledged(message)

    async def _exchange(self, run: Run) -> None:
        """Plan the epoch, then start to send and receive."""
        try:
            await self._start(run)
        except Exception as error:  # any error must be reported to the scheduler, or the epoch would never end
            logger.exception("dshuffle: run %d could not start", run.run_id)
            self._report(run.run_id, f"the exchange could not start: {type(error).__name__}: {error}")

    async def _start(self, run: Run) -> None:
        planned, settings = await self._plan(run.epoch, run.delivery), self.spec.settings
        run.exchange = exchange = await self._loop.run_in_executor(
            None, planned.with_messages, self._dataset.layout, settings, run.rate
        )
        if self._run is not run:  # aborted in the meantime
            return
        self._traffic = self._dataset.traffic
        # The first messages are requested while the sources and sinks of their rows are still being prepared.
        served: asyncio.Future[RowSource] | None = None
        if self._server_rows is not None:
            # In a separate thread: with a coded plan this waits until all rows have been read.
            served = self._loop.run_in_executor(None, exchange.source, SERVER, self._server_rows)
            self._begin_sending(run, exchange, SERVER, served)
        if self._training is not None and self.rank is not None:
            source = self._planning.submit(exchange.source, self.rank, self._training.cache)
            sink = asyncio.wrap_future(self._planning.submit(self._make_sink, exchange, source))
            run.ends += [asyncio.wrap_future(source), sink]
            self._begin_sending(run, exchange, self.rank, run.ends[0])
            self._training.receiver.begin(
                run.run_id, exchange.incoming(self.rank), sink, window=exchange.messages.asked
            )
            # The sink has reserved the slots by then, so the next epoch's index can be built while its rows arrive.
            run.prepared = self._loop.run_in_executor(self._planning, self._prepare, run.epoch, exchange)
        if len(self.spec.deliveries) == 1:  # otherwise the next delivery is chosen after this exchange has been timed
            run.timer = self._loop.call_later(PLAN_AFTER, self._plan, run.epoch + 1, run.delivery)
        for end in list(run.ends):
            await asyncio.shield(end)
        if served is not None:
            await asyncio.shield(served)
        if self._training is None:
            self._report(run.run_id, None)

    def _begin_sending(self, run: Run, exchange: MemberExchange, who: int, source: asyncio.Future[RowSource]) -> None:
        answered = exchange.answered_by(who, self.spec.settings)
        acknowledged = exchange.messages.acknowledged
        self._senders[who].begin(run.run_id, exchange.outgoing(who), source, window=answered, acknowledged=acknowledged)

    @staticmethod
    def _let_go(run: Run) -> None:
        """Drop the references to a run's rows and packets, so that they do not outlive it."""
        if run.timer is not None:
            run.timer.cancel()
        run.ends.clear()

    def _plan(self, epoch: int, delivery: str) -> asyncio.Future[MemberExchange]:
        """The plan of an epoch. It is made once, even if the exchange is retried, unless planning failed."""
        plan = self._plans.get(epoch)
        if plan is None or (plan.done() and plan.exception() is not None):
            self._plans[epoch] = self._loop.run_in_executor(self._planning, self._make_plan, epoch, delivery)
        return self._plans[epoch]

    def _make_plan(self, epoch: int, delivery: str) -> MemberExchange:
        planner, layout, settings = self._planner, self._dataset.layout, self.spec.settings
        if isinstance(planner, OwnPlanner):
            return MemberExchange.alone(planner, epoch, delivery)
        return MemberExchange.make(planner, epoch, list(self._senders), layout, settings, delivery)

    def _make_sink(self, exchange: MemberExchange, source: Future[RowSource]) -> RowSink:
        assert self._training is not None
        assert self.rank is not None
        return exchange.sink(self.rank, self._training.cache, source.result(), self._read_store)

    def _read_store(self, sample_ids: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        training = self._training
        assert training is not None
        stop = self._stop_reading  # the event of this run; an abort replaces it
        self._dataset.read_into(training.cache.rows, slots, sample_ids, stop=stop.is_set)
        self._dataset.check_unchanged()
        training.cache.add_checksums(sample_ids, slots)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _report(self, run_id: int, reason: str | None) -> None:
        self._spawn(self._vote(run_id, reason))

    async def _vote(self, run_id: int, reason: str | None) -> None:
        """Report to the scheduler whether this worker is ready: all rows have arrived and the swap is prepared."""
        run = self._run
        if run is None or run.run_id != run_id:
            return
        if reason is None and run.prepared is not None:
            try:
                await run.prepared
            except Exception as error:
                logger.exception("dshuffle: run %d cannot be committed", run_id)
                reason = f"the next index could not be built: {type(error).__name__}: {error}"
        run.ready = reason is None
        run.cpu_idle = ProcessorTimes.now().idle_since(run.processors)
        run.watched_seconds = time.perf_counter() - run.started
        vote: dict[str, Any] = {} if run.exchange is None else dict(run.exchange.summary)
        vote["rows"] = self._training.receiver.meter.rows if self._training is not None else 0
        try:
            reply = await self._worker.scheduler.dshuffle_report(
                session_id=self.spec.session_id,
                run_id=run_id,
                participant=self.participant,
                reason=reason,
                vote=vote,
            )
            unwrap(reply, "the scheduler")
        except (OSError, DShuffleError) as error:  # if the scheduler is lost, Dask closes this worker
            logger.warning("dshuffle: the vote on run %d did not reach the scheduler: %s", run_id, error)

    def _prepare(self, epoch: int, exchange: MemberExchange) -> tuple[Swap, View]:
        assert self._training is not None
        assert self.rank is not None
        mine = exchange.parts[self.rank]
        swap = self._training.cache.prepare(mine.held)
        # Without excess, a worker holds exactly what it trains on, and the slots are already known.
        own = swap.index.slots if len(mine.own) == len(mine.held) else swap.index.find(mine.own)
        return swap, View(epoch, mine.order, own[mine.permutation], exchange.shares, exchange.broadcast)

    def _measures(self, run: Run, commit_seconds: float) -> Measures:
        assert run.exchange is not None
        traffic = self._dataset.traffic - self._traffic
        sent = {participant: sender.meter for participant, sender in self._senders.items()}
        meter = None if self._training is None else self._training.receiver.meter
        coded = run.exchange.hops is not None
        return Measures(
            wire_sent_bytes=() if self.rank is None else (sent[self.rank].sent_bytes,),
            wire_received_bytes=() if meter is None else (meter.received_bytes,),
            server_sent_bytes=sent[SERVER].sent_bytes if SERVER in sent else 0,
            metadata_bytes=sum(meter.sent_checksum_bytes for meter in sent.values()),
            store_requests=traffic.requests,
            store_bytes=traffic.fetched_bytes,
            store_delivered_bytes=traffic.delivered_bytes,
            store_retries=traffic.retries,
            store_cache_hits=traffic.cache_hits,
            plan_seconds=run.exchange.seconds,
            gather_seconds=sum(meter.gather_seconds for meter in sent.values()),
            transfer_seconds=meter.transfer_seconds if meter else 0.0,
            scatter_seconds=meter.scatter_seconds if meter else 0.0,
            store_seconds=traffic.seconds,
            commit_seconds=commit_seconds,
            encode_seconds=sent[SERVER].gather_seconds if coded and SERVER in sent else 0.0,
            decode_seconds=meter.scatter_seconds if coded and meter else 0.0,
            watched_seconds=run.watched_seconds,
            cpu_idle=run.cpu_idle,
        )
