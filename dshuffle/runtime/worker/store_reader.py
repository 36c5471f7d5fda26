"""Reads the blocks of the store that are this worker's to read, once for all workers that need rows of them."""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import DatasetError, ExchangeError
from dshuffle.exchange.comms import Later, RowsReply
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.messages import MIB
from dshuffle.store.row_blocks import Block, RowBlocks

READING_NBYTES = 64 * MIB
"""Bytes of blocks in memory."""

READING_COST = 3
"""How often a block counts while it is read: stored, decoded, and as rows."""

ANSWER_AFTER = 10.0
"""Seconds after which a request that has to wait is answered with :class:`.Later`, so that it is made again."""

ABANDONED_AFTER = 2.0
"""Seconds after which a block makes room although a worker may still come for it."""


@dataclass(slots=True, eq=False)
class _Load:
    """Who has said what it needs, and block -> participants that have not fetched their rows yet."""

    name: str
    n_owners: int
    owners: set[int] = field(default_factory=set)
    waiting: dict[int, set[int]] = field(default_factory=dict)
    ahead: list[int] = field(default_factory=list)  # blocks to be read, ascending
    failure: DatasetError | None = None  # another attempt would find the same

    @property
    def is_known(self) -> bool:
        """Whether all participants have said what they need."""
        return len(self.owners) >= self.n_owners

    def expects(self, block: int) -> bool:
        """Whether a participant will fetch rows of a block, or may say that it will."""
        return block in self.waiting and (bool(self.waiting[block]) or not self.is_known)


@dataclass(slots=True, eq=False)
class _Held:
    """A block in memory, or being read."""

    future: asyncio.Future[Block]
    nbytes: int
    used: float


