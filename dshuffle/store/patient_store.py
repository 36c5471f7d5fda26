"""The one wrapper of all stores: it repeats requests, counts them, waits as an emulated link, and survives a fork.

It also says what errors of stores mean: whether the same request may succeed later, or was refused, and what to do.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import os
import pickle
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import LocalStore, MemoryStore, WrapperStore

from dshuffle.checks import as_integer
from dshuffle.emulated_links import emulated
from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.records import StoreTraffic
from dshuffle.redaction import hide_secrets

PROTOTYPE = default_buffer_prototype()

_METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0

# More threads than processors, because reads from a network mount mostly wait.
_N_THREADS = 16
# Below this size, unpacking on zarr's loop takes less time than handing it to a thread.
_THREAD_NBYTES = 128 << 10

T = TypeVar("T")


class WrongRange(Exception):
    """A store answered a range request with too many or too few bytes."""


class AccessRefused(DatasetError):
    """The store refuses access to an object, or does not say that the object does not exist."""


class _Process:
    """What requests of a process share. A forked process has its own: threads and their locks do not survive a fork."""

    def __init__(self) -> None:
        self.number = os.getpid()
        self.threads = ThreadPoolExecutor(_N_THREADS, thread_name_prefix="dshuffle-files")
        self.lock = threading.Lock()
        # Server and number of connections -> what limits the connections to it. All requests are on zarr's event loop.
        self.gates: dict[tuple[str, int], asyncio.Semaphore] = {}


_process = _Process()
_with_rust_threads: int | None = None
"""Number of the process that has used a store whose threads are not Python's, and cannot be made anew."""


def _forked() -> None:
    global _process
    _process = _Process()


os.register_at_fork(after_in_child=_forked)


