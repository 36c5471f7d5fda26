"""Where datasets are: URLs and paths as users write them, Zarr stores, and what exists there.

One wrapper of all stores repeats requests, counts them and waits as an emulated link. It also says what errors of
stores mean: whether the same request may succeed later, or was refused, and what to do.
"""

from __future__ import annotations

import asyncio
import copy
import errno
import json
import os
import pickle
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Self, TypeVar

import numpy as np
import zarr
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, StorePath, WrapperStore

from dshuffle.checks import as_integer
from dshuffle.emulated_links import emulated
from dshuffle.errors import CorruptChunk, DatasetError, InvalidParameter
from dshuffle.private_files import replace_file
from dshuffle.records import StoreTraffic
from dshuffle.redaction import hide_secrets, option_values, short_repr

try:
    from obstore.exceptions import BaseError
    from obstore.store import S3Store
except ImportError:  # without the extra
    S3Store = None  # type: ignore[assignment,misc]

Place = str | os.PathLike[str] | Store | StorePath | zarr.Group
"""What users pass as the place of a dataset."""

T = TypeVar("T")
Requests = Sequence[tuple[str, ByteRequest | None]]
PROTOTYPE = default_buffer_prototype()

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0

_remote_pid: int | None = None
"""The process that has used a store whose threads and connections do not survive a fork."""


_pid: int
_threads: ThreadPoolExecutor
_lock: threading.Lock


def _begin_process() -> None:
    """Make what requests share. A forked process has its own, because threads and their locks do not survive a fork."""
    global _pid, _threads, _lock
    # More threads than processors, because reads from a network mount mostly wait.
    _pid, _threads, _lock = os.getpid(), ThreadPoolExecutor(16, "dshuffle-files"), threading.Lock()


_begin_process()
os.register_at_fork(after_in_child=_begin_process)


class Meter:
    """A thread-safe running total of traffic."""

    def __init__(self) -> None:
        self.traffic = StoreTraffic()

    def add(self, traffic: StoreTraffic) -> None:
        """Add traffic to the total."""
        with _lock:
            self.traffic += traffic


def _insistent(method: str, words: str) -> Any:
    async def ask(self: PatientStore, key: str, *values: Any) -> Any:
        what = f"{words} {key or 'the top level'}"
        return await self._insist(what, lambda store: getattr(store, method)(key, *values))

    return ask


