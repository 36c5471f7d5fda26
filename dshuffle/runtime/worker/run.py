"""One attempt at the exchange of an epoch, on one worker: the next index, what is measured, and mending rows."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import DatasetError
from dshuffle.exchange.cache_partition import CachePartition, Swap
from dshuffle.exchange.endpoints import RowSink, RowSource, has_result, nothing_to_mend
from dshuffle.planning import SERVER, STORE, ShuffleSpec
from dshuffle.planning.remainder import SampleDigest, due_in_an_epoch
from dshuffle.records import Measures
from dshuffle.runtime.dataset_inputs import for_workers
from dshuffle.runtime.messages import Counts, Report, TrainingTime, Vote, retrieve
from dshuffle.runtime.process import ProcessorTimes
from dshuffle.runtime.worker.epoch_lock import View
from dshuffle.runtime.worker.loading import Load
from dshuffle.runtime.worker.member_parts import MemberExchange, MemberParts
from dshuffle.store import Dataset

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a commit installs on a worker that trains, and what shows that all workers together train on every sample.

    Parameters
    ----------
    swap, view
        The next index of the cache, and the next epoch as tasks see it.
    digest
        Digest of the samples in the view, which the worker trains on.
    due
        The rank's part of the digest of all samples that are to be trained on. It does not depend on the draw.
    """

    swap: Swap
    view: View
    digest: SampleDigest
    due: SampleDigest

    @classmethod
    def of(cls, exchange: MemberExchange, parts: MemberParts, epoch: int) -> Prepared:
        """Prepare an epoch whose slots have been reserved."""
        training, shuffle, start = parts.training, parts.shuffle, parts.start
        assert training is not None
        mine = exchange.parts[training.rank]
        swap = training.cache.prepare(mine.held)
        # Without excess, a worker holds exactly what it trains on, and the slots are already known.
        own = swap.index.slots if len(mine.own) == len(mine.held) else swap.index.find(mine.own)
        sample_ids, slots, shares = mine.order, own[mine.permutation], exchange.shares
        due = due_in_an_epoch(shuffle, training.rank)
        if start.trained and start.epoch == epoch:

            def spec_for(n_workers: int) -> ShuffleSpec:
                return for_workers(shuffle, n_workers, parts.dataset)

            keep, shares = start.left(shuffle, training.rank, spec_for)
            sample_ids, slots = sample_ids[keep], slots[keep]
            if training.rank == 0:
                due -= start.trained_digest(shuffle, spec_for)
        broadcast = exchange.broadcast
        if len(broadcast):
            broadcast = broadcast[np.isin(broadcast, sample_ids)]
        view = View(epoch, sample_ids, slots, shares, broadcast, shuffle.weights, shuffle.choices.shares.may_change)
        return cls(swap, view, SampleDigest.of(sample_ids, shuffle.choices.seed), due)


MOST_LINKS = 64
"""With more workers, they do not tell the scheduler what came from whom."""


class RunMeasures:
    """Measures an attempt from now on."""

    def __init__(self, parts: MemberParts) -> None:
        self._parts = parts
        self._traffic = parts.dataset.traffic
        self._loaded = parts.reader.sent_bytes, parts.loader.received_bytes  # before
        self._processors = ProcessorTimes.now()
        self._started = time.perf_counter()
        self._cpu_idle = 0.0
        self._watched_seconds = 0.0

    def end(self) -> None:
        """Note that the vote is known: what comes later is not part of the exchange."""
        self._cpu_idle = ProcessorTimes.now().idle_since(self._processors)
        self._watched_seconds = time.perf_counter() - self._started

    def of(self, exchange: MemberExchange, commit_seconds: float, mended_rows: int) -> Measures:
        """What an exchange took, with its commit and the rows that were read again."""
        parts = self._parts
        traffic = parts.dataset.traffic - self._traffic
        sent = {participant: sender.meter for participant, sender in parts.senders.items()}
        meter = None if parts.training is None else parts.training.receiver.meter
        coded = exchange.transport.encodes
        sent_bytes = sum(sender.sent_bytes for participant, sender in sent.items() if participant != SERVER)
        read, loaded = parts.reader.sent_bytes - self._loaded[0], parts.loader.received_bytes - self._loaded[1]
        return Measures(
            wire_sent_bytes=(sent_bytes + read,) if meter else (),
            wire_received_bytes=(meter.received_bytes + loaded,) if meter else (),
            server_sent_bytes=(sent[SERVER].sent_bytes if SERVER in sent else 0) + (0 if meter else read),
            metadata_bytes=sum(sender.sent_checksum_bytes for sender in sent.values()),
            shared_memory_bytes=sum(sender.shared_bytes for sender in sent.values()),
            recovered_rows=mended_rows + (meter.recovered_rows if meter else 0),
            store_requests=traffic.requests,
            store_bytes=traffic.fetched_bytes,
            store_delivered_bytes=traffic.delivered_bytes,
            store_retries=traffic.retries,
            plan_seconds=exchange.seconds,
            gather_seconds=sum(sender.gather_seconds for sender in sent.values()),
            transfer_seconds=meter.transfer_seconds if meter else 0.0,
            scatter_seconds=meter.scatter_seconds if meter else 0.0,
            store_seconds=traffic.seconds,
            commit_seconds=commit_seconds,
            encode_seconds=sent[SERVER].gather_seconds if coded and SERVER in sent else 0.0,
            decode_seconds=meter.scatter_seconds if coded and meter else 0.0,
            watched_seconds=self._watched_seconds,
            cpu_idle=self._cpu_idle,
        )

    def links(self) -> dict[int, tuple[int, float]]:
        """Sender -> bytes that came from it over the network, and seconds in which they came."""
        training = self._parts.training
        if training is None or self._parts.shuffle.n_workers > MOST_LINKS:
            return {}
        links = training.receiver.meter.links
        return {participant: (link.nbytes, link.ended - link.begun) for participant, link in links.items()}


