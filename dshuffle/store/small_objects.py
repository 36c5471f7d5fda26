"""Small files or objects beside datasets, such as checkpoints, in any store that can hold a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from dshuffle.store.backends import open_store


def write_object(url: str, data: bytes, storage_options: Mapping[str, Any] | None) -> None:
    """Write an object at a canonical URL. It replaces an earlier one at once, or not at all.

    A file on this machine's file systems has the mode 0600. It does not replace a symbolic link.

    Raises
    ------
    DatasetError, OSError
        If it cannot be written.
    """
    folder, _, name = url.rpartition("/")
    store = open_store(folder, storage_options, read_only=False, private=True)
    sync(store.set(name, default_buffer_prototype().buffer.from_bytes(data)))


def read_object(url: str, storage_options: Mapping[str, Any] | None) -> bytes | None:
    """Read the object at a canonical URL; None if there is none.

    Raises
    ------
    DatasetError, OSError
        If it cannot be read.
    """
    folder, _, name = url.rpartition("/")
    content = sync(open_store(folder, storage_options, read_only=True).get(name, default_buffer_prototype()))
    return None if content is None else bytes(content.to_bytes())
