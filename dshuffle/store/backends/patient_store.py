"""The one wrapper of all stores: it repeats requests, counts them, waits as an emulated link, and survives a fork."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.storage import LocalStore, MemoryStore, WrapperStore

from dshuffle.emulated_links import emulated
from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.records import StoreTraffic
from dshuffle.redaction import hide_secrets
from dshuffle.store.backends.store_errors import AccessRefused, explained, is_refusal, is_transient

METADATA = frozenset({"zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata"})
"""Names of the objects of a Zarr store that are not chunks."""

PROTOTYPE = default_buffer_prototype()

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0

# More threads than processors, because reads from a network mount mostly wait.
_N_THREADS = 16

T = TypeVar("T")


class AbsentChunk(Exception):
    """A chunk of a complete dataset is missing from the store."""


class WrongRange(Exception):
    """A store answered a range request with too many or too few bytes."""


class _Process:
    """What requests of a process share. A forked process has its own: threads and their locks do not survive a fork."""

    def __init__(self) -> None:
        self.number = os.getpid()
        self.threads = ThreadPoolExecutor(_N_THREADS, thread_name_prefix="dshuffle-files")
        self.lock = threading.Lock()
        # Event loop -> server and number of connections -> what limits the connections to it.
        self.gates: WeakKeyDictionary[Any, dict[tuple[str, int], asyncio.Semaphore]] = WeakKeyDictionary()


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
        self._traffic = StoreTraffic()

    def add(self, traffic: StoreTraffic) -> None:
        """Add traffic to the total."""
        with _process.lock:
            self._traffic += traffic

    @property
    def traffic(self) -> StoreTraffic:
        """The total so far."""
        return self._traffic


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits on requests.

    Parameters
    ----------
    max_retries
        Number of attempts after the first one.
    timeout
        Largest duration of an attempt in seconds (for S3: the time without receiving a byte). No attempt begins later
        than twice this time after the first one, so a store that has stopped answering causes an error within three
        times this time.
    connections
        Largest number of requests that a process has under way at one server.
    """

    max_retries: int = 7
    timeout: float = 60.0
    connections: int = 64

    def __post_init__(self) -> None:
        for name, least in (("max_retries", 0), ("connections", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidParameter.of(f"storage_options[{name!r}]", value, f"an integer >= {least}")
        timeout = self.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise InvalidParameter.of("storage_options['timeout']", timeout, "a positive number of seconds")

    @classmethod
    def of(cls, storage_options: Mapping[str, Any] | None, **defaults: int) -> tuple[Self, dict[str, Any]]:
        """Split storage options into the limits, with other defaults if need be, and the options of the store."""
        rest = dict(storage_options or {})
        limits: dict[str, Any] = {
            name: rest.pop(name) for name in ("max_retries", "timeout", "connections") if name in rest
        }
        return cls(**defaults | limits), rest


class PatientStore(WrapperStore[Store]):
    """A store that asks again after transient errors. Other errors become a :class:`~dshuffle.errors.DatasetError`.

    It checks the length of the answers to range requests. Otherwise the answer of a server that ignores ranges would be
    taken for the requested rows. Requests for chunks are counted, and those for metadata are not.

    Parameters
    ----------
    store
        Store to wrap.
    url
        Name of the store in errors.
    patience
        Limits on requests.
    limits_itself
        Whether the store limits the time of a request.
    secrets
        Values that must not appear in errors.
    access
        How access is tried, and advice, for errors that say that it was refused.
    meter
        Meter to add the traffic to.

    Attributes
    ----------
    root
        Folder of a store of local files; empty for other stores.
    document
        Key of a metadata document that exists. If it is known, refused metadata are absent, and so is a refused chunk
        if the user has said what absent chunks are: some stores answer 403 for an object that does not exist.
    absent_chunks
        What the user has said: ``"fill"``, ``"error"`` or None.
    absent_is_error
        Whether an absent chunk raises an error. Zarr returns the fill value, which in a complete dataset would turn a
        lost file into rows of zeros.
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
        # icechunk raises an error if the end of an object is asked for that is longer than the object.
        self._is_foreign = not type(store).__module__.startswith("zarr.")

    def with_read_only(self, read_only: bool = False) -> Self:
        """Return the same store, read-only or writable."""
        return self._changed(_store=self._store.with_read_only(read_only))

    @property
    def bare(self) -> Self:
        """The same store, which does not count."""
        return self._changed(_counts=False)

    def _changed(self, **attributes: Any) -> Self:
        other = copy.copy(self)
        vars(other).update(attributes)
        return other

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({hide_secrets(self._url)!r})"

    @property
    def _supports_sync_io(self) -> bool:
        # Others wait on the event loop, and do not block a thread for each request.
        return bool(self.root) and hasattr(self._store, "get_sync")

    def check_process(self) -> None:
        """Make connections and open files anew in a forked process.

        Raises
        ------
        DatasetError
            If that is impossible.
        """
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
        self.check_process()
        started, attempt = time.monotonic(), 0
        gates = _process.gates.setdefault(asyncio.get_running_loop(), {})
        server = "/".join(self._url.split("/")[:3]), self._patience.connections
        gate = gates.setdefault(server, asyncio.Semaphore(server[1]))
        limit = self._limit if limited else None
        while True:
            attempt += 1
            try:
                async with gate, asyncio.timeout(limit):
                    return await ask(self._store)
            except (DatasetError, MemoryError):
                raise
            except Exception as error:
                pause = self._pause(error, what, attempt, started)
            await asyncio.sleep(pause)

    async def read_files(self, keys: list[str], use: Callable[[list[bytes | None]], T]) -> T:
        """Read whole local files and use them, all in one thread. If one fails, all are read again.

        Handing one file of 64 KiB to a thread and back costs more than reading it. An absent file is None. Once this
        method has raised an error, ``use`` does not run any more.
        """

        async def attempt(store: Store) -> T:
            claim = threading.Lock()

            def work() -> tuple[list[int], T] | None:
                contents = [_read(f"{self.root}/{key}") for key in keys]
                if not claim.acquire(blocking=False):
                    return None
                return [len(content) for content in contents if content is not None], use(contents)

            future = asyncio.get_running_loop().run_in_executor(_process.threads, work)
            done, _ = await asyncio.wait([future], timeout=self._patience.timeout)
            if not done and claim.acquire(blocking=False):
                raise TimeoutError  # the file system hangs, and this thread will find the lock taken
            answer = await future
            assert answer is not None
            sizes, result = answer
            await self._pass_link(sum(sizes))
            self._count(len(keys), sum(sizes))
            return result

        what = f"fetch {keys[0]}" + (f" to {keys[-1]}" if len(keys) > 1 else "")
        return await self._insist(what, attempt, limited=False)

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Fetch an object or exactly the requested range of it; ``None`` if it does not exist."""

        async def ask(store: Store) -> Buffer | None:
            wanted = byte_range
            if isinstance(wanted, SuffixByteRequest) and self._is_foreign:
                try:
                    wanted = wanted if await store.getsize(key) > wanted.suffix else None
                except FileNotFoundError:
                    return None
            return await store.get(key, prototype or PROTOTYPE, wanted)

        try:
            answer = await self._insist(f"fetch {key}", ask)
        except AccessRefused as error:
            await self._check_absence(key, error)
            answer = None
        if not _is_metadata(key):
            await self._pass_link(0 if answer is None else len(answer))
        return self._checked(key, byte_range, answer)

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Do the same in a thread of the caller's, for a store of local files."""
        started, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            try:
                if byte_range is None:
                    content = _read(f"{self.root}/{key}")
                    answer = None if content is None else (prototype or PROTOTYPE).buffer.from_bytes(content)
                else:
                    answer = self._store.get_sync(key, prototype=prototype, byte_range=byte_range)  # type: ignore[attr-defined]
                break
            except Exception as error:
                time.sleep(self._pause(error, f"fetch {key}", attempt, started))
        if answer is not None and not _is_metadata(key) and emulated("store") is not None:
            asyncio.run(self._pass_link(len(answer)))
        return self._checked(key, byte_range, answer)

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

    def _checked(self, key: str, byte_range: ByteRequest | None, answer: Buffer | None) -> Buffer | None:
        """Check and count the answer to a request."""
        if not _is_metadata(key):
            self._count(1, 0 if answer is None else len(answer))
            if answer is None and self._counts and self.absent_is_error:
                raise AbsentChunk(f"{key} is missing from the store")
        if answer is None:
            return None
        if isinstance(byte_range, RangeByteRequest):
            asked = byte_range.end - byte_range.start
            right = len(answer) == asked
        elif isinstance(byte_range, SuffixByteRequest):
            asked = byte_range.suffix
            right = len(answer) <= asked
        else:
            return answer
        if not right:
            raise WrongRange(
                f"a request for {asked} bytes of {key} was answered with {len(answer)}; the object is truncated, or "
                "the server answers range requests wrongly"
            )
        return answer

    async def exists(self, key: str) -> bool:
        """Whether an object exists."""
        return await self._insist(f"look up {key}", lambda store: store.exists(key))

    async def set(self, key: str, value: Buffer) -> None:
        """Write an object. The operation is idempotent, so it can be retried."""
        await self._insist(f"write {key}", lambda store: store.set(key, value))

    async def delete(self, key: str) -> None:
        """Delete an object."""
        await self._insist(f"delete {key}", lambda store: store.delete(key))

    async def delete_dir(self, prefix: str) -> None:
        """Delete all objects below a prefix."""
        await self._insist(f"delete {prefix or 'all'}", lambda store: store.delete_dir(prefix))

    async def is_empty(self, prefix: str) -> bool:
        """Whether there are no objects below a prefix."""
        return await self._insist(f"list {prefix or 'the top level'}", lambda store: store.is_empty(prefix))

    async def _listed(self, prefix: str, begin: Callable[[Store], AsyncIterator[str]]) -> AsyncIterator[str]:
        async def collect(store: Store) -> list[str]:
            return [name async for name in begin(store)]

        for name in await self._insist(f"list {prefix or 'the top level'}", collect):
            yield name

    def list(self) -> AsyncIterator[str]:
        """List all keys."""
        return self._listed("", lambda store: store.list())

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """List all keys below a prefix."""
        return self._listed(prefix, lambda store: store.list_prefix(prefix))

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """List the names directly below a prefix."""
        return self._listed(prefix, lambda store: store.list_dir(prefix))


# Zarr's own wrapper hands some ways to read to the wrapped store, and newer releases of zarr have more of them. They
# would bypass all of this.
READS = ("_get_many", "get_ranges")
for _name in READS:
    if hasattr(Store, _name):
        setattr(PatientStore, _name, getattr(Store, _name))


def _is_metadata(key: str) -> bool:
    return key.rpartition("/")[2] in METADATA


def _read(path: str) -> bytes | None:
    """Read a file; None if there is none."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