class PatientStore(WrapperStore[Store]):
    """A store that asks again after transient errors. Other errors become a :class:`~dshuffle.errors.DatasetError`.

    No attempt begins later than twice ``timeout`` after the first one, so a store that has stopped answering causes an
    error within three times this time. ``url`` names the store in errors, where ``secrets`` must not appear. ``root``
    is the folder of local files.

    Once a store has a ``meter``, chunks are read from it: requests are counted, and wait as on an emulated link. With
    ``absent_is_error``, an absent chunk is an error; zarr would return the fill value, which in a complete dataset
    would turn a lost file into rows of zeros. ``zarr_format`` is that of the group or array at the place.
    """

    def __init__(
        self,
        store: Store,
        url: str,
        limits: tuple[int, float],
        *,
        read_only: bool = False,
        secrets: tuple[str, ...] = (),
    ) -> None:
        super().__init__(store)
        emulated("store")  # a wrong rate is refused now
        self.root = os.fspath(store.root) if isinstance(store, LocalStore) else ""
        self.meter: Meter | None = None
        self.zarr_format: Literal[2, 3] = 3
        self.absent_is_error = False
        self._url, self._secrets, self._read_only = url, secrets, read_only
        self._retries, self._timeout = limits
        # obstore limits the time without a byte, since a large chunk may take long over a slow link.
        self._limit = None if url.startswith("s3://") else self._timeout
        # Some HTTP servers with a short queue answer nobody for long if a process opens more connections.
        self._gate = asyncio.Semaphore(16 if url.startswith("http") else 64)

    @property
    def bare(self) -> Self:
        """The same store, for looking at metadata and at samples of chunks."""
        other = copy.copy(self)
        other.meter, other.absent_is_error = None, False
        return other

    @property
    def read_only(self) -> bool:
        """Whether zarr must not write."""
        return self._read_only or self._store.read_only

    @property
    def _supports_sync_io(self) -> bool:
        # Others wait on the event loop, and do not block a thread for each request.
        return bool(self.root) and emulated("store") is None

    def __repr__(self) -> str:
        return hide_secrets(self._url)

    __str__ = __repr__

    async def _insist(self, what: str, ask: Callable[[Store], Awaitable[T]], *, limited: bool = True) -> T:
        """Ask the store, and ask again after errors that may pass."""
        global _remote_pid
        if not isinstance(self._store, LocalStore | MemoryStore):
            if _remote_pid not in (None, _pid):
                raise DatasetError(
                    f"cannot {what} of {self._url} in a process that was forked after its parent had used such a "
                    "store: its threads and connections do not survive a fork. Start processes by spawn or forkserver",
                    transient=False,
                )
            _remote_pid = _pid
        started, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            try:
                async with asyncio.timeout(self._limit if limited else None):
                    return await ask(self._store)
            except (DatasetError, MemoryError):
                raise
            except Exception as error:
                seconds = time.monotonic() - started
                reason, passes = judged(error, self._secrets)
                if not passes or attempt > self._retries or seconds >= 2 * self._timeout:
                    if isinstance(error, TimeoutError) and not str(error):
                        reason = f"no answer within {self._timeout:g} s"
                    often = f"; tried {attempt} times in {seconds:.1f} s" if attempt > 1 else ""
                    # Not chained: a traceback would print the original message, which may contain secrets.
                    raise DatasetError(f"cannot {what} of {self._url}: {reason}{often}", transient=passes) from None
            if self.meter is not None:
                self.meter.add(StoreTraffic(retries=1))
            await asyncio.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1))

    async def read(self, requests: Requests, use: Callable[[list[Any]], Any] | None = None) -> Any:
        """Fetch objects or ranges of them, and return their bytes or use them in a thread; None if absent.

        Local files are read and used in one thread, because handing one file of 64 KiB to a thread and back costs more
        than reading it. If one fails, all are read again. Once this method has raised an error, ``use`` does not run.
        """

        async def read_files(store: Store) -> Any:
            claim = threading.Lock()

            def work() -> Any:
                contents = [self._read_file(key, wanted) for key, wanted in requests]
                if claim.acquire(blocking=False):
                    return _size(contents), use(contents) if use else contents
                return None

            future = asyncio.get_running_loop().run_in_executor(_threads, work)
            done, _ = await asyncio.wait([future], timeout=self._timeout)
            if not done and claim.acquire(blocking=False):
                raise TimeoutError  # the file system hangs, and this thread will find the lock taken
            return await future

        if self.root:
            first, last = requests[0][0], requests[-1][0]
            what = f"fetch {first}" + f" to {last}" * (last != first)
            size, answer = await self._insist(what, read_files, limited=False)
        else:
            contents = await asyncio.gather(*(self._fetch(key, wanted) for key, wanted in requests))
            size, answer = _size(contents), await asyncio.to_thread(use, contents) if use else contents
        if self.meter is not None:
            if (link := emulated("store")) is not None:
                await link.send(size)
            self.meter.add(StoreTraffic(requests=len(requests), fetched_bytes=size))
        return answer

    def _read_file(self, key: str, wanted: Any) -> Any:
        try:
            with open(f"{self.root}/{key}", "rb", buffering=0 if wanted is None else -1) as file:
                if isinstance(wanted, SuffixByteRequest):
                    file.seek(max(0, os.fstat(file.fileno()).st_size - wanted.suffix))
                elif wanted is not None:
                    file.seek(wanted.start if isinstance(wanted, RangeByteRequest) else wanted.offset)
                content = file.read(wanted.end - wanted.start if isinstance(wanted, RangeByteRequest) else -1)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            content = None
        return self._checked(key, wanted, content)

    def _checked(self, key: str, wanted: Any, content: Any) -> Any:
        """Refuse to go without a chunk that must exist, or with too many or too few bytes of one."""
        if content is None:
            if self.absent_is_error:
                raise CorruptChunk(f"the chunk {key} of {self._url} is missing")
        elif isinstance(wanted, RangeByteRequest) and len(content) != (asked := wanted.end - wanted.start):
            raise CorruptChunk(
                f"a request for {asked} bytes of {key} of {self._url} was answered with {len(content)}; the object is "
                "truncated, or the server answers range requests wrongly"
            )
        return content

    async def _fetch(self, key: str, wanted: ByteRequest | None) -> Any:
        async def ask(store: Store) -> Any:
            asked = wanted
            if isinstance(asked, SuffixByteRequest) and not type(store).__module__.startswith("zarr."):
                # icechunk raises an error if the end of an object is asked for that is longer than the object.
                asked = asked if await store.exists(key) and await store.getsize(key) > asked.suffix else None
            answer = await store.get(key, PROTOTYPE, asked)
            return None if answer is None else np.asarray(answer.as_array_like()).view(np.uint8)

        async with self._gate:
            return self._checked(key, wanted, await self._insist(f"fetch {key}", ask))

    async def get(self, key: str, prototype: Any = PROTOTYPE, byte_range: ByteRequest | None = None) -> Any:
        """Fetch an object or exactly the requested range of it; ``None`` if it does not exist and may be absent."""
        [content] = await self.read([(key, byte_range)])
        return None if content is None else prototype.buffer.from_bytes(content)

    def get_sync(self, key: str, *, prototype: Any = PROTOTYPE, byte_range: ByteRequest | None = None) -> Any:
        """Do the same in a thread of zarr's, for local files."""
        try:  # zarr's own way takes 10 µs longer
            content = self._read_file(key, byte_range)
        except OSError:
            content = None
        if content is None:  # ask again, or say what is wrong
            return sync(self.get(key, prototype, byte_range))
        if self.meter is not None:
            self.meter.add(StoreTraffic(requests=1, fetched_bytes=len(content)))
        return prototype.buffer.from_bytes(content)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """List the store, from the beginning if it fails on the way."""

        async def names(store: Store) -> list[str]:
            return [name async for name in store.list_dir(prefix)]

        for name in await self._insist(f"list {prefix or 'the top level'}", names):
            yield name

    is_empty = _insistent("is_empty", "list")
    set, delete, delete_dir = (_insistent(name, name) for name in ("set", "delete", "delete_dir"))
    # Zarr's own wrapper hands these to the wrapped store, past all of this; not all releases of zarr have them.
    _get_many: Any = getattr(Store, "_get_many", None)
    get_ranges: Any = getattr(Store, "get_ranges", None)