@dataclass(eq=False)
class StoreReader:
    """What one worker reads of the store in a session.

    Blocks are read in ascending order, ahead of the requests for their rows, as far as memory allows. A block is
    dropped once every worker of the load has fetched its rows. Rows that no load announces, such as those of a slow
    sender, are read on request, and stay for a moment in case other workers need rows of the same block.

    Parameters
    ----------
    blocks
        The blocks of the dataset.
    reading, jobs
        Threads that read, and threads that copy rows.
    limit
        Seconds in which a request must be answered.
    """

    blocks: RowBlocks
    reading: JobQueue
    jobs: JobQueue
    limit: float
    sent_bytes: int = 0

    def __post_init__(self) -> None:
        self._load: _Load | None = None
        self._past: set[str] = set()  # names of loads that have ended
        self._held: dict[int, _Held] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def stop_load(self) -> None:
        """Read nothing ahead for the load under way. Its blocks stay for another attempt."""
        if self._load is not None:
            self._past.add(self._load.name)
            self._load = None

    def end_load(self) -> None:
        """Drop the blocks of the load that has ended."""
        self.stop_load()
        self._held = {block: held for block, held in self._held.items() if not held.future.done()}
        self._wake()

    def close(self) -> None:
        """Drop all blocks, and read no more."""
        self._closed = True
        self.end_load()
        self._held.clear()

    def announce(self, load: str, owner: int, n_owners: int, blocks: Sequence[int]) -> None:
        """Note that a participant will fetch rows of these blocks, which are ascending."""
        if load in self._past or self._closed:  # the message is late
            return
        if self._load is None or self._load.name != load:
            self.stop_load()
            self._load = _Load(load, n_owners)
        known = self._load
        known.owners.add(owner)
        for block in blocks:
            if block not in known.waiting:
                known.waiting[block] = set()
                bisect.insort(known.ahead, block)
            known.waiting[block].add(owner)
        if known.is_known:
            for block in [block for block, held in self._held.items() if held.future.done()]:
                if not known.expects(block):
                    del self._held[block]
            self._wake()
        self._read_ahead()

    async def rows(self, load: str, owner: int, block: int, places: NDArray[np.uint32]) -> RowsReply | Later:
        """Rows of a block, for a participant of a load; ``places`` count from the first row of the block."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(ANSWER_AFTER, self.limit / 3)
        while (held := self._held.get(block)) is None:
            self._check_open()
            if self._load is not None and self._load.name == load and self._load.failure is not None:
                raise self._load.failure
            if self._has_room(block):
                held = self._read(block)
                break
            if loop.time() >= deadline:
                return Later()
            await self._until_changed(min(ABANDONED_AFTER, deadline - loop.time()))
        held.used = loop.time()
        if not held.future.done():
            await asyncio.wait([held.future], timeout=max(0.0, deadline - loop.time()))
        self._check_open()
        if not held.future.done():
            return Later()
        items = self.blocks.first_item(block) + places.astype(np.int64)
        data = held.future.result()
        rows, checksums = await self.jobs.run(data.gather, items, nbytes=len(items) * data.rows.shape[1])
        held.used = loop.time()
        self._fetched(load, owner, block)
        return RowsReply(rows, checksums)

    def _check_open(self) -> None:
        if self._closed:
            raise ExchangeError("the session was closed")

    def _fetched(self, load: str, owner: int, block: int) -> None:
        known = self._load
        if known is None or known.name != load or block not in known.waiting:
            asyncio.get_running_loop().call_later(ABANDONED_AFTER, self._drop_idle, block)
            return
        known.waiting[block].discard(owner)
        if not known.expects(block):
            self._drop(block)

    def _drop(self, block: int) -> None:
        if self._held.pop(block, None) is not None:
            self._wake()
            self._read_ahead()

    def _drop_idle(self, block: int) -> None:
        """Drop a block that was read on request, unless it was used in the meantime or others will fetch it."""
        held, known = self._held.get(block), self._load
        idle = held is not None and asyncio.get_running_loop().time() >= held.used + ABANDONED_AFTER
        if idle and (known is None or not known.expects(block)):
            self._drop(block)

    def _read_ahead(self) -> None:
        known = self._load
        while known is not None and known.ahead and known.failure is None and not self._closed:
            block = known.ahead[0]
            if block not in self._held and known.expects(block):
                if not self._has_room(block):
                    return
                self._read(block)
            del known.ahead[0]

    def _read(self, block: int) -> _Held:
        loop = asyncio.get_running_loop()
        known, nbytes = self._load, self.blocks.nbytes(block)
        future = self.reading.run(self.blocks.read, block, lambda: self._closed)
        held = self._held[block] = _Held(future, READING_COST * nbytes, loop.time())

        def read(future: asyncio.Future[Block]) -> None:
            held.nbytes, held.used = nbytes, loop.time()
            error = None if future.cancelled() else future.exception()
            if (future.cancelled() or error) and self._held.get(block) is held:  # another request tries again
                del self._held[block]
            if isinstance(error, DatasetError) and not error.transient and known is not None:
                known.failure = error
            self._wake()
            if self._load is None and not self._closed:
                loop.call_later(ABANDONED_AFTER, self._drop_idle, block)
            self._read_ahead()

        future.add_done_callback(read)
        return held

    def _has_room(self, block: int) -> bool:
        """Whether a block may be read now. Blocks that nobody comes for make room."""
        now, needed = asyncio.get_running_loop().time(), READING_COST * self.blocks.nbytes(block)

        def fits() -> bool:
            return not self._held or needed + sum(held.nbytes for held in self._held.values()) <= READING_NBYTES

        reads = any(not held.future.done() for held in self._held.values())
        if fits() or (not reads and block < min(self._held)):  # it is needed before those that are held
            return True
        known = self._load
        for number, held in list(self._held.items()):
            expected = known is not None and known.expects(number)
            patience = 5 * ABANDONED_AFTER if expected else ABANDONED_AFTER
            if held.future.done() and now - held.used > patience:
                if known is not None:  # they have left, or ask another reader
                    gone = set(known.waiting.get(number, ()))
                    for owners in known.waiting.values():
                        owners -= gone
                del self._held[number]
                if fits():
                    return True
        return False

    async def _until_changed(self, seconds: float) -> None:
        waiting = asyncio.ensure_future(self._changed.wait())
        await asyncio.wait([waiting], timeout=max(0.0, seconds))
        waiting.cancel()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
