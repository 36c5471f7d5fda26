"""Bring rows to this worker: from partitions that still exist, and from the store, which all workers read together.

Former partitions are those of a session that this one follows, of the worker that had the rank before, or on disks. The
worker that holds a sample sends its row, with the checksum from when the row was read. All other rows come from the
store. One worker reads each block of it, and all workers compute which one. So each chunk is read once, however many
workers need rows of it (two-phase I/O: Thakur, Gropp and Lusk, 1999). A worker never reads the blocks of others by
itself: if a reader fails or is late, the scheduler names another one, the same for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import logging
import math
import threading
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from distributed import Worker
from numpy.typing import NDArray

from dshuffle.coding import encode
from dshuffle.errors import CacheBudgetError, ChecksumMismatch, DatasetError, DShuffleError, ExchangeError
from dshuffle.exchange.cache_partition import SLOT_OVERHEAD, CachePartition
from dshuffle.exchange.comms import Later, RowsReply, from_fields, received, request
from dshuffle.exchange.endpoints import ANSWER_AFTER, JobQueue, has_result
from dshuffle.exchange.mailboxes import MIB, rows_per_message
from dshuffle.exchange.transports import RowSource, Stop, leaving
from dshuffle.planning import Packets, name_of
from dshuffle.planning.remainder import workers_of
from dshuffle.planning.types import NO_SAMPLES, Samples, group_by
from dshuffle.rows import ByteMatrix, Checksums, checksum_rows
from dshuffle.runtime.dataset_inputs import with_data
from dshuffle.runtime.messages import message_in, unwrap, within
from dshuffle.runtime.session_spec import PartitionSources, SessionSpec
from dshuffle.runtime.settings import Settings
from dshuffle.store import Dataset
from dshuffle.store.row_blocks import Block, Group, Request, RowBlocks

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 2 * MIB
"""Longest message of a former partition. Many workers may ask the same holder, and all must be answered in time."""

SILENT_HEARTBEATS = 4
"""Heartbeats within which a source must answer a request, if only that it needs more time."""

LOOK_EVERY = 0.5
"""Seconds between looks at whether the rows are still wanted."""

LATE_AFTER = 120.0
"""Seconds without rows after which another worker takes the place of a reader that asks for more time."""

IN_FLIGHT = 2
"""Requests to a source at a time."""

IN_FLIGHT_NBYTES = 32 * MIB
"""Bytes of rows that are requested from all sources together, as far as one request does not have more."""

ATTEMPTS = 3
"""Readers of the same rows that may fail before a load does."""

DIRECT_NBYTES = 256 * MIB
"""Rows that a worker reads by itself at a time."""

T = TypeVar("T")

LocalRows = Callable[[str, int, Samples], Coroutine[Any, Any, RowsReply]]
"""Returns rows of a session on this worker: its id, the epoch, and the samples."""


class Load(NamedTuple):
    """Who reads the store together, and for whom.

    Parameters
    ----------
    name
        Name of the load, the same for all who take part.
    owner, n_owners
        The participant that gets rows, and how many take part in the load. With 0, rows are read on request, and
        nobody announces what it needs.
    readers
        Addresses of the workers that read; none if each owner reads by itself.
    alone
        Whether each sample goes to one participant only.
    """

    name: str
    owner: int
    n_owners: int
    readers: tuple[str, ...]
    alone: bool = False


@dataclass(slots=True, eq=False)
class _Source:
    """A worker that sends rows, and what is left to ask it for; another address takes its place if it is late."""

    address: str
    queue: deque[Any] = field(default_factory=deque)
    asked: set[int] = field(default_factory=set)  # blocks that are requested
    announced_to: str = ""
    failures: int = 0
    since: float = 0.0  # when it last sent rows


@dataclass(slots=True, eq=False)
class _Attempt:
    """The arguments of :meth:`Loader.bring`, and whether a part of it has failed."""

    load: Load
    target: CachePartition
    sample_ids: Samples
    slots: Samples
    stop: Stop
    done: NDArray[np.bool_]
    cause: BaseException | None = None

    @property
    def stopped(self) -> bool:
        """Whether the rows are no longer wanted, or cannot all be brought."""
        return self.cause is not None or self.stop()


class Loader:
    """Brings rows to one worker of a session.

    ``jobs`` and ``reading`` are threads that unpack rows, and that read the store. ``reader`` is what this worker reads
    for all, and ``rows_here`` returns the rows of former partitions on this worker.
    """

    def __init__(
        self,
        worker: Worker,
        spec: SessionSpec,
        dataset: Dataset,
        blocks: RowBlocks,
        jobs: JobQueue,
        reading: JobQueue,
        reader: StoreReader,
        rows_here: LocalRows,
    ) -> None:
        self.received_bytes = 0
        self._worker, self._spec, self._dataset, self._blocks = worker, spec, dataset, blocks
        self._jobs, self._reading, self._reader, self._rows_here = jobs, reading, reader, rows_here

    async def bring(
        self,
        load: Load,
        target: CachePartition,
        sample_ids: Samples,
        slots: Samples,
        stop: Stop,
        *,
        done: NDArray[np.bool_],
        former: bool = False,
    ) -> None:
        """Bring samples into reserved slots. Nothing writes to them once this has ended, with or without an error.

        Rows that are ``done`` are there already. It is kept up to date, so that another attempt goes on.
        """
        attempt = _Attempt(load, target, sample_ids, slots, stop, done)
        if former and self._spec.former is not None:
            await self._bring_former(attempt, self._spec.former)
        await self._bring_stored(attempt)
        if len(sample_ids):
            await self._reading.run(self._dataset.check_unchanged)

    async def join(self, load: Load, target: CachePartition, stop: Stop = lambda: False) -> None:
        """Say that this participant needs nothing from a load that others take part in."""
        await self.bring(load, target, NO_SAMPLES, NO_SAMPLES, stop, done=np.empty(0, np.bool_))

    async def _bring_former(self, attempt: _Attempt, former: PartitionSources) -> None:
        """Read rows from former partitions. Those that none of them can send are left."""
        sample_ids, slots, row_nbytes = attempt.sample_ids, attempt.slots, self._dataset.row_nbytes
        at_most = rows_per_message(row_nbytes, min(MESSAGE_BYTES, self._spec.settings.message_bytes))
        room = _room(at_most * row_nbytes)

        def needed() -> list[tuple[int, _Source]]:
            left = np.flatnonzero(~attempt.done)
            if former.shuffle is None:  # all samples are in one partition
                places = dict.fromkeys(former.holders, left)
            else:
                order, offsets = group_by(self._ranks_of(sample_ids[left]), former.shuffle.n_workers)
                places = {rank: left[order[offsets[rank] : offsets[rank + 1]]] for rank in former.holders}
            # Every worker has another order of holders.
            ranks = sorted(places, key=lambda rank: zlib.crc32(f"{self._worker.address} {rank}".encode()))
            return [(rank, _Source(former.holders[rank][0], deque(_cut(places[rank], at_most)))) for rank in ranks]

        def unpack(places: Samples, rows: ByteMatrix, checksums: Checksums) -> None:
            if former.kept:  # it may lack some, whose checksums are wrong
                present = checksum_rows(rows, sample_ids[places]) == checksums
                places, rows, checksums = places[present], rows[present], checksums[present]
            attempt.target.unpack(sample_ids[places], slots[places], rows, checksums)
            attempt.done[places] = True

        async def fetch(rank: int, source: _Source, places: Samples) -> None:
            asked = {"session_id": former.holders[rank][1], "epoch": former.epoch, "sample_ids": sample_ids[places]}
            async with room:
                reply = await self._rows(attempt, source, self._rows_here, "rows", asked)
                await self._jobs.run(unpack, places, reply.rows, reply.checksums, nbytes=reply.nbytes)

        async def fail(rank: int, source: _Source, places: Samples, address: str, error: Exception) -> None:
            if not source.failures and not attempt.stopped:
                reason = f"{type(error).__name__}: {error}"
                logger.warning("dshuffle: rows of %s are read from the dataset (%s)", name_of(rank), reason)
            source.failures += 1
            source.queue.clear()

        work = [
            self._ask(attempt, source, functools.partial(fetch, rank), functools.partial(fail, rank))
            for rank, source in await self._jobs.run(needed)
        ]
        await _all_of(work, attempt)

    @functools.cached_property
    def _ranks_of(self) -> Callable[[Samples], NDArray[np.int32]]:
        """What tells the ranks of samples in the former session. They may all have to be planned for that."""
        former = self._spec.former
        assert former is not None
        assert former.shuffle is not None
        shuffle = with_data(former.shuffle, self._dataset)
        ranks_at = shuffle.ranks_at(former.epoch)
        return ranks_at or workers_of(shuffle, former.epoch, np.arange(shuffle.n_samples)).__getitem__

    async def _bring_stored(self, attempt: _Attempt) -> None:
        load, blocks = attempt.load, self._blocks

        def needed() -> tuple[Samples, list[Request], list[tuple[Group | None, Samples]]]:
            left = np.flatnonzero(~attempt.done)
            if not load.readers:
                return left, [], [(None, left)]
            requests, direct = blocks.requests(attempt.sample_ids[left], alone=load.alone)
            return left, requests, [(group, left[which]) for group, which in direct]

        async def fetch(source: _Source, request: Request) -> None:
            source.asked.add(request.block)
            await self._announce(attempt, source)
            numbers = (request.items - blocks.first_item(request.block)).astype(np.uint32)
            asked = {"load": load.name, "owner": load.owner, "block": request.block, "numbers": numbers}
            async with room:
                reply = await self._rows(attempt, source, self._reader.rows, "block", asked)
                if attempt.stopped:
                    raise _stopped()
                which = left[request.places]
                await self._jobs.run(self._place, attempt, request, which, reply, nbytes=reply.nbytes)
            source.asked.discard(request.block)
            source.failures, source.since = 0, asyncio.get_running_loop().time()

        async def fail(source: _Source, request: Request, address: str, error: Exception) -> None:
            source.queue.appendleft(request)
            source.failures += source.address == address
            lasts = isinstance(error, DatasetError) and not error.transient
            if attempt.stopped or lasts or source.failures > ATTEMPTS * IN_FLIGHT:
                raise error
            if source.address == address and not isinstance(error, ChecksumMismatch):
                await self._replace(attempt, source, f"{type(error).__name__}: {error}")

        left, requests, direct = await self._jobs.run(needed)
        room = _room(max((len(one.items) * one.group.rows.row_nbytes for one in requests), default=0))
        sources = [_Source(address) for address in load.readers]
        for one in requests:
            sources[one.block % len(sources)].queue.append(one)
        work = [self._read(attempt, group, places) for group, places in direct]
        work += [self._ask(attempt, source, fetch, fail) for source in sources if source.queue]
        if load.n_owners > 1:
            work += [self._announce_nothing(attempt, source) for source in sources if not source.queue]
        await _all_of(work, attempt)
        if load.readers and not blocks.is_whole and len(left):  # rows were put together from their parts
            sample_ids, slots = attempt.sample_ids[left], attempt.slots[left]
            await self._reading.run(attempt.target.add_checksums, sample_ids, slots)
            attempt.done[left] = True

    async def _read(self, attempt: _Attempt, group: Group | None, places: Samples) -> None:
        """Read rows that no other worker needs, of all arrays or of those of a group."""
        target, dataset = attempt.target, self._dataset if group is None else group.samples

        def ends() -> bool:  # called before every chunk
            target.relieve()
            return attempt.stopped

        def read(which: Samples) -> None:
            sample_ids, slots = attempt.sample_ids[which], attempt.slots[which]
            dataset.read_into(target.rows, slots, sample_ids, memory_budget=IN_FLIGHT_NBYTES, stop=ends)
            if group is None or self._blocks.is_whole:
                target.add_checksums(sample_ids, slots)
                attempt.done[which] = True

        for which in _cut(places, rows_per_message(self._dataset.row_nbytes, DIRECT_NBYTES)):
            await self._reading.run(read, which)

    async def _ask(
        self,
        attempt: _Attempt,
        source: _Source,
        fetch: Callable[[_Source, Any], Awaitable[None]],
        fail: Callable[[_Source, Any, str, Exception], Awaitable[None]],
    ) -> None:
        """Fetch all that a source has to send, with a few requests at a time."""

        async def ask() -> None:
            while source.queue and not attempt.stopped:
                item, address = source.queue.popleft(), source.address
                try:
                    await fetch(source, item)
                except (OSError, DShuffleError) as error:
                    await fail(source, item, address, error)

        await _all_of([ask() for _ in range(IN_FLIGHT)], attempt)

    async def _announce(self, attempt: _Attempt, source: _Source) -> None:
        """Tell a reader which blocks it will be asked for."""
        load, address = attempt.load, source.address
        if not load.n_owners or source.announced_to == address:
            return
        source.announced_to = address
        blocks = sorted({request.block for request in source.queue} | source.asked)
        if address == self._worker.address:
            self._reader.announce(load.name, load.owner, load.n_owners, blocks)
        else:
            asked = {"load": load.name, "owner": load.owner, "block": -1, "numbers": np.array(blocks, np.int64)}
            unwrap(await self._answer(attempt, source, "block", asked), address)

    async def _announce_nothing(self, attempt: _Attempt, source: _Source) -> None:
        with contextlib.suppress(OSError, DShuffleError):  # the reader waits for a moment longer
            await self._announce(attempt, source)

    def _place(self, attempt: _Attempt, request: Request, which: Samples, reply: RowsReply) -> None:
        """Verify rows, and copy them to their slots."""
        blocks, target, rows, slots = self._blocks, attempt.target, reply.rows, attempt.slots[which]
        if blocks.is_whole:
            target.unpack(attempt.sample_ids[which], slots, rows, reply.checksums)
            attempt.done[which] = True
        elif not blocks.is_intact(request, rows, reply.checksums):
            raise ChecksumMismatch(f"rows of block {request.block} of the store arrived corrupted")
        else:
            blocks.place(request, rows, target.rows, slots)
            target.relieve()

    async def _rows(
        self,
        attempt: _Attempt,
        source: _Source,
        here: Callable[..., Coroutine[Any, Any, RowsReply | Later]],
        operation: str,
        asked: Mapping[str, Any],
    ) -> RowsReply:
        """Request rows of a source until it has them, which may be this worker (``here``)."""
        address, began = source.address, asyncio.get_running_loop().time()
        while True:
            if address == self._worker.address:
                reply = await self._until(attempt, source, here(*asked.values()))
                if isinstance(reply, RowsReply):
                    return reply
            else:
                fields = await self._answer(attempt, source, operation, asked)
                if not (isinstance(fields, dict) and fields.get("status") == "later"):
                    rows = from_fields(unwrap(fields, address), address)
                    assert isinstance(rows, RowsReply)
                    rows = await received(self._worker, rows)
                    self.received_bytes += rows.nbytes
                    return rows
            if asyncio.get_running_loop().time() - max(began, source.since) > LATE_AFTER:
                raise ExchangeError(f"{address} has sent no rows for {LATE_AFTER:g} s")

    async def _answer(self, attempt: _Attempt, source: _Source, operation: str, asked: Mapping[str, Any]) -> Any:
        """The fields of the answer of another worker, within the time in which a source must answer."""
        of_load = {"session_id": self._spec.session_id, "n_owners": attempt.load.n_owners} if "load" in asked else {}
        asking = request(self._worker, source.address, operation, **of_load, **asked)
        return await self._until(attempt, source, within(answer_limit(self._spec.settings), asking))

    async def _until(self, attempt: _Attempt, source: _Source, call: Coroutine[Any, Any, T]) -> T:
        """The answer to a request, unless the load ends or another reader takes the place of this one."""
        asking, address = asyncio.ensure_future(call), source.address
        try:
            while not (await asyncio.wait([asking], timeout=LOOK_EVERY))[0]:
                if attempt.stopped:
                    raise _stopped()
                if source.address != address:
                    raise ExchangeError(f"{address} is late")
            return asking.result()
        finally:
            asking.cancel()

    async def _replace(self, attempt: _Attempt, source: _Source, reason: str) -> None:
        """Let another worker read what a reader has not sent. The scheduler names it, the same one to all."""
        named = self._worker.scheduler.dshuffle_reader(
            session_id=self._spec.session_id, load=attempt.load.name, address=source.address, reason=reason
        )
        source.address = message_in(await within(answer_limit(self._spec.settings), named), str, "the scheduler")


async def _all_of(work: Sequence[Awaitable[None]], attempt: _Attempt) -> None:
    """Run all at a time. The first error ends the others, and is raised when none of them writes to slots any more."""

    async def run(part: Awaitable[None]) -> None:
        try:
            await part
        except BaseException as error:
            attempt.cause = attempt.cause or error
            raise

    await asyncio.gather(*map(run, work), return_exceptions=True)
    if attempt.cause is not None:
        raise attempt.cause
    if attempt.stop():  # some parts may have ended early
        raise _stopped()


def _stopped() -> ExchangeError:
    return ExchangeError("loading was stopped: the run has ended")


def _room(nbytes: int) -> asyncio.Semaphore:
    """Room for requests of at most so many bytes of rows at a time."""
    return asyncio.Semaphore(max(1, IN_FLIGHT_NBYTES // max(1, nbytes)))


def _cut(places: Samples, at_most: int) -> list[Samples]:
    return [places[first : first + at_most] for first in range(0, len(places), at_most)]


def answer_limit(settings: Settings) -> float:
    """Seconds in which a source must answer a request."""
    return min(settings.timeout, SILENT_HEARTBEATS * settings.heartbeat)


def readers_of(addresses: Mapping[int, str]) -> tuple[str, ...]:
    """Addresses of the ranks, which read the store together."""
    return tuple(addresses[rank] for rank in sorted(addresses) if rank >= 0)


READING_NBYTES = 64 * MIB
"""Bytes of blocks in memory."""

READING_COST = 3
"""How often a block counts while it is read: stored, decoded, and as rows."""

ABANDONED_AFTER = 2.0
"""Seconds after which a block makes room although a worker may still come for it."""


@dataclass(slots=True, eq=False)
class _SharedLoad:
    """Who has said what it needs, and block -> participants that have not fetched their rows yet."""

    name: str = ""
    n_owners: int = 0
    owners: set[int] = field(default_factory=set)
    waiting: dict[int, set[int]] = field(default_factory=dict)
    ahead: list[int] = field(default_factory=list)  # a heap of blocks to be read

    def expects(self, block: int) -> bool:
        """Whether a participant will fetch rows of a block, or may say that it will."""
        return block in self.waiting and (bool(self.waiting[block]) or len(self.owners) < self.n_owners)


@dataclass(slots=True, eq=False)
class _Held:
    """A block in memory, or being read."""

    future: asyncio.Future[Block]
    nbytes: int
    used: float


class StoreReader:
    """What one worker reads of the store in a session.

    Blocks are read in ascending order, ahead of the requests for their rows, as far as memory allows. A block is
    dropped once every worker of the load has fetched its rows. Rows that no load announces, such as those of a slow
    sender, are read on request, and stay until others need room or the next epoch begins, for other workers that need
    rows of the same block. A request must be answered within ``limit`` seconds.
    """

    def __init__(self, blocks: RowBlocks, reading: JobQueue, jobs: JobQueue, limit: float) -> None:
        self.sent_bytes = 0
        self._blocks, self._reading, self._jobs, self._limit = blocks, reading, jobs, limit
        self._load = _SharedLoad()
        self._past: set[str] = set()  # names of loads that have ended
        self._held: dict[int, _Held] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def stop_load(self) -> None:
        """Read nothing ahead for the load under way. Its blocks stay for another attempt."""
        self._past.add(self._load.name)
        self._load = _SharedLoad()

    def end_load(self) -> None:
        """Drop the blocks of the load that has ended."""
        self.stop_load()
        self._drop([block for block, held in self._held.items() if held.future.done()])

    def close(self) -> None:
        """Drop all blocks, and read no more."""
        self._closed = True
        self.end_load()
        self._held.clear()

    def announce(self, load: str, owner: int, n_owners: int, blocks: Sequence[int]) -> None:
        """Note that a participant will fetch rows of these blocks."""
        if load in self._past or self._closed:  # the message is late
            return
        if self._load.name != load:
            self.stop_load()
            self._load = _SharedLoad(load, n_owners)
        known = self._load
        known.owners.add(owner)
        for block in blocks:
            if block not in known.waiting:
                known.waiting[block] = set()
                heapq.heappush(known.ahead, block)
            known.waiting[block].add(owner)
        if len(known.owners) >= n_owners:
            self._drop([b for b, held in self._held.items() if held.future.done() and not known.expects(b)])
        self._read_ahead()

    async def rows(self, load: str, owner: int, block: int, places: NDArray[np.uint32]) -> RowsReply | Later:
        """Rows of a block, for a participant of a load; ``places`` count from the first row of the block."""
        try:
            async with asyncio.timeout(min(ANSWER_AFTER, self._limit / 3)):
                held = await self._when_read(block)
        except TimeoutError:
            return Later()
        if self._closed:
            raise ExchangeError("the session was closed")
        items = self._blocks.first_item(block) + places.astype(np.int64)
        data = held.future.result()
        rows, checksums = await self._jobs.run(data.gather, items, nbytes=len(items) * data.rows.shape[1])
        held.used = asyncio.get_running_loop().time()
        if self._load.name == load and block in self._load.waiting:
            self._load.waiting[block].discard(owner)
            if not self._load.expects(block):
                self._drop([block])
                self._read_ahead()
        return RowsReply(rows, checksums)

    async def _when_read(self, block: int) -> _Held:
        """Wait for room, and until a block has been read."""
        while (held := self._held.get(block)) is None:
            if self._closed:
                raise ExchangeError("the session was closed")
            if self._has_room(block):
                held = self._read(block)
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), ABANDONED_AFTER)
        held.used = asyncio.get_running_loop().time()
        await asyncio.wait([held.future])
        return held

    def _drop(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._held.pop(block, None)
        self._wake()

    def _read_ahead(self) -> None:
        known = self._load
        while known.ahead and not self._closed:
            block = known.ahead[0]
            if block not in self._held and known.expects(block):
                if not self._has_room(block):
                    return
                self._read(block)
            heapq.heappop(known.ahead)

    def _read(self, block: int) -> _Held:
        loop = asyncio.get_running_loop()
        nbytes = self._blocks.nbytes(block)
        future = self._reading.run(self._blocks.read, block, lambda: self._closed)
        held = self._held[block] = _Held(future, READING_COST * nbytes, loop.time())

        def read(future: asyncio.Future[Block]) -> None:
            held.nbytes, held.used = nbytes, loop.time()
            if not has_result(future) and self._held.get(block) is held:  # another request tries again
                del self._held[block]
            self._wake()
            self._read_ahead()

        future.add_done_callback(read)
        return held

    def _has_room(self, block: int) -> bool:
        """Whether a block may be read now. Blocks that nobody comes for make room."""
        now, needed = asyncio.get_running_loop().time(), READING_COST * self._blocks.nbytes(block)

        def fits() -> bool:
            return not self._held or needed + sum(held.nbytes for held in self._held.values()) <= READING_NBYTES

        reads = any(not held.future.done() for held in self._held.values())
        if fits() or (not reads and block < min(self._held)):  # it is needed before those that are held
            return True
        waiting = self._load.waiting
        for number, held in list(self._held.items()):
            patience = ABANDONED_AFTER * (5 if self._load.expects(number) else 1)
            if held.future.done() and now - held.used > patience:
                gone = set(waiting.get(number, ()))  # they have left, or ask another reader
                for owners in waiting.values():
                    owners -= gone
                del self._held[number]
                if fits():
                    return True
        return False

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


BLOCK_BYTES = 8 * MIB


class ServerRows:
    """The server's rows: blocks of consecutive samples, kept in memory up to a budget.

    What stays in memory comes with the load of the first partitions, in which each chunk is read once for all. An
    uncoded plan is in ascending sample order (`planning/delivery/definition.py`), so all destinations move through the
    dataset together, block after block. The first blocks stay in memory, and the others pass through a small window:
    each chunk beyond the budget is read once per epoch, independent of the number of workers. A packet XORs samples
    from anywhere in the dataset, so coded plans need all blocks in memory.

    Parameters
    ----------
    budget
        Maximum bytes of rows to keep; ``None`` keeps all rows.
    window_bytes
        Maximum bytes of rows on their way to the receivers. The moving window holds this much if the budget allows.
    whole
        Whether all rows must be kept, in order to encode packets.
    """

    def __init__(self, dataset: Dataset, *, budget: int | None, window_bytes: int, whole: bool = False) -> None:
        self._dataset = dataset
        row_bytes = dataset.row_nbytes + SLOT_OVERHEAD
        # Blocks are whole chunks of the array with the widest rows. A chunk of labels may span the whole dataset.
        chunk_rows = max(dataset.arrays.values(), key=lambda a: a.dtype.itemsize * math.prod(a.shape)).chunk_rows
        self._block_rows = max(1, -(-BLOCK_BYTES // row_bytes // chunk_rows)) * chunk_rows
        n_blocks = -(-dataset.n_samples // self._block_rows)
        block_bytes = min(self._block_rows, dataset.n_samples) * row_bytes
        fitting = n_blocks if budget is None else min(n_blocks, budget // block_bytes)
        least = n_blocks if whole else min(3, n_blocks)
        if fitting < least:
            what = "a coded delivery" if whole else "the server"
            raise CacheBudgetError(
                f"{what} needs {least} blocks of {block_bytes} bytes in the server's memory; memory_limit leaves "
                f"{budget} bytes. Raise it, serve from a worker with more memory, or use the delivery 'peer'"
            )
        n_moving = 0 if fitting == n_blocks else min(fitting, max(3, -(-window_bytes // block_bytes) + 2))
        self._n_resident = fitting - n_moving
        # One matrix, so that packets can be encoded from any rows. Pages that are never written do not take memory.
        n_rows = min(self._n_resident * self._block_rows, dataset.n_samples)
        self._kept = CachePartition(dataset.layout, capacity=n_rows, incoming=0)
        self._loaded = np.zeros(n_rows, np.bool_)
        self._moving = functools.lru_cache(n_moving)(self._read)
        self._lock = threading.Lock()
        self._closed = False

    async def load(self, bring: Callable[..., Awaitable[None]], stop: Stop) -> None:
        """Load the rows that stay in memory, together with the workers that load their partitions."""
        samples = np.arange(len(self._loaded))
        await bring(self._kept, samples, samples, stop, done=self._loaded)

    def pack(self, sample_ids: Samples, rows: ByteMatrix, checksums: Checksums) -> None:
        """Copy rows and checksums of samples into buffers, in the given order. Each block is looked up once."""
        blocks = sample_ids // self._block_rows
        order = np.argsort(blocks, kind="stable")
        present, starts = np.unique(blocks[order], return_index=True)
        for number, places in zip(present.tolist(), np.split(order, starts[1:]), strict=True):
            block, block_checksums = self._block(number)
            at = sample_ids[places] - number * self._block_rows
            rows[places] = block[at]
            checksums[places] = block_checksums[at]

    def encoded(self, plan: Packets, packets: Samples) -> RowSource:
        """Some packets of a plan, as a source. Waits until all rows are in memory."""
        for number in range(self._n_resident):
            self._block(number)
        kept = self._kept
        return leaving(functools.partial(encode, kept.rows, kept.checksums, plan.offsets, plan.samples), packets)

    def close(self) -> None:
        """Drop all rows, once a read that is under way has ended."""
        with self._lock:
            if not self._closed:
                self._closed = True
                del self._moving  # with its blocks, and its reference to this object
                self._kept.close()

    def _block(self, number: int) -> tuple[ByteMatrix, Checksums]:
        """The rows of a block, which is read if it is not in memory."""
        part = slice(number * self._block_rows, (number + 1) * self._block_rows)
        with self._lock:
            if self._closed:
                raise ExchangeError("the session was closed")
            if number >= self._n_resident:
                return self._moving(number)
            if not self._loaded[part].all():
                self._kept.rows[part], self._kept.checksums[part] = self._read(number)
                self._loaded[part] = True
            return self._kept.rows[part], self._kept.checksums[part]

    def _read(self, number: int) -> tuple[ByteMatrix, Checksums]:
        first = number * self._block_rows
        sample_ids = np.arange(first, min(first + self._block_rows, self._dataset.n_samples))
        rows = self._dataset.layout.empty(len(sample_ids))
        self._dataset.read_into(rows, np.arange(len(rows)), sample_ids)
        self._dataset.check_unchanged()
        return rows, checksum_rows(rows, sample_ids)