def _size(contents: Iterable[Any]) -> int:
    return sum(len(content) for content in contents if content is not None)


# -- Errors of stores --------------------------------------------------------------------------------------------------

_TRANSIENT_STATUS = (408, 425, 429, 500, 502, 503, 504)
# Python has classes for the others.
_TRANSIENT_NAMES = "EBUSY EIO ESTALE EREMOTEIO EHOSTDOWN EHOSTUNREACH ENETDOWN ENETRESET ENETUNREACH"
# obstore has one class for all errors except "not found" and "not allowed", so the message must be parsed.
_TRANSIENT = re.compile(
    r"aiohttp (ServerDisconnectedError|ClientPayloadError|ClientOSError)"
    r"|obstore (?s:.*)(error sending request|body error|kind: (Timeout|Interrupted|Connect))"
)
_CODE = re.compile(r"<Code>(.*?)</Code>\s*(?:<Message>(.*?)</Message>)?", re.DOTALL)
# Where obstore looks for the role of the machine if it does not have credentials.
_ROLE = "/latest/(api/token|meta-data)"

_REFUSED = (
    "The credentials, if there are any, lack the permission, or the object does not exist in a store that may not be "
    "listed. Give credentials in storage_options; a public bucket of S3 needs anon=True, and one whose readers pay "
    "requester_pays=True"
)
_HINTS = {
    "RequestTimeTooSkewed": "The clock of this machine is wrong; set it (NTP).",
    _ROLE: "No credentials were found: give storage_options access_key_id and secret_access_key, or set "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (anon=True for public data).",
    "NoSuchBucket": "The bucket does not exist at this endpoint.",
    "InvalidAccessKeyId|SignatureDoesNotMatch": "The credentials are wrong for this endpoint.",
    "kind: Timeout|TimedOut": "The server did not answer in time.",
    "ConnectionRefused": "Nothing is listening at the endpoint.",
    "redirect without LOCATION": "The bucket is in another region; set region=.",
    "non-partial response|Requested ": "The server answers range requests wrongly, so its data cannot be trusted.",
}


