"""A store that counts requests and bytes read."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype

from dshuffle.emulated_links import emulated
from dshuffle.errors import DatasetError
from dshuffle.records import StoreTraffic
from dshuffle.store.backends.refusals import METADATA
from dshuffle.store.backends.retrying import WrongRange
from dshuffle.store.backends.wrapper import Wrapper

T = TypeVar("T")


class AbsentChunk(Exception):
    """A chunk of a complete dataset is missing from the store."""


class Meter:
    """A thread-safe running total of traffic."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traffic = StoreTraffic()

    def add(self, traffic: StoreTraffic) -> None:
        """Add traffic to the total."""
        with self._lock:
            self._traffic += traffic

    def count_retry(self) -> None:
        """Add one retry to the total."""
        self.add(StoreTraffic(retries=1))

    @property
    def traffic(self) -> StoreTraffic:
        """The total so far."""
        with self._lock:
            return self._traffic


class MeteredStore(Wrapper):
    """A store that counts requests for chunks and the bytes of the answers. Metadata is not counted.

    Parameters
    ----------
    store
        Store to wrap. It must be read-only; otherwise zarr would make a read-only copy without a meter.
    meter
        Meter to add the traffic to.

    Attributes
    ----------
    absent_is_error
        Whether a missing chunk raises an error. Zarr returns the fill value for a missing chunk. In a complete
        dataset this would turn a lost file into rows of zeros. The check does not cost a request.
    """

    def __init__(self, store: Store, meter: Meter) -> None:
        super().__init__(store)
        emulated("store")  # a wrong rate is refused now
        self._meter = meter
        self.absent_is_error = False
        self.batch_nbytes: int = getattr(store, "batch_nbytes", 0)

    def __str__(self) -> str:
        return str(self._store)

    @property
    def bare(self) -> Store:
        """The store without the meter."""
        return self._store

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Fetch an object and count it, unless it is metadata."""
        if key.rpartition("/")[2] in METADATA:
            return await self._store.get(key, prototype, byte_range)
        answer = await self._fetched(key, self._store.get(key, prototype, byte_range))
        await _through_link(answer)
        return self._count(key, answer)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Fetch several objects or ranges and count each as one request."""
        key_ranges = list(key_ranges)
        answers = await self._fetched(key_ranges[0][0], self._store.get_partial_values(prototype, key_ranges))
        await _through_link(*answers)
        return [self._count(key, answer) for (key, _), answer in zip(key_ranges, answers, strict=True)]

    async def _fetched(self, key: str, answer: Awaitable[T]) -> T:
        try:
            return await answer
        except (DatasetError, WrongRange, MemoryError):
            raise
        except Exception as exc:
            # The store failed (no permission, no network); this must not be reported as a corrupt chunk.
            raise DatasetError(f"cannot fetch {key} from {self._store}: {type(exc).__name__}: {exc}") from exc

    def _count(self, key: str, answer: Buffer | None) -> Buffer | None:
        self._meter.add(StoreTraffic(requests=1, fetched_bytes=0 if answer is None else len(answer)))
        if answer is None and self.absent_is_error:
            raise AbsentChunk(f"{key} is missing from the store")
        return answer


async def _through_link(*answers: Buffer | None) -> None:
    if (link := emulated("store")) is not None:
        await link.send(sum(len(answer) for answer in answers if answer is not None))
