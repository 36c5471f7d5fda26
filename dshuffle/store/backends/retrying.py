"""Retries: a store that repeats requests after transient errors, gives up within a bounded time and reports why.

This module also decides which errors are transient and removes secrets from error messages. It wraps all stores except
``memory://``, including S3, although obstore could retry on its own. So mounted file systems and S3 share the
number of attempts, the time limits and the messages, and retries can be counted.
"""

from __future__ import annotations

import asyncio
import errno
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.redaction import hide_secrets
from dshuffle.store.backends.refusals import AccessRefused, is_refusal
from dshuffle.store.backends.wrapper import Wrapper

_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_TRANSIENT_ERRNO = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.EREMOTEIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
# obstore has one class for all errors except "not found" and "not allowed", so the message must be parsed.
_STATUS = re.compile(r"status code: (\d{3})")
_TRANSIENT_WORDS = ("error sending request", "body error", "kind: Timeout", "kind: Interrupted", "kind: Connect")
# URL path where obstore looks for the role of the machine if it does not have credentials.
_METADATA_SERVICE = "/latest/api/token"

_HINTS = (
    (("RequestTimeTooSkewed",), "The clock of this machine is wrong; set it (NTP)."),
    (
        (_METADATA_SERVICE, "/latest/meta-data"),
        "No credentials were found: give storage_options access_key_id and secret_access_key, or set "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (anon=True for public data).",
    ),
    (("NoSuchBucket",), "The bucket does not exist at this endpoint."),
    (("InvalidAccessKeyId", "SignatureDoesNotMatch"), "The credentials are wrong for this endpoint."),
    (("kind: Timeout", "TimedOut"), "The server did not answer in time."),
    (("ConnectionRefused",), "Nothing is listening at the endpoint."),
    (("redirect without LOCATION",), "The bucket is in another region; set region=."),
    (
        ("non-partial response", "Requested "),
        "The server answers range requests wrongly, so its data cannot be trusted.",
    ),
)


def is_transient(exc: BaseException) -> bool:
    """Whether the same request may succeed later: time-outs, resets, throttling and server errors.

    Examples
    --------
    >>> is_transient(ConnectionResetError()), is_transient(PermissionError())
    (True, False)
    """
    if isinstance(exc, TimeoutError | ConnectionError):
        return True
    for name in ("status", "code"):  # aiohttp and libraries that use it
        status = getattr(exc, name, None)
        if isinstance(status, int):
            return status in _TRANSIENT_STATUS
    if isinstance(exc, OSError) and exc.errno is not None:
        return exc.errno in _TRANSIENT_ERRNO
    module = type(exc).__module__
    if module.startswith("aiohttp"):
        return type(exc).__name__ in ("ServerDisconnectedError", "ClientPayloadError", "ClientOSError")
    if module.startswith("obstore") and type(exc).__name__ == "GenericError":
        text = str(exc)
        if _METADATA_SERVICE in text:
            return False
        status_found = _STATUS.search(text)
        if status_found:
            return int(status_found[1]) in _TRANSIENT_STATUS
        return "builder error" not in text and any(words in text for words in _TRANSIENT_WORDS)
    return False


def explained(exc: BaseException, secrets: Iterable[str] = (), access: str = "") -> str:
    """Describe an error in one line, without secrets, and add advice where there is any.

    Parameters
    ----------
    exc
        Exception raised by the store.
    secrets
        Values that must not appear in the text.
    access
        How access was tried, and advice, for an error that says that it was refused.

    Examples
    --------
    >>> explained(OSError("<Error><Code>SlowDown</Code><Message>Wait</Message><Key>hunter2</Key></Error>"))
    'OSError: SlowDown: Wait'
    """
    full = str(exc)
    text = full.partition("\n\nDebug source:")[0]
    body = re.search(r"<Code>(.*?)</Code>\s*(?:<Message>(.*?)</Message>)?", text, re.DOTALL)
    if body:
        # The rest of S3's answer repeats the signed request.
        start = re.split(r"<\?xml|<Error", text, maxsplit=1)[0].rstrip(": ")
        text = ": ".join(part for part in (start, body[1], body[2]) if part)
    message = f"{type(exc).__name__}: {' '.join(text.split())}" if text.strip() else type(exc).__name__
    if type(exc).__module__.startswith("obstore"):
        message += next((f". {hint}" for words, hint in _HINTS if any(word in full for word in words)), "")
    if access and is_refusal(exc):
        message += f". {access}"
    return hide_secrets(message, secrets)


_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0

T = TypeVar("T")