def judged(error: BaseException, secrets: Iterable[str] = ()) -> tuple[str, bool]:
    """Describe an error in one line, without secrets, with advice; and say whether it may pass.

    The same request may succeed after time-outs, resets, throttling and server errors.
    """
    full, library = str(error), type(error).__module__.partition(".")[0]
    status = getattr(error, "status", None)  # of aiohttp
    if found := re.search(r"status code: (\d{3})", full):
        status = int(found[1])
    if isinstance(error, TimeoutError | ConnectionError | InterruptedError | BlockingIOError):
        passes = True
    elif isinstance(status, int):
        passes = status in _TRANSIENT_STATUS
    else:
        number = errno.errorcode.get(getattr(error, "errno", None) or 0, "?")
        passes = number in _TRANSIENT_NAMES or _TRANSIENT.match(f"{library} {type(error).__name__} {full}") is not None
    code, text = _CODE.search(full), full.partition("\n\nDebug source:")[0]
    refused = code[1] == "AccessDenied" if code else isinstance(error, PermissionError) or status in (401, 403)
    if code:
        # The rest of S3's answer repeats the signed request.
        text = ": ".join(filter(None, (re.split(r"<\?xml|<Error", text, maxsplit=1)[0].rstrip(": "), *code.groups())))
    message = ": ".join(filter(None, (type(error).__name__, " ".join(text.split()))))
    if library == "obstore":
        passes = passes and not re.search(_ROLE, full)
        message += next((f". {hint}" for words, hint in _HINTS.items() if re.search(words, full)), "")
    if refused and getattr(error, "errno", None) is None:  # not of a local file
        message += f". {_REFUSED}"
    return hide_secrets(message, secrets), passes


# -- URLs --------------------------------------------------------------------------------------------------------------

_WRONG_URLS = {
    r"\s|(?s:.*\s)$": "without spaces and line ends around it",
    r"[A-Za-z]:[\\/]|\\\\": "a POSIX path or a URL, and not a path of Windows",
    r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)": "a path, or a URL with two slashes after the colon (pathlib.Path removes one)",
    r"(?i:nfs)://": "a path below the place where all hosts mount the export (mount -t nfs SERVER:/EXPORT /MOUNT)",
    r"(?i:file)://(?!(localhost)?/.)": "file:///PATH or file://localhost/PATH",
    r"[^/]+:///*$": "a scheme followed by the location of the dataset",
}

_MEMORY: dict[str, dict[str, Buffer]] = {}


def canonical_url(url: str | os.PathLike[str]) -> str:
    """Return a URL that is valid in any process on this machine: local paths become absolute."""
    if isinstance(url, os.PathLike):
        url = os.fspath(url)
    if not isinstance(url, str) or not url.strip():
        raise InvalidParameter.of("url", url, "a path or a URL", 'For example "data/x.zarr" or "s3://bucket/x".')
    for pattern, allowed in _WRONG_URLS.items():
        if re.match(pattern, url):
            raise InvalidParameter.of("url", url, allowed)
    scheme, separator, rest = url.partition("://")
    if not separator:
        return os.path.abspath(os.path.expanduser(url))
    if scheme.lower() == "file":
        return os.path.abspath(rest.removeprefix("localhost"))
    return f"{scheme.lower()}://{rest.rstrip('/')}"


def is_local(url: str) -> bool:
    """Whether a canonical URL is a path on this machine's file systems."""
    return "://" not in url


def is_memory(url: str) -> bool:
    """Whether a canonical URL exists in this process only."""
    return url.startswith("memory://")


def _limits(storage_options: Mapping[str, Any] | None, place: str = "") -> tuple[tuple[int, float], dict[str, Any]]:
    """Split storage options into attempts after the first one and seconds of each, and the options of the store.

    A place that has no options of its own is named in the error for others.
    """
    rest = dict(storage_options or {})
    retries = as_integer("storage_options['max_retries']", rest.pop("max_retries", 7), 0)
    timeout = rest.pop("timeout", 60.0)
    if not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
        raise InvalidParameter.of("storage_options['timeout']", timeout, "a positive number of seconds")
    if place and rest:
        # Values may be secrets, so show only the names of the options.
        hint = "Other options apply only to S3 and to fsspec's schemes. Set other options of a store where you make it."
        raise InvalidParameter.of("storage_options", sorted(rest), f"max_retries or timeout for {place}", hint)
    return (retries, timeout), rest


