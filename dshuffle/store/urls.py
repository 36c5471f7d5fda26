"""From a URL to a Zarr store, and what stands there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from zarr.abc.store import Store
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from dshuffle.errors import DatasetError, InvalidParameter

#: What :func:`standing_at` answers where a Zarr group stands.
GROUP = "a Zarr group"

_MEMORY: dict[str, dict[str, Buffer]] = {}


def canonical_url(url: str | os.PathLike[str]) -> str:
    """The URL that any process of this machine understands: local paths become absolute.

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
            raise InvalidParameter.of("url", url, f"{scheme}:// followed by where the dataset stands")
        return url.rstrip("/")
    return os.path.abspath(rest if separator else url)


def is_local(url: str) -> bool:
    """Whether a canonical URL is a path of this machine's file systems."""
    return "://" not in url


def is_memory(url: str) -> bool:
    """Whether a canonical URL lives in this process alone."""
    return url.startswith("memory://")


def open_store(url: str, storage_options: Mapping[str, Any] | None, *, read_only: bool) -> Store:
    """The Zarr store at a canonical URL.

    ``memory://name`` is a registry of this process, for tests. All that is neither local nor in memory is
    left to fsspec.
    """
    if is_local(url) or is_memory(url):
        if storage_options:
            # The values may be secrets: name the options only.
            raise InvalidParameter.of(
                "storage_options",
                sorted(storage_options),
                f"absent for {url}",
                "Only remote stores take options.",
            )
        if is_local(url):
            return LocalStore(url, read_only=read_only)
        name = url.removeprefix("memory://")
        return MemoryStore(_MEMORY.get(name, {}) if read_only else _MEMORY.setdefault(name, {}), read_only=read_only)
    try:
        return FsspecStore.from_url(url, storage_options=dict(storage_options or {}), read_only=read_only)
    except ImportError as exc:
        scheme = url.partition("://")[0]
        raise DatasetError(f"{url} needs a package that is not installed, to read {scheme}:// URLs: {exc}") from exc
    except ValueError as exc:
        raise InvalidParameter.of(
            "url",
            url,
            "a local path, memory://, or a scheme that fsspec knows (s3://, gs://, https://, ...)",
            f"fsspec says: {exc}. Install the package of this scheme (s3:// comes with s3fs).",
        ) from exc


def standing_at(url: str, storage_options: Mapping[str, Any] | None) -> str:
    """What stands at a canonical URL: ``""`` for nothing, :data:`GROUP`, or words that say what it is."""
    store = open_store(url, storage_options, read_only=True)
    if is_local(url) and not os.path.isdir(url):
        return "a file" if os.path.exists(url) else ""
    try:
        found = sync(_node_in(store))
    except Exception as exc:
        # Whatever a file system raises here (no permission, no network, no such bucket) is the user's to
        # read.
        raise DatasetError(f"cannot look at {url}: {type(exc).__name__}: {exc}") from exc
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