class Meter:
    """A thread-safe running total of traffic."""

    def __init__(self) -> None:
        self.traffic = StoreTraffic()

    def add(self, traffic: StoreTraffic) -> None:
        """Add traffic to the total."""
        with _process.lock:
            self.traffic += traffic


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits on requests: attempts after the first one, seconds of each, and requests at one server at a time.

    For S3, ``timeout`` is the time without receiving a byte. No attempt begins later than twice this time after the
    first one, so a store that has stopped answering causes an error within three times this time.
    """

    max_retries: int = 7
    timeout: float = 60.0
    connections: int = 64

    def __post_init__(self) -> None:
        as_integer("storage_options['max_retries']", self.max_retries, 0)
        as_integer("storage_options['connections']", self.connections, 1)
        timeout = self.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise InvalidParameter.of("storage_options['timeout']", timeout, "a positive number of seconds")

    @classmethod
    def of(cls, storage_options: Mapping[str, Any] | None, **defaults: int) -> tuple[Self, dict[str, Any]]:
        """Split storage options into the limits, with other defaults if need be, and the options of the store."""
        rest = dict(storage_options or {})
        limits: dict[str, Any] = {name: rest.pop(name) for name in cls.__slots__ if name in rest}
        return cls(**defaults | limits), rest


def _repeated(method: str, words: str) -> Any:
    """A method that asks the store, and asks again. All of these operations may be repeated."""

    async def repeated(self: PatientStore, key: str, *values: Any) -> Any:
        what = f"{words} {key or 'the top level'}"
        return await self._insist(what, lambda store: getattr(store, method)(key, *values))

    return repeated


def _listed(method: str) -> Any:
    """A method that lists the store, from the beginning if it fails on the way."""

    async def listed(self: PatientStore, prefix: str = "") -> Any:
        async def collect(store: Store) -> list[str]:
            return [name async for name in getattr(store, method)(prefix)]

        for name in await self._insist(f"list {prefix or 'the top level'}", collect):
            yield name

    return listed


class PatientStore(WrapperStore[Store]):
    """A store that asks again after transient errors. Other errors become a :class:`~dshuffle.errors.DatasetError`.

    It checks the length of the answers to range requests: those of a server that ignores ranges are not the requested
    rows. Requests for chunks are counted, and those for metadata are not.

    ``url`` names the store in errors, ``secrets`` must not appear there, and ``access`` is the advice after a refusal.
    ``root`` is the folder of local files. ``document`` is the key of a metadata document that exists. If it is
    known, refused metadata are absent, and so is a refused chunk if the user has said what absent chunks are: some
    stores answer 403 for an object that does not exist. With ``absent_is_error``, an absent chunk raises an error; zarr
    returns the fill value, which in a complete dataset would turn a lost file into rows of zeros.
    """

    def __init__(
        self,
        store: Store,
        url: str,
        patience: Patience,
        *,
        limits_itself: bool = False,
        secrets: tuple[str, ...] = (),
        access: str = "",
        meter: Meter | None = None,
    ) -> None:
        super().__init__(store)
        emulated("store")  # a wrong rate is refused now
        self.root = os.fspath(store.root) if isinstance(store, LocalStore) else ""
        self.document = ""
        self.absent_chunks: str | None = None
        self.absent_is_error = False
        self._url, self._patience, self._secrets, self._access = url, patience, secrets, access
        self._limit = None if limits_itself else patience.timeout
        self._meter, self._counts = meter, meter is not None
        self._pid = os.getpid()
        kinds = {type(each).__module__.partition(".")[0] for each in (store, getattr(store, "store", None))}
        self._rust = next(iter(kinds & {"obstore", "icechunk"}), "")

    @property
    def bare(self) -> Self:
        """The same store, which does not count."""
        other = copy.copy(self)
        other._counts = False
        return other

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({hide_secrets(self._url)!r})"

    @property
    def _supports_sync_io(self) -> bool:
        # Others wait on the event loop, and do not block a thread for each request.
        return bool(self.root)

    def _check_process(self) -> None:
        """Make connections and open files anew in a forked process, or raise an error if that is impossible."""
        global _with_rust_threads
        if self._rust:
            if _with_rust_threads not in (None, _process.number):
                raise DatasetError(
                    f"cannot read {self._url} in a process that was forked after its parent had used {self._rust}, "
                    "whose threads do not survive a fork. Start processes by spawn or forkserver",
                    transient=False,
                )
            _with_rust_threads = _process.number
        if self._pid != _process.number:
            self._pid = _process.number
            if not isinstance(self._store, LocalStore | MemoryStore):
                self._store = pickle.loads(pickle.dumps(self._store))

    def _pause(self, error: Exception, what: str, attempt: int, started: float) -> float:
        """Return how long to wait before the next attempt, or raise an error if there is none."""
        seconds = time.monotonic() - started
        last = attempt > self._patience.max_retries or seconds >= 2 * self._patience.timeout
        if last or not is_transient(error):
            silent = isinstance(error, TimeoutError) and not str(error)
            answer = explained(error, self._secrets, self._access)
            reason = f"no answer within {self._patience.timeout:g} s" if silent else answer
            often = f"; tried {attempt} times in {seconds:.1f} s" if attempt > 1 else ""
            # Not chained: a traceback would print the original message, which may contain secrets.
            kind = AccessRefused if is_refusal(error) else DatasetError
            raise kind(f"cannot {what} of {self._url}: {reason}{often}", transient=is_transient(error)) from None
        if self._meter is not None:
            self._meter.add(StoreTraffic(retries=1))
        return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1)

    async def _insist(self, what: str, ask: Callable[[Store], Awaitable[T]], *, limited: bool = True) -> T:
        self._check_process()
        started, attempt = time.monotonic(), 0
        server = "/".join(self._url.split("/")[:3]), self._patience.connections
        gate = _process.gates.setdefault(server, asyncio.Semaphore(server[1]))
        while True:
            attempt += 1
            try:
                async with gate, asyncio.timeout(self._limit if limited else None):
                    return await ask(self._store)
            except (DatasetError, MemoryError, WrongRange):
                raise
            except Exception as error:
                pause = self._pause(error, what, attempt, started)
            await asyncio.sleep(pause)

    async def read(
        self, requests: Sequence[tuple[str, ByteRequest | None]], use: Callable[[list[Any]], T], nbytes: int = 0
    ) -> T:
        """Fetch objects or ranges of them, and use their bytes, which may make ``nbytes`` of them; None if absent.

        Local files are read and used in one thread, because handing one file of 64 KiB to a thread and back costs more
        than reading it. If one fails, all are read again. Once this method has raised an error, ``use`` does not run.
        """
        if not self.root:
            answers = await asyncio.gather(*(self._fetch(key, None, wanted) for key, wanted in requests))
            contents = [None if each is None else np.asarray(each.as_array_like()).view(np.uint8) for each in answers]
            return await unpacked(max(nbytes, _size(contents)), lambda: use(contents))

        async def attempt(store: Store) -> T:
            claim = threading.Lock()

            def work() -> tuple[int, T] | None:
                contents = [_read(f"{self.root}/{key}", wanted) for key, wanted in requests]
                if not claim.acquire(blocking=False):
                    return None
                return _size(contents), use(contents)

            future = asyncio.get_running_loop().run_in_executor(_process.threads, work)
            done, _ = await asyncio.wait([future], timeout=self._patience.timeout)
            if not done and claim.acquire(blocking=False):
                raise TimeoutError  # the file system hangs, and this thread will find the lock taken
            answer = await future
            assert answer is not None
            await self._pass_link(answer[0])
            self._count(len(requests), answer[0])
            return answer[1]

        first, last = requests[0][0], requests[-1][0]
        return await self._insist(f"fetch {first}" + f" to {last}" * (last != first), attempt, limited=False)

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Fetch an object or exactly the requested range of it; ``None`` if it does not exist and may be absent."""
        return self._present(key, await self._fetch(key, prototype, byte_range))

    async def _fetch(
        self, key: str, prototype: BufferPrototype | None, byte_range: ByteRequest | None
    ) -> Buffer | None:
        async def ask(store: Store) -> Buffer | None:
            wanted = byte_range
            if isinstance(wanted, SuffixByteRequest) and not type(store).__module__.startswith("zarr."):
                # icechunk raises an error if the end of an object is asked for that is longer than the object.
                wanted = wanted if await store.exists(key) and await store.getsize(key) > wanted.suffix else None
            return await store.get(key, prototype or PROTOTYPE, wanted)

        try:
            answer = await self._insist(f"fetch {key}", ask)
        except AccessRefused as error:
            await self._check_absence(key, error)
            answer = None
        size = 0 if answer is None else len(answer)
        if not _is_metadata(key):
            await self._pass_link(size)
            self._count(1, size)
        if answer is not None:
            _check_size(key, byte_range, size)
        return answer

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Do the same in a thread of the caller's, for a store of local files."""
        started, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            try:  # zarr's own way takes 10 µs longer
                content = _read(f"{self.root}/{key}", byte_range)
                break
            except WrongRange:
                raise
            except Exception as error:
                time.sleep(self._pause(error, f"fetch {key}", attempt, started))
        size = 0 if content is None else len(content)
        if not _is_metadata(key):
            if emulated("store") is not None:
                asyncio.run(self._pass_link(size))
            self._count(1, size)
        return self._present(key, None if content is None else (prototype or PROTOTYPE).buffer.from_bytes(content))

    def _present(self, key: str, answer: Buffer | None) -> Buffer | None:
        if answer is None and self._counts and self.absent_is_error and not _is_metadata(key):
            raise FileNotFoundError(f"{key} is missing from the store")
        return answer

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Fetch several objects or ranges."""
        return await asyncio.gather(*(self.get(key, prototype, byte_range) for key, byte_range in key_ranges))

    async def _check_absence(self, key: str, error: AccessRefused) -> None:
        """Raise the error unless the object counts as absent."""
        if not self.document or key == self.document:
            raise error
        if _is_metadata(key):
            return
        if self.absent_chunks is None:
            raise AccessRefused(
                f'{error}. To read such chunks as the fill value, open the dataset with absent_chunks="fill"'
            )
        await self.get(self.document)  # with lost credentials, all chunks would be taken for absent

    async def _pass_link(self, nbytes: int) -> None:
        if self._counts and (link := emulated("store")) is not None:
            await link.send(nbytes)

    def _count(self, requests: int, nbytes: int) -> None:
        if self._counts and self._meter is not None:
            self._meter.add(StoreTraffic(requests=requests, fetched_bytes=nbytes))

    exists, is_empty = _repeated("exists", "look up"), _repeated("is_empty", "list")
    set, delete, delete_dir = (_repeated(name, name) for name in ("set", "delete", "delete_dir"))
    list, list_prefix, list_dir = _listed("list_prefix"), _listed("list_prefix"), _listed("list_dir")
    # Zarr's own wrapper hands these to the wrapped store, past all of this; not all releases of zarr have them.
    _get_many: Any = getattr(Store, "_get_many", None)
    get_ranges: Any = getattr(Store, "get_ranges", None)


def _is_metadata(key: str) -> bool:
    return key.rpartition("/")[2] in _METADATA


def _read(path: str, byte_range: ByteRequest | None = None) -> bytes | None:
    """Read a file or a range of it; None if there is no file."""
    try:
        if byte_range is None:
            with open(path, "rb", buffering=0) as whole:
                return whole.readall()
        with open(path, "rb") as file:
            if isinstance(byte_range, SuffixByteRequest):
                file.seek(max(0, os.fstat(file.fileno()).st_size - byte_range.suffix))
            else:
                file.seek(byte_range.start if isinstance(byte_range, RangeByteRequest) else byte_range.offset)
            content = file.read(byte_range.end - file.tell() if isinstance(byte_range, RangeByteRequest) else -1)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    _check_size(path, byte_range, len(content))
    return content


def _check_size(key: str, byte_range: ByteRequest | None, size: int) -> None:
    """Refuse too many or too few bytes: those of a server that ignores ranges are not the requested rows."""
    if isinstance(byte_range, RangeByteRequest) and size != (asked := byte_range.end - byte_range.start):
        raise WrongRange(
            f"a request for {asked} bytes of {key} was answered with {size}; the object is truncated, or the server "
            "answers range requests wrongly"
        )


def _size(contents: Iterable[Any]) -> int:
    return sum(len(content) for content in contents if content is not None)


async def unpacked(nbytes: int, unpack: Callable[[], T]) -> T:
    """Unpack what has been read, in a thread if this is much."""
    return unpack() if nbytes < _THREAD_NBYTES else await asyncio.to_thread(unpack)


_TRANSIENT_STATUS = (408, 425, 429, 500, 502, 503, 504)
# Python has classes for the others.
_TRANSIENT_NUMBERS = {
    getattr(errno, f"E{name}")
    for name in ("BUSY", "IO", "STALE", "REMOTEIO", "HOSTDOWN", "HOSTUNREACH", "NETDOWN", "NETRESET", "NETUNREACH")
}
_TRANSIENT_OF_AIOHTTP = ("ServerDisconnectedError", "ClientPayloadError", "ClientOSError")
_CODE = re.compile(r"<Code>(.*?)</Code>\s*(?:<Message>(.*?)</Message>)?", re.DOTALL)
# obstore has one class for all errors except "not found" and "not allowed", so the message must be parsed.
_STATUS = re.compile(r"status code: (\d{3})")
_TRANSIENT_OF_OBSTORE = re.compile("error sending request|body error|kind: (Timeout|Interrupted|Connect)")
# Where obstore looks for the role of the machine if it does not have credentials.
_ROLE = re.compile("/latest/(api/token|meta-data)")

_HINTS = {
    "RequestTimeTooSkewed": "The clock of this machine is wrong; set it (NTP).",
    _ROLE.pattern: "No credentials were found: give storage_options access_key_id and secret_access_key, or set "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (anon=True for public data).",
    "NoSuchBucket": "The bucket does not exist at this endpoint.",
    "InvalidAccessKeyId|SignatureDoesNotMatch": "The credentials are wrong for this endpoint.",
    "kind: Timeout|TimedOut": "The server did not answer in time.",
    "ConnectionRefused": "Nothing is listening at the endpoint.",
    "redirect without LOCATION": "The bucket is in another region; set region=.",
    "non-partial response|Requested ": "The server answers range requests wrongly, so its data cannot be trusted.",
}


def _status(error: BaseException) -> int | None:
    """The status of an answer by HTTP that an error of aiohttp, gcsfs or obstore has."""
    for name in ("status", "code"):
        if isinstance(status := getattr(error, name, None), int):
            return status
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def is_refusal(error: BaseException) -> bool:
    """Whether a store has refused access to an object, and not a request with wrong credentials."""
    if code := _CODE.search(str(error)):
        return code[1] == "AccessDenied"
    return isinstance(error, PermissionError) or _status(error) in (401, 403)


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: time-outs, resets, throttling and server errors."""
    text, library = str(error), type(error).__module__.partition(".")[0]
    if library == "obstore" and _ROLE.search(text):
        return False
    if isinstance(error, TimeoutError | ConnectionError | InterruptedError | BlockingIOError):
        return True
    if (status := _status(error)) is not None:
        return status in _TRANSIENT_STATUS
    if library == "obstore":
        return _TRANSIENT_OF_OBSTORE.search(text) is not None
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _TRANSIENT_NUMBERS
    return library == "aiohttp" and type(error).__name__ in _TRANSIENT_OF_AIOHTTP


def explained(error: BaseException, secrets: Iterable[str] = (), access: str = "") -> str:
    """Describe an error in one line, without secrets, and add advice where there is any."""
    full = str(error)
    text = full.partition("\n\nDebug source:")[0]
    if body := _CODE.search(text):
        # The rest of S3's answer repeats the signed request.
        start = re.split(r"<\?xml|<Error", text, maxsplit=1)[0].rstrip(": ")
        text = ": ".join(filter(None, (start, *body.groups())))
    message = ": ".join(filter(None, (type(error).__name__, " ".join(text.split()))))
    if type(error).__module__.startswith("obstore"):
        message += next((f". {hint}" for words, hint in _HINTS.items() if re.search(words, full)), "")
    if access and is_refusal(error):
        message += f". {access}"
    return hide_secrets(message, secrets)
