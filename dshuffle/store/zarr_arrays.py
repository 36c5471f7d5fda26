"""Create the arrays of a dataset and write their values, many arrays at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, Crc32cCodec
from zarr.core.array_spec import ArrayConfigParams
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import StorePath

from dshuffle.store.reader import run_bounded

Slab = tuple[zarr.Array[Any], slice, NDArray[Any]]
"""An array, consecutive rows of it, and their values."""


CONFIG: ArrayConfigParams = {"write_empty_chunks": True}
"""Chunks of zeros are written too, so that a missing chunk is known to be lost."""


@dataclass(frozen=True, slots=True)
class NewArray:
    """An array to create.

    Parameters
    ----------
    shape, dtype
        Shape and dtype of its values.
    chunk_rows, shard_rows
        Rows in a chunk and in a shard; ``None`` for no shards.
    dimensions
        Names of its dimensions.
    classes
        Names of the classes that its values number, for the attribute ``classes``; empty if they do not.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunk_rows: int
    shard_rows: int | None = None
    dimensions: tuple[str, ...] | None = None
    classes: tuple[str, ...] = ()

    def create(self, group: zarr.Group, name: str) -> zarr.Array[Any]:
        """Create it without values in a new group, in chunks of rows."""
        across = tuple(max(1, size) for size in self.shape[1:])
        return group.create_array(
            name,
            shape=self.shape,
            dtype=self.dtype,
            chunks=(self.chunk_rows, *across),
            dimension_names=self.dimensions,
            shards=None if self.shard_rows is None else (self.shard_rows, *across),
            # Floats hardly compress and re-reading them is the hot path, so rows are stored uncompressed. The checksum
            # turns a flipped bit or a truncated file into an error.
            filters=(),
            serializer=BytesCodec(),
            compressors=(Crc32cCodec(),),
            config=CONFIG,
            attributes={"classes": list(self.classes)} if self.classes else None,
        )


def create_arrays(group: zarr.Group, arrays: Mapping[str, NewArray]) -> dict[str, zarr.Array[Any]]:
    """Create arrays without values in a new group at the root of its store.

    Zarr takes milliseconds for each. So it makes the first array of a kind, and others of this kind, such as the
    columns of a table, get copies of its metadata document.
    """
    created: dict[str, zarr.Array[Any]] = {}
    first_of: dict[NewArray, zarr.Array[Any]] = {}
    copies: dict[str, zarr.Array[Any]] = {}
    for name, array in arrays.items():
        if array in first_of:
            copies[name] = first_of[array]
        else:
            created[name] = first_of[array] = array.create(group, name)

    async def copy(name: str, first: zarr.Array[Any]) -> None:
        for key, document in first.metadata.to_buffer_dict(default_buffer_prototype()).items():
            await group.store.set(f"{name}/{key}", document)
        created[name] = type(first)(zarr.AsyncArray(first.metadata, StorePath(group.store, name), CONFIG))

    sync(run_bounded(((0, partial(copy, name, first)) for name, first in copies.items()), 1))
    return created


def write_slabs(slabs: Iterable[Slab]) -> None:
    """Write slabs concurrently: a table may have hundreds of narrow columns."""
    sync(run_bounded(((0, partial(target.async_array.setitem, rows, values)) for target, rows, values in slabs), 1))