class Mending:
    """Verifies the rows of a partition, once in a run.

    Parameters
    ----------
    dataset
        From which corrupted rows are read.
    cache
        The partition; None on a worker that only serves.
    """

    def __init__(self, dataset: Dataset, cache: CachePartition | None) -> None:
        self.n_rows = 0
        self.stop = threading.Event()  # whether the run is ending, so that nobody reads from the store any more
        self._dataset = dataset
        self._cache = cache
        self._is_done = False
        self._lock = threading.Lock()

    def mend(self) -> int:
        """Verify all rows held here, once in a run, and read those that are corrupted from the store."""
        cache = self._cache
        if cache is None:
            return 0
        with self._lock:
            if self.stop.is_set():
                return 0
            if not self._is_done:
                samples, slots = cache.corrupted()
                self._is_done, self.n_rows = True, len(samples)
                if len(samples):
                    logger.warning("dshuffle: %d rows are corrupted in memory and are read again", len(samples))
                    try:
                        self._dataset.read_into(cache.rows, slots, samples, stop=self.stop.is_set)
                        self._dataset.check_unchanged()
                    except DatasetError:
                        logger.exception("dshuffle: corrupted rows could not be read again")
            return self.n_rows

    async def settle(self) -> None:
        """Return when no rows are being mended. Set ``stop`` before."""
        if self._lock.locked():
            await asyncio.to_thread(self._wait)

    def _wait(self) -> None:
        with self._lock:
            return


PLAN_AFTER = 1.0
"""Seconds into an exchange after which the worker starts to plan the next epoch. A shorter exchange ends before that
and keeps all cores; a longer one mostly waits for the network."""


RESTORE = "restore"
"""In place of a delivery: load the whole partition, for a rank whose worker was lost."""