class WrongRange(Exception):
    """A store answered a range request with too many or too few bytes."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits on retries.

    Parameters
    ----------
    max_retries
        Number of attempts after the first one.
    timeout
        Largest duration of an attempt in seconds (for S3: the time without receiving a byte). No attempt begins later
        than twice this time after the first one, so a store that has stopped answering causes an error within three
        times this time.
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
        """Split storage options into the limits (``max_retries`` and ``timeout``) and the options of the store."""
        rest = dict(storage_options or {})
        limits = {name: rest.pop(name) for name in ("max_retries", "timeout") if name in rest}
        return cls(**limits), rest


class RetryingStore(Wrapper):
    """A store that retries after transient errors; other errors become a :class:`~dshuffle.errors.DatasetError`.

    It also checks the length of the answers to range requests. Otherwise the answer of a server that ignores ranges
    would be taken for the requested rows.

    Parameters
    ----------
    store
        Store to wrap.
    url
        Name of the store in errors.
    patience
        Limits on retries.
    limit
        Seconds that a whole attempt may take; ``None`` if the store limits its attempts itself.
    secrets
        Values that must not appear in errors.
    access
        How access is tried, and advice, for errors that say that it was refused.
    on_retry
        Function called before each retry.
    batch_nbytes
        Bytes of small objects to request in one call; 0 to request them one by one.
    """

    def __init__(
        self,
        store: Store,
        url: str,
        patience: Patience,
        *,
        limit: float | None = None,
        secrets: tuple[str, ...] = (),
        access: str = "",
        on_retry: Callable[[], None] | None = None,
        batch_nbytes: int = 0,
    ) -> None:
        super().__init__(store)
        self.batch_nbytes = batch_nbytes
        self._url = url
        self._patience = patience
        self._limit = limit
        self._secrets = secrets
        self._access = access
        self._on_retry = on_retry

    def _with_store(self, store: Store) -> Self:
        return type(self)(
            store,
            self._url,
            self._patience,
            limit=self._limit,
            secrets=self._secrets,
            access=self._access,
            on_retry=self._on_retry,
            batch_nbytes=self.batch_nbytes,
        )

    def with_read_only(self, read_only: bool = False) -> Self:
        """Return the same store, read-only or writable."""
        return self._with_store(self._store.with_read_only(read_only))

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({hide_secrets(self._url)!r})"

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
                seconds = time.monotonic() - started
                last = attempt > self._patience.max_retries or seconds >= 2 * self._patience.timeout
                if last or not is_transient(exc):
                    silent = isinstance(exc, TimeoutError) and not str(exc)
                    answer = explained(exc, self._secrets, self._access)
                    reason = f"no answer within {self._limit:g} s" if silent else answer
                    often = f"; tried {attempt} times in {seconds:.1f} s" if attempt > 1 else ""
                    # Not chained: a traceback would print the original message, which may contain secrets.
                    kind = AccessRefused if is_refusal(exc) else DatasetError
                    raise kind(f"cannot {what} of {self._url}: {reason}{often}", transient=is_transient(exc)) from None
            if self._on_retry is not None:
                self._on_retry()
            await asyncio.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (attempt - 1)) * random.uniform(0.5, 1))

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Fetch an object or exactly the requested range of it."""
        answer = await self._insist(f"fetch {key}", lambda: self._store.get(key, prototype, byte_range))
        self._check(key, byte_range, answer)
        return answer

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Fetch several objects or ranges. If one fails, all are requested again."""
        requests = list(key_ranges)
        what = f"fetch {requests[0][0]}" + (f" to {requests[-1][0]}" if len(requests) > 1 else "")
        answers = await self._insist(what, lambda: self._store.get_partial_values(prototype, requests))
        for (key, byte_range), answer in zip(requests, answers, strict=True):
            self._check(key, byte_range, answer)
        return answers

    def _check(self, key: str, byte_range: ByteRequest | None, answer: Buffer | None) -> None:
        if answer is None or byte_range is None:
            return
        if isinstance(byte_range, RangeByteRequest):
            nbytes = byte_range.end - byte_range.start
            right = len(answer) == nbytes
        elif isinstance(byte_range, SuffixByteRequest):
            nbytes = byte_range.suffix
            right = len(answer) <= nbytes
        else:
            return
        if not right:
            raise WrongRange(
                f"a request for {nbytes} bytes of {key} was answered with {len(answer)}; the object is truncated, or "
                "the server answers range requests wrongly"
            )

    async def exists(self, key: str) -> bool:
        """Whether an object exists."""
        return await self._insist(f"look up {key}", lambda: self._store.exists(key))

    async def set(self, key: str, value: Buffer) -> None:
        """Write an object. The operation is idempotent, so it can be retried."""
        await self._insist(f"write {key}", lambda: self._store.set(key, value))

    async def delete(self, key: str) -> None:
        """Delete an object."""
        await self._insist(f"delete {key}", lambda: self._store.delete(key))

    async def delete_dir(self, prefix: str) -> None:
        """Delete all objects below a prefix."""
        await self._insist(f"delete {prefix or 'all'}", lambda: self._store.delete_dir(prefix))

    async def is_empty(self, prefix: str) -> bool:
        """Whether there are no objects below a prefix."""
        return await self._insist(f"list {prefix or 'the top level'}", lambda: self._store.is_empty(prefix))

    async def _listed(self, what: str, begin: Callable[[], AsyncIterator[str]]) -> AsyncIterator[str]:
        async def collect() -> list[str]:
            return [name async for name in begin()]

        for name in await self._insist(f"list {what or 'the top level'}", collect):
            yield name

    def list(self) -> AsyncIterator[str]:
        """List all keys."""
        return self._listed("", self._store.list)

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """List all keys below a prefix."""
        return self._listed(prefix, lambda: self._store.list_prefix(prefix))

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """List the names directly below a prefix."""
        return self._listed(prefix, lambda: self._store.list_dir(prefix))
