"""Create the arrays of a dataset and write their values, many arrays at a time."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, Crc32cCodec
from zarr.core.sync import sync

from dshuffle.store.reader import run_bounded

Slab = tuple[zarr.Array[Any], slice, NDArray[Any]]
"""An array, consecutive rows of it, and their values."""


async def create_array(
    group: zarr.Group,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    chunk_rows: int,
    shard_rows: int | None = None,
    dimensions: tuple[str, ...] | None = None,
) -> zarr.AsyncArray[Any]:
    """Create an array without values in a new group, in chunks of rows."""
    across = tuple(max(1, size) for size in shape[1:])
    return await group._async_group.create_array(
        name,
        shape=shape,
        dtype=dtype,
        chunks=(chunk_rows, *across),
        dimension_names=dimensions,
        overwrite=True,  # the group is new: without it, zarr asks the store three times what is there
        shards=None if shard_rows is None else (shard_rows, *across),
        # Floats hardly compress and re-reading them is the hot path, so rows are stored uncompressed. The checksum
        # turns a flipped bit or a truncated file into an error.
        filters=(),
        serializer=BytesCodec(),
        compressors=(Crc32cCodec(),),
        # Chunks of zeros are written too, so that a missing chunk is known to be lost.
        config={"write_empty_chunks": True},
    )


def write_slabs(slabs: Iterable[Slab]) -> None:
    """Write slabs concurrently: a table may have hundreds of narrow columns."""
    sync(run_bounded(((0, partial(target.async_array.setitem, rows, values)) for target, rows, values in slabs), 1))
