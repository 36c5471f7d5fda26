"""What exists at a location."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from dshuffle.errors import DatasetError
from dshuffle.store.backends import open_store
from dshuffle.store.backends.store_errors import AccessRefused

GROUP = "a Zarr group"
"""Kind of a Zarr group."""

ARRAY = "a Zarr array"
"""Kind of a Zarr array."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What exists at a location.

    Parameters
    ----------
    kind
        :data:`GROUP`, :data:`ARRAY`, another short phrase, or ``""`` for nothing.
    document
        Key of its metadata document in the store, if it has one.
    zarr_format
        Format of the group or array.
    """

    kind: str
    document: str = ""
    zarr_format: Literal[2, 3] | None = None


def standing_at(url: str, storage_options: Mapping[str, Any] | None) -> str:
    """Describe what exists at a canonical URL: ``""`` for nothing, :data:`GROUP`, or another short phrase."""
    return standing_in(open_store(url, storage_options, read_only=True), url, "").kind


def standing_in(store: Store, url: str, path: str) -> Standing:
    """Find out what exists at a path of a store.

    Parameters
    ----------
    store
        Store, open.
    url
        Canonical URL or name of the store.
    path
        Path in it.

    Raises
    ------
    DatasetError
        If the store cannot be reached, or refuses access.
    """
    local = os.path.isabs(url)
    if local and not os.path.isdir(url):
        return Standing("a file" if os.path.exists(url) else "")
    try:
        standing = sync(_node_in(store, path))
    except DatasetError:
        raise
    except Exception as exc:
        # Report any error of the file system to the user (no permission, no network, no such bucket).
        raise DatasetError(f"cannot access {url}: {type(exc).__name__}: {exc}") from exc
    return Standing("an empty folder") if local and not standing.kind else standing


async def _node_in(store: Store, path: str) -> Standing:
    refusals: list[AccessRefused] = []

    async def document(name: str) -> tuple[str, bytes | None]:
        key = f"{path}/{name}" if path else name
        try:
            buffer = await store.get(key, default_buffer_prototype())
        except AccessRefused as error:  # perhaps it does not exist
            refusals.append(error)
            return key, None
        return key, None if buffer is None else buffer.to_bytes()

    key, content = await document("zarr.json")
    if content is not None:
        try:
            kind = json.loads(content)["node_type"]
        except (ValueError, KeyError, TypeError):
            return Standing("a folder whose zarr.json cannot be read", key)
        return Standing(GROUP if kind == "group" else ARRAY, key, 3)
    for name, kind in ((".zgroup", GROUP), (".zarray", ARRAY)):
        key, content = await document(name)
        if content is not None:
            return Standing(kind, key, 2)
    if refusals:
        raise refusals[0]
    return Standing("" if await store.is_empty(path) else "a folder without zarr.json")
