"""A chunk cache that persists between epochs, up to a fixed number of bytes.

The cache fills up and then does not change. An epoch reads each chunk once, so the chunk used last is the one that is
needed again last. Evicting the least recently used chunk would drop every chunk just before it is read again, and the
cache would have no hits until it holds everything. A fixed cache has hits in proportion to its size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from dask.utils import parse_bytes
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype

from dshuffle.errors import InvalidParameter
from dshuffle.records import StoreTraffic
from dshuffle.store.backends.metered import Meter
from dshuffle.store.backends.wrapper import Wrapper

ChunkRequest = tuple[str, ByteRequest | None]


class ChunkCache(Wrapper):
    """A store that keeps its first answers in memory.

    Parameters
    ----------
    store
        Store that chunks are fetched from.
    nbytes
        Capacity in bytes.
    meter
        Meter that counts hits.
    """

    def __init__(self, store: Store, nbytes: int, meter: Meter) -> None:
        super().__init__(store)
        self._room = nbytes
        self.nbytes = nbytes
        self._meter = meter
        self._kept: dict[tuple[str, str], Buffer] = {}
        self._lock = threading.Lock()

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return a chunk from memory, or fetch it from the store."""
        return (await self.get_partial_values(prototype, [(key, byte_range)]))[0]

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[ChunkRequest]
    ) -> list[Buffer | None]:
        """Return several chunks from memory, and fetch the missing ones from the store."""
        requests = list(key_ranges)
        answers = [self._kept.get(_name(each)) for each in requests]
        missing = [each for each, answer in zip(requests, answers, strict=True) if answer is None]
        if len(missing) < len(requests):
            self._meter.add(StoreTraffic(cache_hits=len(requests) - len(missing)))
        if len(missing) == 1:
            fetched = iter([await self._store.get(missing[0][0], prototype, missing[0][1])])
        elif missing:
            fetched = iter(await self._store.get_partial_values(prototype, missing))
        else:
            return answers
        for at, answer in enumerate(answers):
            if answer is None:
                answers[at] = answer = next(fetched)
                self._keep(requests[at], answer)
        return answers

    def forget(self) -> None:
        """Empty the cache. Called when a chunk is damaged, so that the next attempt fetches it again."""
        with self._lock:
            self._kept.clear()
            self._room = self.nbytes

    def _keep(self, request: ChunkRequest, answer: Buffer | None) -> None:
        with self._lock:
            if answer is not None and len(answer) <= self._room and _name(request) not in self._kept:
                self._kept[_name(request)] = answer
                self._room -= len(answer)


def cache_nbytes(chunk_cache: int | str | None) -> int:
    """Parse the size of a chunk cache, in bytes.

    Examples
    --------
    >>> cache_nbytes("256 MiB"), cache_nbytes(None)
    (268435456, 0)
    """
    if chunk_cache is None:
        return 0
    try:
        nbytes = -1 if isinstance(chunk_cache, bool) else parse_bytes(chunk_cache)
    except (ValueError, TypeError, AttributeError):
        nbytes = -1
    if nbytes < 0:
        raise InvalidParameter.of("chunk_cache", chunk_cache, 'a number of bytes >= 0, for example 2**28 or "256 MiB"')
    return nbytes


def _name(request: ChunkRequest) -> tuple[str, str]:
    # Zarr's requests can be hashed from 3.1.6 on.
    return request[0], repr(request[1])