class ExchangeRun:
    """One attempt at an epoch's exchange.

    Parameters
    ----------
    parts
        Planner, senders, receiver and cache of the session.
    run_id, epoch, delivery
        Number of the run, its epoch, and its delivery or :data:`RESTORE`.
    rate
        Rate of the workers' links in bytes per second, as far as it is known. Messages are cut for it.
    send_vote
        Called with the run once its vote is known.
    readers
        Addresses of the workers that read the store for others.
    load
        The load that all take part in; None if partitions are exchanged.
    before
        An aborted attempt at the same epoch. If its messages are the same, those that arrived are not requested again.
    """

    def __init__(
        self,
        parts: MemberParts,
        run_id: int,
        epoch: int,
        delivery: str,
        rate: float | None,
        send_vote: Callable[[ExchangeRun], None],
        readers: Sequence[str],
        load: Load | None = None,
        before: ExchangeRun | None = None,
    ) -> None:
        self.run_id = run_id
        self.epoch = epoch
        self.vote: Vote | None = None
        self.exchange: MemberExchange | None = None
        self._parts = parts
        self._delivery = delivery
        self._rate = rate
        self._send_vote = send_vote
        self._readers = readers
        self._load = load
        self._before = before if before is not None and before._is_like(epoch, delivery, rate) else None
        self._prepared: asyncio.Future[Prepared] | None = None
        self._source: asyncio.Future[RowSource] | None = None
        self._sink: asyncio.Future[RowSink] | None = None
        self._server_loaded: asyncio.Future[None] | None = None
        self._joined: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._mending = Mending(parts.dataset, None if parts.training is None else parts.training.cache)
        self._measures = RunMeasures(parts)

    @property
    def ready(self) -> bool:
        """Whether all rows have arrived and the swap is prepared."""
        return self.vote is not None and self.vote.reason is None

    @property
    def prepared(self) -> Prepared | None:
        """What a commit installs, on a worker that trains."""
        return None if self._prepared is None else self._prepared.result()

    async def start(self) -> None:
        """Plan the epoch, then start to send and receive. The vote says whether that succeeded."""
        try:
            await self._start()
        except Exception as error:  # any error must be reported to the scheduler, or the epoch would never end
            logger.exception("dshuffle: run %d could not start", self.run_id)
            self._vote(f"the exchange could not start: {type(error).__name__}: {error}", again=False)

    async def stop(self) -> None:
        """Abort. Returns when nothing of this run can access the cache partition any more."""
        self._stopped = True
        training = self._parts.training
        for sender in self._parts.senders.values():
            sender.end()
        await self.settle()
        if training is not None:
            await training.receiver.abort()
        futures = self._source, self._sink, self._prepared, self._server_loaded
        if touching := [future for future in futures if future is not None]:
            await asyncio.wait(touching)  # they reserve slots, or write rows
        if self._timer is not None:
            self._timer.cancel()
        self._before = None

    async def settle(self) -> None:
        """Stop reading from the store. Returns when no rows are being mended: later they would be overwritten."""
        self._mending.stop.set()  # otherwise reading from a slow store could continue for a long time
        await self._mending.settle()

    def forget(self) -> None:
        """Drop the references to rows and packets, so that they do not outlive the run."""
        if self._timer is not None:
            self._timer.cancel()
        self._source = self._sink = self._prepared = self._before = None

    def received(self, run_id: int, reason: str | None, again: bool) -> None:
        """Vote once everything has arrived, or the receiver has given up; called by the receiver."""
        if run_id == self.run_id and not self._stopped:
            self._vote(reason, again)

    def report(self, commit_seconds: float, training_time: TrainingTime) -> Report:
        """What was measured, once the exchange is committed."""
        assert self.exchange is not None
        training = self._parts.training
        return Report(
            measures=self._measures.of(self.exchange, commit_seconds, self._mending.n_rows),
            training=training_time,
            links=self._measures.links(),
            held=0 if training is None else len(training.cache.index.sample_ids),
        )

    async def _start(self) -> None:
        parts, loop = self._parts, asyncio.get_running_loop()
        training = parts.training
        before, self._before = self._before, None
        if before is None:
            if self._delivery == RESTORE and training is not None:
                planned = await parts.plans.restoring(self.epoch, training.rank)
            else:
                planned = await parts.plans.plan(self.epoch, self._delivery)
            self.exchange = await loop.run_in_executor(None, self._with_messages, planned)
        else:
            self.exchange = before.exchange
        if self._stopped:
            return
        exchange = self.exchange
        assert exchange is not None
        # The first messages are requested while the sources and sinks of their rows are still being prepared.
        served: asyncio.Future[RowSource] | None = None
        if (
            parts.server_rows is not None
            and self._load is not None
            and parts.loads_server
            and self._delivery != RESTORE
        ):
            bring = functools.partial(parts.loader.bring, dataclasses.replace(self._load, owner=SERVER, alone=False))
            loading = asyncio.ensure_future(parts.server_rows.load(bring, self._mending.stop.is_set))
            loading.add_done_callback(retrieve)
            self._server_loaded = loading
        if parts.server_rows is not None and self._delivery != RESTORE:
            # In a separate thread: with a coded plan this waits until all rows have been read.
            served = loop.run_in_executor(None, exchange.transport.served, parts.server_rows)
            self._begin_sending(exchange, SERVER, served)
        if training is not None:
            if before is None:
                source = parts.plans.executor.submit(exchange.transport.source, training.rank, training.cache)
                self._source = asyncio.wrap_future(source)
                self._sink = asyncio.wrap_future(parts.plans.executor.submit(self._make_sink, exchange, source))
                # The sink has reserved the slots by then, so the next index can be built while its rows arrive.
                self._prepared = loop.run_in_executor(parts.plans.executor, Prepared.of, exchange, parts, self.epoch)
            else:
                self._source, self._sink, self._prepared = before._source, before._sink, before._prepared
                before.forget()
            assert self._source is not None
            assert self._sink is not None
            self._begin_sending(exchange, training.rank, self._source)
            if before is not None and self._load is not None and training.receiver.has_arrived(STORE):
                self._joined = asyncio.ensure_future(parts.loader.join(self._load, training.cache))
            training.receiver.begin(
                self.run_id,
                exchange.incoming(training.rank),
                self._sink,
                window=exchange.transport.messages.requests,
                resumed=before is not None,
                stop=self._mending.stop.is_set,
                mend=self._mending.mend,
                seconds_to_read=parts.loader.seconds_to_read if exchange.transport.readable else None,
            )
        # With several deliveries, the next one is chosen only after this exchange has been timed.
        if len(parts.deliveries) == 1 and self._delivery != RESTORE:
            self._timer = loop.call_later(PLAN_AFTER, parts.plans.plan, self.epoch + 1, self._delivery)
        for end in (self._source, self._sink, served):
            if end is not None:
                await asyncio.shield(end)
        if training is None:
            self._vote(None, again=False)

    def _with_messages(self, planned: MemberExchange) -> MemberExchange:
        parts = self._parts
        if parts.training is not None and parts.training.cache.on_disk:
            planned = planned.for_disk(parts.training.cache.n_free)
        return planned.with_messages(self._rate)

    def _is_like(self, epoch: int, delivery: str, rate: float | None) -> bool:
        """Whether this run's messages are the same as those of another attempt, and its rows can be kept."""
        if self.exchange is None or (self.epoch, self._delivery, self._rate) != (epoch, delivery, rate):
            return False
        if self._parts.training is None:
            return True
        sink = self._sink
        return (
            all(has_result(future) for future in (self._source, sink, self._prepared))
            and sink is not None
            and sink.result().intact
        )

    def _begin_sending(self, exchange: MemberExchange, participant: int, source: asyncio.Future[RowSource]) -> None:
        transport = exchange.transport
        sender = self._parts.senders[participant]
        sender.begin(
            self.run_id,
            exchange.outgoing(participant),
            source,
            window=transport.answered_by(participant),
            to_one=transport.answered_to_one_by(participant),
            acknowledged=transport.messages.acknowledged,
            mend=self._mending.mend if participant != SERVER else nothing_to_mend,
        )

    def _make_sink(self, exchange: MemberExchange, source: Future[RowSource]) -> RowSink:
        training = self._parts.training
        assert training is not None
        return exchange.transport.sink(training.rank, training.cache, source.result(), self._bring)

    async def _bring(
        self,
        sample_ids: NDArray[np.int64],
        slots: NDArray[np.int64],
        stop: Callable[[], bool],
        *,
        recovers: bool,
        **state: Any,
    ) -> None:
        """Bring rows that no message has: all of a load, those of a delivery that reads the store, or lost ones."""
        parts, training = self._parts, self._parts.training
        assert training is not None
        load = self._load
        if recovers:  # not one of many workers that need rows of the same chunks reads them by itself
            load = Load(f"recovery {self.run_id}", training.rank, 0, tuple(self._readers))
        elif load is None:
            load = Load(f"storage {self.run_id}", training.rank, 0, ())
        first = self._load is not None
        await parts.loader.bring(load, training.cache, sample_ids, slots, stop, former=first, **state)

    def _vote(self, reason: str | None, again: bool) -> None:
        for waits in (self._prepared, self._server_loaded):
            if reason is None and waits is not None and not waits.done():
                waits.add_done_callback(lambda _: self.received(self.run_id, None, again))
                return
        loaded = self._server_loaded
        if reason is None and loaded is not None and (lost := loaded.exception()) is not None:
            reason, again = f"{type(lost).__name__}: {lost}", not isinstance(lost, DatasetError) or lost.transient
        if reason is None and self._prepared is not None and (error := self._prepared.exception()) is not None:
            logger.error("dshuffle: run %d cannot be committed", self.run_id, exc_info=error)
            reason = f"the next index could not be built: {type(error).__name__}: {error}"
        self._measures.end()
        self.vote = Vote(reason=reason, again=again, counts=None if reason is not None else self._counts())
        self._send_vote(self)

    def _counts(self) -> Counts | None:
        """What this worker has counted; None if it read its partition again, of which nothing is to be compared."""
        exchange, training, prepared = self.exchange, self._parts.training, self.prepared
        if exchange is None or self._delivery == RESTORE:
            return None
        return Counts(
            **exchange.summary,
            rows=0 if training is None else training.receiver.meter.rows,
            drawn=None if prepared is None else prepared.digest,
            due=None if prepared is None else prepared.due,
        )