def open_store(url: str, storage_options: Mapping[str, Any] | None, *, read_only: bool) -> PatientStore:
    """Open the Zarr store at a canonical URL. It repeats requests after transient errors.

    ``memory://name`` is a registry in this process, for tests. Schemes other than local paths and S3 are opened with
    fsspec. The options ``max_retries`` and ``timeout`` limit requests; all other options are passed to the store.
    """
    scheme, _, name = url.rpartition("://")
    limits, options = _limits(storage_options, url if scheme in ("", "memory") else "")
    if not scheme:
        return PatientStore(LocalStore(url, read_only=read_only), url, limits)
    if scheme == "memory":
        kept = _MEMORY.get(name, {}) if read_only else _MEMORY.setdefault(name, {})
        return PatientStore(MemoryStore(kept, read_only=read_only), url, limits)
    secrets, store = option_values(options), None
    if scheme == "s3":
        store = _open_s3(url, options, limits[1], secrets, read_only=read_only)
        secrets += tuple(os.environ.get(name, "") for name in _S3_SECRETS)
    try:
        store = store or FsspecStore.from_url(url, storage_options=options, read_only=read_only)
    except (OSError, ImportError) as exc:  # some file systems connect at once, or need a package
        raise DatasetError(f"cannot open {url}: {judged(exc, secrets)[0]}") from None
    except ValueError as exc:
        raise InvalidParameter.of(
            "url",
            url,
            "a local path, memory://, s3://, or a scheme that fsspec knows (gs://, https://, ...)",
            f"fsspec says: {exc}. Install the package for this scheme (gcsfs for gs://).",
        ) from exc
    return PatientStore(store, url, limits, secrets=secrets)


# Options as s3fs calls them -> as obstore does, in capitals, so that it finds those that are given twice.
_S3_NAMES = {
    "key": "AWS_ACCESS_KEY_ID",
    "secret": "AWS_SECRET_ACCESS_KEY",
    "anon": "AWS_SKIP_SIGNATURE",
    "requester_pays": "AWS_REQUEST_PAYER",
}
_S3_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def _open_s3(url: str, options: dict[str, Any], timeout: float, secrets: tuple[str, ...], *, read_only: bool) -> Store:
    """Open the store at an ``s3://`` URL.

    Missing options come from the usual environment variables (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
    ``AWS_SESSION_TOKEN``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``, ...), then from the role of the machine.

    obstore takes 2-3 CPU seconds per GB and s3fs 6-9 (measured on one machine with Ceph's and other servers). Workers
    need their processors for training.
    """
    if S3Store is None:
        raise DatasetError(f"{url} needs obstore to read s3:// URLs; install it with pip install 'dshuffle[s3]'")
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if "@" in bucket or "?" in url:
        hint = "Put credentials and options in storage_options."
        raise InvalidParameter.of("url", "s3://***", "s3://bucket/prefix", hint)
    limits: Any = {
        "allow_http": True,  # if the endpoint says so
        "read_timeout": timedelta(seconds=timeout),
        "timeout": timedelta(seconds=10 * timeout),
        **options.pop("client_options", {}),
    }
    config: Any = {_S3_NAMES.get(name, name): value for name, value in options.items() if value is not None}
    retries: Any = {"max_retries": 0}  # PatientStore repeats requests, and counts them
    try:
        store = S3Store(bucket, prefix=prefix or None, client_options=limits, retry_config=retries, config=config)
    except (BaseError, TypeError, ValueError) as exc:
        reason = f"obstore rejects {sorted(map(str, options))} ({judged(exc, secrets)[0]})"
        raise InvalidParameter.because("storage_options", reason) from None
    in_environment = next(filter(None, map(os.environ.get, _S3_ENDPOINTS)), "https://")
    endpoint = store.config.get("endpoint", in_environment)
    # obstore would panic later on an invalid endpoint.
    if not endpoint.startswith(("http://", "https://")) or "@" in endpoint:
        shown = "***" if "@" in endpoint else endpoint
        hint = "Give credentials as separate options."
        raise InvalidParameter.of("endpoint", shown, "http://HOST:PORT or https://HOST[:PORT]", hint)
    return ObjectStore(store, read_only=read_only)


