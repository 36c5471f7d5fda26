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
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from distributed import Worker
from numpy.typing import NDArray

from dshuffle.errors import ChecksumMismatch, DatasetError, DShuffleError, ExchangeError
from dshuffle.exchange.comms import Later, RowsReply, received, request_block, request_rows, rows_from_fields
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.mailboxes import slow_senders
from dshuffle.exchange.messages import MIB, rows_per_message
from dshuffle.planning import ShuffleSpec, name_of
from dshuffle.planning.remainder import workers_of
from dshuffle.planning.types import group_by
from dshuffle.rows import ByteMatrix, Checksums
from dshuffle.runtime.dataset_inputs import with_data
from dshuffle.runtime.messages import message_in, unwrap, within
from dshuffle.runtime.session_spec import PartitionSources
from dshuffle.runtime.settings import Settings
from dshuffle.runtime.worker.store_reader import StoreReader
from dshuffle.store import Dataset
from dshuffle.store.row_blocks import Group, Request, RowBlocks

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 2 * MIB
"""Longest message of a former partition. Many workers may ask the same holder, and all must be answered in time."""

SILENT_HEARTBEATS = 4
"""Heartbeats within which a source must answer a request, if only that it needs more time."""

LOOK_EVERY = 0.5
"""Seconds between looks at whether the rows are still wanted, and whether readers are late."""

IN_FLIGHT = 2
"""Requests to a source at a time."""

IN_FLIGHT_NBYTES = 32 * MIB
"""Bytes of rows that are requested from all readers together, as far as one request does not have more."""

ATTEMPTS = 3
"""Requests for the same rows that may fail before a load does."""

DIRECT_NBYTES = 256 * MIB
"""Rows that a worker reads by itself at a time."""

T = TypeVar("T")
Samples = NDArray[np.int64]
Stop = Callable[[], bool]

LocalRows = Callable[[str, int, Samples], Awaitable[RowsReply]]
"""Returns rows of a session on this worker: its id, the epoch, and the samples."""


class Target(Protocol):
    """Where rows go: a cache partition, or the rows of a server."""

    rows: ByteMatrix

    def unpack(self, sample_ids: Samples, slots: Samples, rows: ByteMatrix, checksums: Checksums) -> None:
        """Verify rows, and copy them to their slots."""

    def add_checksums(self, sample_ids: Samples, slots: Samples) -> None:
        """Compute the checksums of rows that were written to their slots."""

    def relieve(self) -> None:
        """Give memory back, if rows are on a disk."""


@dataclass(frozen=True, slots=True)
class Load:
    """Who reads the store together, and for whom.

    Parameters
    ----------
    name
        Name of the load, the same for all who take part.
    owner, n_owners
        The participant that gets rows, and how many take part in the load. With 0, rows are read on request, and
        nobody announces what it needs.
    readers
        Addresses of the workers that read.
    alone
        Whether each sample goes to one participant only.
    """

    name: str
    owner: int
    n_owners: int
    readers: tuple[str, ...]
    alone: bool = False


@dataclass(slots=True, eq=False)
class _Reader:
    """A worker that reads, and the rows that it owes; another address takes its place if it is late."""

    address: str
    queue: deque[Request]
    owed: int
    arrived: int = 0
    seconds: float = 0.0  # until it had delivered everything
    since: float = 0.0  # when it took the place of another one, which had delivered so many rows
    before: int = 0
    announced_to: str = ""
    asked: set[int] = field(default_factory=set)  # blocks that are requested


