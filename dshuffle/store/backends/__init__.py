"""Open the Zarr store at a URL and find out what exists there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from zarr.abc.store import Store
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, MemoryStore

from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.redaction import option_values
from dshuffle.store.backends.local import LocalFiles
from dshuffle.store.backends.nfs import NfsStore
from dshuffle.store.backends.retrying import Patience, RetryingStore

try:
    from dshuffle.store.backends import s3
except ImportError:  # without the extra
    s3 = None  # type: ignore[assignment]

#: Return value of :func:`standing_at` for a Zarr group.
GROUP = "a Zarr group"

# Files of up to this many bytes in total are read in one call.
_BATCH_NBYTES = 1 << 20

_MEMORY: dict[str, dict[str, Buffer]] = {}


def canonical_url(url: str | os.PathLike[str]) -> str:
    """Return a URL that is valid in any process on this machine: local paths become absolute.

    Examples
    --------
    >>> canonical_url("file:///data/../scratch/x.zarr")
    '/scratch/x.zarr'
    >>> canonical_url("s3://bucket/x.zarr")
    's3://bucket/x.zarr'
    """
    if isinstance(url, os.PathLike):
        url = os.fspath(url)
    if not isinstance(url, str) or not url.strip():
        raise InvalidParameter.of("url", url, "a path or a URL", 'For example "data/x.zarr" or "s3://bucket/x".')
    scheme, separator, rest = url.partition("://")
    if separator and scheme != "file":
        if not rest.strip("/"):
            raise InvalidParameter.of("url", url, f"{scheme}:// followed by the location of the dataset")
        return url.rstrip("/")
    return os.path.abspath(rest if separator else url)


def is_local(url: str) -> bool:
    """Whether a canonical URL is a path on this machine's file systems."""
    return "://" not in url


def is_memory(url: str) -> bool:
    """Whether a canonical URL exists in this process only."""
    return url.startswith("memory://")


def open_store(
    url: str,
    storage_options: Mapping[str, Any] | None,
    *,
    read_only: bool,
    on_retry: Callable[[], None] | None = None,
) -> Store:
    """Open the Zarr store at a canonical URL. It retries requests after transient errors.

    ``memory://name`` is a registry in this process, for tests. Schemes other than local paths, S3 and NFS are opened
    with fsspec. The options ``max_retries`` and ``timeout`` configure retries, see ``Patience``. All other options are
    passed to the store.

    Raises
    ------
    InvalidParameter
        If the scheme or an option is unknown.
    DatasetError
        If the scheme needs a package that is not installed.
    """
    patience, options = Patience.of(storage_options)
    scheme = url.partition("://")[0] if "://" in url else ""
    secrets: tuple[str, ...] = ()
    limit: float | None = patience.timeout
    batch_nbytes = 0
    store: Store
    if scheme in ("", "memory", "nfs"):
        if options:
            # Values may be secrets, so show only the names of the options.
            raise InvalidParameter.of(
                "storage_options",
                sorted(options),
                f"max_retries or timeout for {url}",
                "Other options apply only to S3 and to fsspec's schemes.",
            )
        if scheme == "memory":
            name = url.removeprefix("memory://")
            kept = _MEMORY.get(name, {}) if read_only else _MEMORY.setdefault(name, {})
            return MemoryStore(kept, read_only=read_only)
        if scheme == "nfs":
            store = NfsStore(url, timeout=patience.timeout, read_only=read_only)
        else:
            store, batch_nbytes = LocalFiles(url, read_only=read_only), _BATCH_NBYTES
    elif scheme == "s3":
        store, secrets = _open_s3(url, options, patience, read_only=read_only)
        limit = None
    else:
        store = _open_fsspec(url, scheme, options, read_only=read_only)
        secrets = option_values(options)
    return RetryingStore(
        store, url, patience, limit=limit, secrets=secrets, on_retry=on_retry, batch_nbytes=batch_nbytes
    )


def _open_s3(
    url: str, options: dict[str, Any], patience: Patience, *, read_only: bool
) -> tuple[Store, tuple[str, ...]]:
    if s3 is None:
        raise DatasetError(f"{url} needs obstore to read s3:// URLs; install it with pip install 'dshuffle[s3]'")
    return s3.open_s3(url, options, patience, read_only=read_only)


def _open_fsspec(url: str, scheme: str, options: dict[str, Any], *, read_only: bool) -> Store:
    try:
        return FsspecStore.from_url(url, storage_options=options, read_only=read_only)
    except ImportError as exc:
        raise DatasetError(f"{url} needs a package for {scheme}:// URLs that is not installed: {exc}") from exc
    except ValueError as exc:
        raise InvalidParameter.of(
            "url",
            url,
            "a local path, memory://, s3://, nfs://, or a scheme that fsspec knows (gs://, https://, ...)",
            f"fsspec says: {exc}. Install the package for this scheme (gcsfs for gs://).",
        ) from exc


def standing_at(url: str, storage_options: Mapping[str, Any] | None) -> str:
    """Describe what exists at a canonical URL: ``""`` for nothing, :data:`GROUP`, or another short phrase."""
    store = open_store(url, storage_options, read_only=True)
    if is_local(url) and not os.path.isdir(url):
        return "a file" if os.path.exists(url) else ""
    try:
        found = sync(_node_in(store))
    except DatasetError:
        raise
    except Exception as exc:
        # Report any error of the file system to the user (no permission, no network, no such bucket).
        raise DatasetError(f"cannot access {url}: {type(exc).__name__}: {exc}") from exc
    return found or ("an empty folder" if is_local(url) else "")


async def _node_in(store: Store) -> str:
    prototype = default_buffer_prototype()
    document = await store.get("zarr.json", prototype)
    if document is not None:
        try:
            kind = json.loads(document.to_bytes())["node_type"]
        except (ValueError, KeyError, TypeError):
            return "a folder whose zarr.json cannot be read"
        return GROUP if kind == "group" else "a Zarr array"
    if await store.get(".zgroup", prototype) is not None:
        return GROUP
    if await store.get(".zarray", prototype) is not None:
        return "a Zarr array"
    return "" if await store.is_empty("") else "a folder without zarr.json"
