"""Where datasets are: URLs and paths as users write them, Zarr stores, how they are opened, and what exists there."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Self

import zarr
from zarr.abc.store import Store
from zarr.core.buffer import Buffer
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, StorePath

from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.private_files import replace_file
from dshuffle.redaction import option_values, short_repr
from dshuffle.store.patient_store import PROTOTYPE, AccessRefused, Meter, Patience, PatientStore, explained

try:
    from obstore.exceptions import BaseError
    from obstore.store import S3Store
except ImportError:  # without the extra
    S3Store = None  # type: ignore[assignment,misc]

Place = str | os.PathLike[str] | Store | StorePath | zarr.Group
"""What users pass as the place of a dataset."""

_WRONG_URLS = {
    r"\s|(?s:.*\s)$": "without spaces and line ends around it",
    r"[A-Za-z]:[\\/]|\\\\": "a POSIX path or a URL, and not a path of Windows",
    r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)": "a path, or a URL with two slashes after the colon (pathlib.Path removes one)",
    r"(?i:nfs)://": "a path below the place where all hosts mount the export (mount -t nfs SERVER:/EXPORT /MOUNT)",
    r"(?i:file)://(?!(localhost)?/.)": "file:///PATH or file://localhost/PATH",
    r"[^/]+:///*$": "a scheme followed by the location of the dataset",
}

_SAME_ANSWER = "A store that may not be listed answers in the same way if the object does not exist"

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


def open_store(
    url: str, storage_options: Mapping[str, Any] | None, *, read_only: bool, meter: Meter | None = None
) -> PatientStore:
    """Open the Zarr store at a canonical URL. It repeats requests after transient errors.

    ``memory://name`` is a registry in this process, for tests. Schemes other than local paths and S3 are opened with
    fsspec. The options ``max_retries``, ``timeout`` and ``connections`` limit requests, see ``Patience``. All other
    options are passed to the store.
    """
    scheme = "" if is_local(url) else url.partition("://")[0]
    # Some servers with a short queue answer nobody for long if a process opens more.
    patience, options = Patience.of(storage_options, **({"connections": 16} if scheme in ("http", "https") else {}))
    secrets, access = option_values(options), f"If {scheme}:// needs credentials, give them in storage_options"
    store: Store
    if scheme in ("", "memory"):
        _refuse_options(options, url)
        access, name = "", url.removeprefix("memory://")
        if scheme:
            kept = _MEMORY.get(name, {}) if read_only else _MEMORY.setdefault(name, {})
            store = MemoryStore(kept, read_only=read_only)
        else:
            store = LocalStore(url, read_only=read_only)
    elif scheme == "s3":
        store, secrets = _open_s3(url, options, patience, read_only=read_only)
        access = (
            "The credentials, if there are any, lack the permission, or the bucket is public and needs anon=True, or "
            "its readers pay and it needs requester_pays=True"
        )
    else:
        store = _open_fsspec(url, scheme, options, read_only=read_only)
    access = access and f"{access}. {_SAME_ANSWER}"
    return PatientStore(store, url, patience, limits_itself=scheme == "s3", secrets=secrets, access=access, meter=meter)


def _refuse_options(options: Mapping[str, Any], place: str) -> None:
    if options:
        # Values may be secrets, so show only the names of the options.
        allowed = f"max_retries, timeout or connections for {place}"
        hint = "Other options apply only to S3 and to fsspec's schemes. Set other options of a store where you make it."
        raise InvalidParameter.of("storage_options", sorted(options), allowed, hint)


# Options as s3fs and boto3 call them -> as obstore does, which also knows the names with AWS_ before them.
_S3_NAMES = {
    "key": "access_key_id",
    "username": "access_key_id",
    "secret": "secret_access_key",
    "password": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "anon": "skip_signature",
    "requester_pays": "request_payer",
}
_S3_SECRETS = ("access_key_id", "secret_access_key", "session_token", "sse_customer_key_base64")
_S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def _open_s3(
    url: str, options: dict[str, Any], patience: Patience, *, read_only: bool
) -> tuple[Store, tuple[str, ...]]:
    """Open the store at an ``s3://`` URL. Return it, and the secrets that must not appear in its errors.

    Missing options come from the usual environment variables (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
    ``AWS_SESSION_TOKEN``, ``AWS_REGION``, ``AWS_ENDPOINT_URL``, ...), then from the role of the machine.

    obstore takes 2-3 CPU seconds per GB and s3fs 6-9 (measured on one machine with Ceph's and other servers). Workers
    need their processors for training.
    """
    if S3Store is None:
        raise DatasetError(f"{url} needs obstore to read s3:// URLs; install it with pip install 'dshuffle[s3]'")
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if "@" in bucket or "?" in url:
        raise InvalidParameter.of(
            "url", "s3://***", "s3://bucket/prefix", "Put credentials and options in storage_options."
        )
    client = options.pop("client_options", {})
    config: Any = {}
    for name, value in {**(options.pop("client_kwargs", None) or {}), **options}.items():
        own = str(name).removeprefix("aws_")
        own = _S3_NAMES.get(own, own)
        if config.get(own, value) != value:
            reason = f"{own} is given twice with different values"
            raise InvalidParameter.because("storage_options", reason, "Give each option once.")
        if value is not None:
            config[own] = value
    secrets = tuple(
        str(value)
        for name in _S3_SECRETS
        for value in (config.get(name), os.environ.get(f"AWS_{name.upper()}"))
        if value
    )
    endpoint = config.get("endpoint", next(filter(None, map(os.environ.get, _S3_ENDPOINTS)), None))
    # obstore would panic later on an invalid endpoint.
    if endpoint is not None:
        if not str(endpoint).startswith(("http://", "https://")) or "@" in str(endpoint):
            shown = "***" if "@" in str(endpoint) else endpoint
            hint = "Give credentials as separate options."
            raise InvalidParameter.of("endpoint", shown, "http://HOST:PORT or https://HOST[:PORT]", hint)
        config["endpoint"] = endpoint
    limits: Any = {
        # HTTP without TLS only if the endpoint says so.
        "allow_http": str(endpoint).startswith("http://"),
        "connect_timeout": timedelta(seconds=min(10.0, patience.timeout)),
        # Time without data, not for the whole answer: a large chunk may take long over a slow link.
        "read_timeout": timedelta(seconds=patience.timeout),
        "timeout": timedelta(seconds=10 * patience.timeout),
        **client,
    }
    try:
        # PatientStore repeats requests, and counts them.
        retries: Any = {"max_retries": 0}
        store = S3Store(bucket, prefix=prefix or None, client_options=limits, retry_config=retries, config=config)
    except (BaseError, TypeError, ValueError) as exc:
        raise InvalidParameter.because(
            "storage_options", f"obstore rejects {sorted(map(str, options))} ({explained(exc, secrets)})"
        ) from None
    return ObjectStore(store, read_only=read_only), secrets


def _open_fsspec(url: str, scheme: str, options: dict[str, Any], *, read_only: bool) -> Store:
    try:
        return FsspecStore.from_url(url, storage_options=options, read_only=read_only)
    except OSError as exc:  # some file systems connect at once
        raise DatasetError(f"cannot open {url}: {explained(exc, option_values(options))}") from None
    except ImportError as exc:
        raise DatasetError(f"{url} needs a package for {scheme}:// URLs that is not installed: {exc}") from exc
    except ValueError as exc:
        raise InvalidParameter.of(
            "url",
            url,
            "a local path, memory://, s3://, or a scheme that fsspec knows (gs://, https://, ...)",
            f"fsspec says: {exc}. Install the package for this scheme (gcsfs for gs://).",
        ) from exc


GROUP, ARRAY = "a Zarr group", "a Zarr array"
"""Kinds of what exists at a place."""


class Standing(NamedTuple):
    """What exists at a place: its kind (``""`` for nothing), the key of its metadata document, and its format."""

    kind: str
    document: str = ""
    zarr_format: Literal[2, 3] | None = None


def standing_at(url: str, storage_options: Mapping[str, Any] | None) -> str:
    """Describe what exists at a canonical URL: ``""`` for nothing, :data:`GROUP`, or another short phrase."""
    return standing_in(open_store(url, storage_options, read_only=True), url, "").kind


def standing_in(store: Store, url: str, path: str) -> Standing:
    """Find out what exists at a path of an open store, whose URL or name is in errors. Empty folders do not count."""
    if os.path.isabs(url) and not os.path.isdir(url):
        return Standing("a file" if os.path.exists(url) else "")
    try:
        return sync(_node_in(store, path))
    except DatasetError:
        raise
    except Exception as exc:
        # Report any error of the file system to the user (no permission, no network, no such bucket).
        raise DatasetError(f"cannot access {url}: {type(exc).__name__}: {exc}") from exc


async def _node_in(store: Store, path: str) -> Standing:
    refusal: AccessRefused | None = None
    for name, kind in (("zarr.json", ""), (".zgroup", GROUP), (".zarray", ARRAY)):
        key = f"{path}/{name}" if path else name
        try:
            content = await store.get(key, PROTOTYPE)
        except AccessRefused as error:  # perhaps it does not exist
            refusal = refusal or error
            continue
        if content is None:
            continue
        if kind:
            return Standing(kind, key, 2)
        try:
            kind = json.loads(content.to_bytes())["node_type"]
        except (ValueError, KeyError, TypeError):
            return Standing("a folder whose zarr.json cannot be read", key)
        return Standing(GROUP if kind == "group" else ARRAY, key, 3)
    if refusal is not None:
        raise refusal
    return Standing("" if await store.is_empty(path) else "a folder without zarr.json")


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
        if not isinstance(store, Store):
            return cls(canonical_url(store), storage_options)
        if type(store) is LocalStore:
            return cls(canonical_url(os.path.join(store.root, path)), storage_options)
        kind, name = type(store).__name__, short_repr(store)
        _refuse_options(Patience.of(storage_options)[1], "a store")
        try:
            _read_only(store)
            pickle.dumps(store)
        except NotImplementedError as error:
            reason = f"this {kind} has no read-only copy"
            raise InvalidParameter.because("url", reason, "Open it read-only.") from error
        except Exception as error:  # whatever its class raises
            raise InvalidParameter.because(
                "url",
                f"this {kind} cannot be pickled, so workers cannot open it ({type(error).__name__}: {error})",
                "Open the dataset by its URL, or from a store that can be pickled, such as the store of a read-only "
                "session of icechunk.",
            ) from error
        return cls(f"{name}/{path}" if path else name, storage_options, store, path)

    def open(self, *, read_only: bool, meter: Meter | None = None) -> PatientStore:
        """Open the store."""
        if self.store is None:
            return open_store(self.url, self.storage_options, read_only=read_only, meter=meter)
        store = _read_only(self.store) if read_only else self.store
        # Strings among the options of a store of obstore or fsspec may be secrets.
        inner = getattr(getattr(store, "store", None), "config", None)
        options = inner or getattr(getattr(store, "fs", None), "storage_options", None) or {}
        opened = PatientStore(
            store,
            self.url,
            Patience.of(self.storage_options)[0],
            secrets=option_values(options) if isinstance(options, Mapping) else (),
            access=f"The store has its own credentials. {_SAME_ANSWER}",
            meter=meter,
        )
        sync(opened._ensure_open())  # as zarr does; a ZipStore cannot be read otherwise
        return opened

    def open_to_read(self, absent_chunks: str | None, meter: Meter | None = None) -> tuple[PatientStore, Standing]:
        """Open the store, and find out what exists at the location.

        ``absent_chunks`` is what an absent chunk is, if the user has said so.
        """
        store = self.open(read_only=True, meter=meter)
        standing = standing_in(store, self.url, self.path)
        if self.store is not None or not (is_local(self.url) or is_memory(self.url)):
            # This store may be one that does not say which objects do not exist.
            store.document, store.absent_chunks = standing.document, absent_chunks
        return store, standing


def _read_only(store: Store) -> Store:
    return store if store.read_only else store.with_read_only(True)


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