@dataclass(eq=False)
class Loader:
    """Brings rows to one worker of a session.

    Parameters
    ----------
    worker
        Dask worker of this process.
    session_id
        Id of the session here.
    dataset, blocks, settings
        Dataset, its blocks, and settings of the session.
    jobs, reading
        Threads that unpack rows, and threads that read the store.
    reader
        What this worker reads for all.
    former
        Former partitions; None if there are none.
    rows_here
        Returns the rows of former partitions on this worker.
    """

    worker: Worker
    session_id: str
    dataset: Dataset
    blocks: RowBlocks
    settings: Settings
    jobs: JobQueue
    reading: JobQueue
    reader: StoreReader
    former: PartitionSources | None
    rows_here: LocalRows | None
    received_bytes: int = 0

    def __post_init__(self) -> None:
        self._window = asyncio.Semaphore(max(1, self.settings.window))
        self._unable: set[int] = set()  # holders of former partitions that are not asked any more
        self._ranks_of: Callable[[Samples], NDArray[np.int32]] | None = None
        self._looking_up = threading.Lock()

    def seconds_to_read(self, n_rows: int) -> float:
        """About how long all workers together take to read rows that are spread widely; infinite if unknown."""
        traffic = self.dataset.traffic
        if not traffic.seconds or not traffic.delivered_bytes:
            return float("inf")
        nbytes = sum(min(group.n_blocks, n_rows) * self.blocks.nbytes(group.first) for group in self.blocks.groups)
        return nbytes / self.blocks.n_readers * traffic.seconds / traffic.delivered_bytes

    async def bring(
        self,
        load: Load,
        target: Target,
        sample_ids: Samples,
        slots: Samples,
        stop: Stop,
        *,
        done: NDArray[np.bool_] | None = None,
        progress: Callable[[int], None] = lambda n_rows: None,
        former: bool = False,
    ) -> None:
        """Bring samples into reserved slots. Nothing writes to them once this has ended, with or without an error.

        Parameters
        ----------
        done
            ``(len(sample_ids),)`` rows that are there already. It is kept up to date, so that another attempt goes on.
        """
        done = np.zeros(len(sample_ids), np.bool_) if done is None else done
        attempt = _Attempt(load, target, sample_ids, slots, stop, done, progress)
        if former and self.former is not None:
            await self._bring_former(attempt, self.former)
        if stop():
            raise ExchangeError("loading was stopped: the run has ended")
        await self._bring_stored(attempt)
        if len(sample_ids):
            await self.reading.run(self.dataset.check_unchanged)

    async def _bring_stored(self, attempt: _Attempt) -> None:
        load, blocks = attempt.load, self.blocks
        readers = [_Reader(address, deque(), 0) for address in load.readers]

        def needed() -> tuple[Samples, list[Request], list[tuple[Group, Samples]]]:
            left = np.flatnonzero(~attempt.done)
            if not readers:
                return left, [], []
            requests, direct = blocks.requests(attempt.sample_ids[left], alone=load.alone)
            return left, requests, [(group, left[which]) for group, which in direct]

        left, requests, direct = await self.jobs.run(needed)
        if not readers:
            await self._read(attempt, self.dataset, left)
            return
        for request in requests:
            reader = readers[request.block % len(readers)]
            reader.queue.append(request)
            reader.owed += len(request.items)
        work = [self._read(attempt, group.samples, places, group) for group, places in direct]
        work += [self._ask_reader(attempt, reader, left) for reader in readers if reader.queue or load.n_owners > 1]
        watching = asyncio.ensure_future(self._watch(attempt, readers))
        try:
            await _all_of(work, attempt)
        finally:
            watching.cancel()
        if not blocks.is_whole and len(left):  # rows were put together from their parts
            await self.reading.run(lambda: attempt.target.add_checksums(attempt.sample_ids[left], attempt.slots[left]))
            attempt.done[left] = True

    async def _read(self, attempt: _Attempt, dataset: Dataset, places: Samples, group: Group | None = None) -> None:
        """Read rows that no other worker needs, of all arrays or of those of a group."""
        target, is_whole = attempt.target, group is None or self.blocks.is_whole

        def ends() -> bool:  # called before every chunk
            target.relieve()
            return attempt.stopped

        def read(which: Samples) -> None:
            sample_ids, slots = attempt.sample_ids[which], attempt.slots[which]
            dataset.read_into(target.rows, slots, sample_ids, memory_budget=IN_FLIGHT_NBYTES, stop=ends)
            if is_whole:
                target.add_checksums(sample_ids, slots)

        for which in _cut(places, rows_per_message(self.dataset.row_nbytes, DIRECT_NBYTES)):
            await self.reading.run(read, which)
            self._arrived(attempt, group, which)

    async def join(self, load: Load, target: Target) -> None:
        """Say that this participant needs nothing from a load that others take part in."""
        nothing = np.empty(0, np.int64)
        await self.bring(load, target, nothing, nothing, lambda: False)

    async def _announce(self, attempt: _Attempt, reader: _Reader) -> None:
        """Tell a reader which blocks it will be asked for."""
        if attempt.load.n_owners and reader.announced_to != reader.address:
            reader.announced_to = reader.address
            blocks = {request.block for request in reader.queue} | reader.asked
            await self._call(attempt, reader, -1, np.array(sorted(blocks), np.int64))

    async def _ask_reader(self, attempt: _Attempt, reader: _Reader, left: Samples) -> None:
        """Fetch what a reader owes, with two requests at a time."""

        async def ask() -> None:
            failures = 0
            while reader.queue and not attempt.stopped:
                address, request = reader.address, None
                try:
                    await self._announce(attempt, reader)
                    if not reader.queue:
                        return
                    request = reader.queue.popleft()
                    reader.asked.add(request.block)
                    await self._fetch(attempt, reader, request, left)
                    reader.asked.discard(request.block)
                    failures = 0
                except (OSError, DShuffleError) as error:
                    if request is not None:
                        reader.queue.appendleft(request)
                    failures += 1
                    lasts = isinstance(error, DatasetError) and not error.transient
                    if attempt.stopped or lasts or failures > ATTEMPTS:
                        raise
                    if reader.address == address and not isinstance(error, ChecksumMismatch):
                        await self._replace(attempt, reader, f"{type(error).__name__}: {error}")

        if reader.queue:
            await _all_of([ask() for _ in range(IN_FLIGHT)], attempt)
        else:
            with contextlib.suppress(OSError, DShuffleError):  # the reader waits for a moment longer
                await self._announce(attempt, reader)

    async def _fetch(self, attempt: _Attempt, reader: _Reader, request: Request, left: Samples) -> None:
        places = (request.items - self.blocks.first_item(request.block)).astype(np.uint32)
        is_here = reader.address == self.worker.address
        nbytes = len(places) * request.group.rows.layout.nbytes
        while attempt.in_flight and attempt.in_flight + nbytes > IN_FLIGHT_NBYTES:
            await attempt.freed.wait()
        attempt.in_flight += nbytes
        try:
            reply = await self._call(attempt, reader, request.block, places)
            if attempt.stopped:
                raise ExchangeError("loading was stopped: the run has ended")
            assert reply is not None
            await self._place(attempt, request, reply, left)
        finally:
            attempt.in_flight -= nbytes
            attempt.freed.set()
            attempt.freed = asyncio.Event()
        reader.arrived += len(request.items)
        if reader.arrived >= reader.owed:
            reader.seconds = time.perf_counter() - attempt.began
        if not is_here:
            self.received_bytes += reply.nbytes

    async def _place(self, attempt: _Attempt, request: Request, reply: RowsReply, left: Samples) -> None:
        """Verify rows, and copy them to their slots."""
        blocks, target = self.blocks, attempt.target
        which = left[request.places]
        samples, slots, rows, checksums = attempt.sample_ids[which], attempt.slots[which], reply.rows, reply.checksums

        def place() -> None:
            if blocks.is_whole:
                target.unpack(samples, slots, rows, checksums)
            elif not blocks.is_intact(request, rows, checksums):
                raise ChecksumMismatch(f"rows of block {request.block} of the store arrived corrupted")
            else:
                blocks.place(request, rows, target.rows, slots)
                target.relieve()

        await self.jobs.run(place, nbytes=rows.nbytes)
        self._arrived(attempt, request.group, which)

    def _arrived(self, attempt: _Attempt, group: Group | None, which: Samples) -> None:
        if group is None or self.blocks.is_whole:
            attempt.done[which] = True
            attempt.progress(len(which))
        elif group.first == 0:  # of rows in parts, most bytes are in the first group
            n_rows, attempt.n_parts = divmod(attempt.n_parts + len(which), len(group.window))
            attempt.progress(n_rows)

    async def _call(self, attempt: _Attempt, reader: _Reader, block: int, numbers: NDArray[Any]) -> RowsReply | None:
        """Request rows of a block, until its reader has read it; or announce blocks, with ``block=-1``."""
        load, address = attempt.load, reader.address
        while True:
            if address == self.worker.address:
                if block < 0:
                    self.reader.announce(load.name, load.owner, load.n_owners, numbers.tolist())
                    return None
                here = self.reader.rows(load.name, load.owner, block, numbers)
                reply: Any = await self._until(attempt, reader, address, here)
            else:
                fields: Any = await self._until(attempt, reader, address, self._request(load, address, block, numbers))
                if isinstance(fields, dict) and fields.get("status") == "later":
                    continue
                fields = unwrap(fields, address)
                if block < 0:
                    return None
                reply = await received(self.worker, rows_from_fields(fields, address))
            if not isinstance(reply, Later):
                assert isinstance(reply, RowsReply)
                return reply

    async def _request(self, load: Load, address: str, block: int, numbers: NDArray[Any]) -> object:
        query = {"load": load.name, "owner": load.owner, "n_owners": load.n_owners, "block": block}
        return await within(
            answer_limit(self.settings), request_block(self.worker, address, self.session_id, numbers, **query)
        )

    async def _until(self, attempt: _Attempt, reader: _Reader, address: str, call: Coroutine[Any, Any, T]) -> T:
        """The answer to a request, unless the load ends or another reader takes the place of this one."""
        asking = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([asking], timeout=LOOK_EVERY))[0]:
                if attempt.stopped:
                    raise ExchangeError("loading was stopped: the run has ended")
                if reader.address != address:
                    raise ExchangeError(f"{address} is late")
            return asking.result()
        finally:
            asking.cancel()

    async def _watch(self, attempt: _Attempt, readers: Sequence[_Reader]) -> None:
        """Let other workers read what late readers owe, by the rule for slow senders."""
        owing = [reader for reader in readers if reader.owed]
        while True:
            await asyncio.sleep(2 * LOOK_EVERY)
            now, ended = time.perf_counter(), [reader for reader in owing if reader.seconds]
            if not ended or 2 * len(ended) < len(owing):
                continue
            of_one_row = max(reader.seconds / reader.owed for reader in ended)
            for reader in owing:
                since = reader.since or attempt.began
                owed, arrived = {0: reader.owed - reader.before, 1: 0}, {0: reader.arrived - reader.before}
                if slow_senders(owed, arrived, seconds=now - since, seconds_to_read=of_one_row.__mul__):
                    reader.since, reader.before = now, reader.arrived
                    try:
                        await self._replace(attempt, reader, "its rows come too slowly")
                    except (OSError, DShuffleError) as error:
                        logger.debug("dshuffle: the reader stays: %s", error)

    async def _replace(self, attempt: _Attempt, reader: _Reader, reason: str) -> None:
        """Let another worker read what a reader owes. The scheduler names it, the same one to all."""
        reply = await within(
            answer_limit(self.settings),
            self.worker.scheduler.dshuffle_reader(
                session_id=self.session_id, load=attempt.load.name, address=reader.address, reason=reason
            ),
        )
        reader.address = message_in(reply, str, "the scheduler")

    async def _bring_former(self, attempt: _Attempt, former: PartitionSources) -> None:
        """Read rows from former partitions. Those that none of them can send are left."""
        sample_ids, slots = attempt.sample_ids, attempt.slots

        def needed() -> tuple[Samples, dict[int, deque[Samples]]]:
            left = np.flatnonzero(~attempt.done)
            return left, self._former_messages(former, sample_ids[left])

        left, messages = await self.jobs.run(needed)

        async def read(rank: int, places: Samples) -> None:
            reply = await self._ask_former(attempt, former, rank, sample_ids[places])
            rows, checksums, present = reply.rows, reply.checksums, reply.present
            if present is not None and not present.all():  # a kept partition may lack some
                places, rows, checksums = places[present], rows[present], checksums[present]
            unpack = attempt.target.unpack
            await self.jobs.run(unpack, sample_ids[places], slots[places], rows, checksums, nbytes=rows.nbytes)
            attempt.done[places] = True
            attempt.progress(len(places))
            if former.holders[rank][0] != self.worker.address:
                self.received_bytes += rows.nbytes + checksums.nbytes

        async def read_all(rank: int, queue: deque[Samples]) -> None:
            while True:
                async with self._window:
                    if not queue or rank in self._unable or attempt.stopped:
                        return
                    places = left[queue.popleft()]
                    try:
                        await read(rank, places)
                    except (OSError, DShuffleError) as error:
                        if rank not in self._unable and not attempt.stopped:
                            self._unable.add(rank)
                            reason = f"{type(error).__name__}: {error}"
                            logger.warning("dshuffle: rows of %s are read from the dataset (%s)", name_of(rank), reason)

        # No holder that hangs takes the whole window, and none packs many messages at a time.
        await _all_of([read_all(*item) for _ in range(IN_FLIGHT) for item in messages.items()], attempt)

    def _former_messages(self, former: PartitionSources, sample_ids: Samples) -> dict[int, deque[Samples]]:
        """Holder -> places of the samples of each message. Every worker has another order of holders."""
        holders = sorted(former.holders)
        if former.shuffle is None:
            [rank] = holders
            places = {rank: np.arange(len(sample_ids))}
        else:
            ranks = self._look_up(former.shuffle, former.epoch)(sample_ids)
            order, offsets = group_by(ranks, former.shuffle.n_workers)
            places = {rank: order[offsets[rank] : offsets[rank + 1]] for rank in holders}
        at_most = rows_per_message(self.dataset.row_nbytes, min(MESSAGE_BYTES, self.settings.message_bytes))
        first = zlib.crc32(self.worker.address.encode()) % max(1, len(holders))
        return {rank: deque(_cut(places[rank], at_most)) for rank in (*holders[first:], *holders[:first])}

    def _look_up(self, shuffle: ShuffleSpec, epoch: int) -> Callable[[Samples], NDArray[np.int32]]:
        """What tells the ranks of samples. If all of them have to be planned for that, this is done once."""
        with self._looking_up:
            if self._ranks_of is None:
                shuffle = with_data(shuffle, self.dataset)
                self._ranks_of = shuffle.ranks_at(epoch)
            if self._ranks_of is None:
                self._ranks_of = workers_of(shuffle, epoch, np.arange(shuffle.n_samples)).__getitem__
            return self._ranks_of

    async def _ask_former(
        self, attempt: _Attempt, former: PartitionSources, rank: int, sample_ids: Samples
    ) -> RowsReply:
        address, session_id = former.holders[rank]
        if address == self.worker.address:
            assert self.rows_here is not None
            return await self.rows_here(session_id, former.epoch, sample_ids)

        async def request() -> RowsReply:
            asking = request_rows(self.worker, address, session_id, former.epoch, sample_ids)
            fields = unwrap(await within(answer_limit(self.settings), asking), address)
            return await received(self.worker, rows_from_fields(fields, address))

        return await self._until(attempt, _Reader(address, deque(), 0), address, request())


