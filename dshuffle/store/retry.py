"""A store that asks again when an error may pass, gives up within a bounded time, and says what it asked for.

All stores are wrapped in it, S3 too, instead of leaving that to obstore: so the number of attempts, their time and
the message are the same for a mounted file system, S3 and NFS, and can be counted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import WrapperStore

from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.store.failures import explained, is_transient

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0

T = TypeVar("T")


class WrongRange(Exception):
    """A store answered a request for a range of bytes with too many or too few."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long a store is asked.

    Parameters
    ----------
    max_retries
        Attempts after the first one.
    timeout
        Seconds that an attempt may take (for S3: without a single byte coming in). No attempt begins later than
        twice this after the first one, so a store that has gone silent ends in an error after three times this.
    """

    max_retries: int = 7
    timeout: float = 60.0

    def __post_init__(self) -> None:
        retries, timeout = self.max_retries, self.timeout
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise InvalidParameter.of("storage_options['max_retries']", retries, "an integer >= 0")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise InvalidParameter.of("storage_options['timeout']", timeout, "a positive number of seconds")

    @classmethod
    def of(cls, storage_options: Mapping[str, Any] | None) -> tuple[Self, dict[str, Any]]:
        """Take ``max_retries`` and ``timeout`` out of storage options; the others are the store's."""
        rest = dict(storage_options or {})
        given = {name: rest.pop(name) for name in ("max_retries", "timeout") if name in rest}
        return cls(**given), rest


class RetryingStore(WrapperStore[Store]):
    """Ask again after errors that may pass; what remains is a :class:`~dshuffle.errors.DatasetError`.

    It also checks the length of what a request for a range was answered with, since a server that ignores ranges
    would otherwise pass off other rows for those wanted.

    Parameters
    ----------
    store
        The store to wrap.
    url
        Its name in errors.
    patience
        How often and how long.
    limit
        Seconds for the whole of an attempt; ``None`` if the store ends its attempts by itself.
    secrets
        Values that must not appear in errors.
    on_retry
        Called before each further attempt.
    batch_nbytes
        Bytes of small objects that are best asked for in one call; 0 if one by one.
    """

    def __init__(
        self,
        store: Store,
        url: str,
        patience: Patience,
        *,
        limit: float | None = None,
        secrets: tuple[str, ...] = (),
        on_retry: Callable[[], None] | None = None,
        batch_nbytes: int = 0,
    ) -> None:
        super().__init__(store)
        self.batch_nbytes = batch_nbytes
        self._url = url
        self._patience = patience
        self._limit = limit
        self._secrets = secrets
        self._on_retry = on_retry

    def _with_store(self, store: Store) -> Self:
        return type(self)(
            store,
            self._url,
            self._patience,
            limit=self._limit,
            secrets=self._secrets,
            on_retry=self._on_retry,
            batch_nbytes=self.batch_nbytes,
        )

    def with_read_only(self, read_only: bool = False) -> Self:
        """The same store, with or without writing."""
        return self._with_store(self._store.with_read_only(read_only))

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    async def _insist(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        started, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            try:
                async with asyncio.timeout(self._limit):
                    return await ask()
            except (DatasetError, MemoryError):
                raise
            except Exception as exc:
                taken = time.monotonic() - started
                last = attempt > self._patience.max_retries or taken >= 2 * self._patience.timeout
                if last or not is_transient(exc):
                    silent = isinstance(exc, TimeoutError) and not str(exc)
                    said = f"no answer within {self._limit:g} s" if silent else explained(exc, self._secrets)
                    often = f"; tried {attempt} times in {taken:.1f} s" if attempt > 1 else ""
                    # Not chained: the original's text may hold secrets, and a traceback would print it.
                    raise DatasetError(f"cannot {what} of {self._url}: {said}{often}") from None
            if self._on_retry is not None:
                self._on_retry()
            await asyncio.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempt - 1)) * random.uniform(0.5, 1))

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Fetch an object, or the range of it that was asked for and nothing else."""
        answer = await self._insist(f"fetch {key}", lambda: self._store.get(key, prototype, byte_range))
        self._check(key, byte_range, answer)
        return answer

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Fetch several objects or ranges; again all of them, if one of them failed."""
        wanted = list(key_ranges)
        what = f"fetch {wanted[0][0]}" + (f" to {wanted[-1][0]}" if len(wanted) > 1 else "")
        answers = await self._insist(what, lambda: self._store.get_partial_values(prototype, wanted))
        for (key, byte_range), answer in zip(wanted, answers, strict=True):
            self._check(key, byte_range, answer)
        return answers

    def _check(self, key: str, byte_range: ByteRequest | None, answer: Buffer | None) -> None:
        if answer is None or byte_range is None:
            return
        if isinstance(byte_range, RangeByteRequest):
            wanted = byte_range.end - byte_range.start
            right = len(answer) == wanted
        elif isinstance(byte_range, SuffixByteRequest):
            wanted = byte_range.suffix
            right = len(answer) <= wanted
        else:
            return
        if not right:
            raise WrongRange(
                f"a request for {wanted} bytes of {key} was answered with {len(answer)}; the object has been cut off, "
                "or the server answers range requests wrongly"
            )

    async def exists(self, key: str) -> bool:
        """Whether an object is there."""
        return await self._insist(f"look for {key}", lambda: self._store.exists(key))

    async def set(self, key: str, value: Buffer) -> None:
        """Write an object; writing it again changes nothing."""
        await self._insist(f"write {key}", lambda: self._store.set(key, value))

    async def delete(self, key: str) -> None:
        """Delete an object."""
        await self._insist(f"delete {key}", lambda: self._store.delete(key))

    async def delete_dir(self, prefix: str) -> None:
        """Delete all objects below a prefix."""
        await self._insist(f"delete {prefix or 'all'}", lambda: self._store.delete_dir(prefix))

    async def is_empty(self, prefix: str) -> bool:
        """Whether no object is below a prefix."""
        return await self._insist(f"list {prefix or 'the top'}", lambda: self._store.is_empty(prefix))

    async def _listed(self, what: str, begin: Callable[[], AsyncIterator[str]]) -> AsyncIterator[str]:
        async def collect() -> list[str]:
            return [name async for name in begin()]

        for name in await self._insist(f"list {what or 'the top'}", collect):
            yield name

    def list(self) -> AsyncIterator[str]:
        """All keys."""
        return self._listed("", self._store.list)

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """All keys below a prefix."""
        return self._listed(prefix, lambda: self._store.list_prefix(prefix))

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Names directly below a prefix."""
        return self._listed(prefix, lambda: self._store.list_dir(prefix))