# -- What exists at a place --------------------------------------------------------------------------------------------

GROUP, ARRAY = "a Zarr group", "a Zarr array"
"""Kinds of what exists at a place."""


def standing_at(url: str, storage_options: Mapping[str, Any] | None) -> str:
    """Describe what exists at a canonical URL: ``""`` for nothing, :data:`GROUP`, or another short phrase."""
    return Location(url, storage_options).open_to_read()[1]


async def _standing_in(store: PatientStore, path: str) -> str:
    """Find out what exists at a path of a store, and its format. Empty folders do not count."""
    for name, kind in (("zarr.json", ""), (".zgroup", GROUP), (".zarray", ARRAY)):
        content = await store.get(f"{path}/{name}" if path else name)
        if content is not None:
            store.zarr_format = 2 if kind else 3
            try:
                return kind or {"group": GROUP}.get(json.loads(content.to_bytes())["node_type"], ARRAY)
            except (ValueError, KeyError, TypeError):
                return "a folder whose zarr.json cannot be read"
    return "" if await store.is_empty(path) else "a folder without zarr.json"


@dataclass(frozen=True, slots=True)
class Location:
    """Where a dataset is: at a canonical URL, or at a path in a store object, which ``url`` names in messages."""

    url: str
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    store: Store | None = field(default=None, repr=False)
    path: str = ""

    @classmethod
    def of(cls, place: Place, storage_options: Mapping[str, Any] | None = None) -> Self:
        """Check a place."""
        if isinstance(place, zarr.Group):
            place = place.store_path
        store, path = (place.store, place.path) if isinstance(place, StorePath) else (place, "")
        if type(store) is LocalStore:
            store = os.path.join(store.root, path)
        if not isinstance(store, Store):
            return cls(canonical_url(store), storage_options)
        _limits(storage_options, "a store")
        kind, name = type(store).__name__, short_repr(store)
        try:
            pickle.dumps(store)
        except Exception as error:  # whatever its class raises
            raise InvalidParameter.because(
                "url",
                f"this {kind} cannot be pickled, so workers cannot open it ({type(error).__name__}: {error})",
                "Open the dataset by its URL, or from a store that can be pickled, such as the store of a read-only "
                "session of icechunk.",
            ) from error
        return cls(f"{name}/{path}" if path else name, storage_options, store, path)

    def open(self, *, read_only: bool) -> PatientStore:
        """Open the store."""
        if self.store is None:
            return open_store(self.url, self.storage_options, read_only=read_only)
        opened = PatientStore(self.store, self.url, _limits(self.storage_options)[0], read_only=read_only)
        sync(opened._ensure_open())  # as zarr does; a ZipStore cannot be read otherwise
        return opened

    def open_to_read(self) -> tuple[PatientStore, str]:
        """Open the store, and find out what exists at the location."""
        store = self.open(read_only=True)
        if store.root and not os.path.isdir(store.root):
            return store, "a file" if os.path.exists(store.root) else ""
        return store, sync(_standing_in(store, self.path))


def write_object(url: str, data: bytes, storage_options: Mapping[str, Any] | None) -> None:
    """Write a small object beside datasets, such as a checkpoint. It replaces an earlier one at once, or not at all.

    A file on this machine's file systems has the mode 0600. It does not replace a symbolic link.
    """
    if is_local(url):
        replace_file(url, data)
        return
    folder, _, name = url.rpartition("/")
    sync(open_store(folder, storage_options, read_only=False).set(name, PROTOTYPE.buffer.from_bytes(data)))


def read_object(url: str, storage_options: Mapping[str, Any] | None) -> bytes | None:
    """Read the object at a canonical URL; None if there is none."""
    folder, _, name = url.rpartition("/")
    content = sync(open_store(folder, storage_options, read_only=True).get(name))
    return None if content is None else content.to_bytes()