@dataclass(slots=True, eq=False)
class _Attempt:
    """The arguments of :meth:`Loader.bring`, and whether a part of it has failed."""

    load: Load
    target: Target
    sample_ids: Samples
    slots: Samples
    stop: Stop
    done: NDArray[np.bool_]
    progress: Callable[[int], None]
    began: float = field(default_factory=time.perf_counter)
    cause: BaseException | None = None
    in_flight: int = 0  # bytes of rows that are requested
    n_parts: int = 0  # parts of windows that have arrived, beyond whole windows
    freed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def stopped(self) -> bool:
        """Whether the rows are no longer wanted, or cannot all be brought."""
        return self.cause is not None or self.stop()


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
        raise ExchangeError("loading was stopped: the run has ended")


def _cut(places: Samples, at_most: int) -> list[Samples]:
    return [places[first : first + at_most] for first in range(0, len(places), at_most)]


def answer_limit(settings: Settings) -> float:
    """Seconds in which a source must answer a request."""
    return min(settings.timeout, SILENT_HEARTBEATS * settings.heartbeat)


def readers_of(addresses: Mapping[int, str]) -> tuple[str, ...]:
    """Addresses of the ranks, which read the store together."""
    return tuple(addresses[rank] for rank in sorted(addresses) if rank >= 0)
