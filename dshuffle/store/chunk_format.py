"""How the stored bytes of a chunk become rows, read from the metadata document of the array.

The document, as zarr writes it, is what the Zarr specifications define: the attributes of zarr's classes change
between releases. A
document is understood only if every field of it is. Zarr itself reads all other arrays.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
from numcodecs import GZip, Zstd
from numcodecs.blosc import Blosc
from zarr import Array
from zarr.core.buffer import default_buffer_prototype

Decoder = Callable[[Any], Any]
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChunkFormat:
    """How stored bytes become the rows of a chunk.

    Parameters
    ----------
    decoders
        Functions that undo the codecs, last codec first.
    shard_chunks
        Number of chunks in a shard; 0 if the array is not sharded.
    index_first
        Whether the index is at the start of a shard instead of the end.
    document
        What this was read from: the metadata document without the attributes of the user. Equal documents mean equal
        formats.
    """

    decoders: tuple[Decoder, ...]
    shard_chunks: int = 0
    index_first: bool = False
    document: str = field(default="", repr=False)

    @classmethod
    def of(cls, array: Array[Any]) -> ChunkFormat | None:
        """Return the format of an array's chunks; None if only zarr can read them.

        Chunks must be whole rows: all axes except the first are in one chunk.

        Examples
        --------
        >>> import zarr
        >>> ChunkFormat.of(zarr.create_array({}, shape=(4, 2), dtype="i4", chunks=(2, 2), compressors=None))
        ChunkFormat(decoders=(), shard_chunks=0, index_first=False)
        >>> ChunkFormat.of(zarr.create_array({}, shape=(4, 2), dtype="i4", chunks=(2, 1))) is None
        True
        """
        if not math.prod(array.shape[1:]):
            return None
        document = _document(array)
        chunk_format = _v2(document, array) if document["zarr_format"] == 2 else _v3(document, array)
        if chunk_format is None:
            return None
        kind = {name: value for name, value in document.items() if name != "attributes"}
        return replace(chunk_format, document=json.dumps(kind, sort_keys=True))


def checked(data: Any) -> Any:
    """Return bytes without the CRC-32C at their end.

    Raises
    ------
    ValueError
        If the bytes do not have this checksum.
    """
    body, stored = data[:-4], data[-4:]
    if google_crc32c.value(body) != int.from_bytes(stored, "little"):
        raise ValueError("the checksum does not match the bytes")
    return body


def _document(array: Array[Any]) -> Document:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dtypes without a specification, of which reading has warned
        documents = array.metadata.to_buffer_dict(default_buffer_prototype())
    name = "zarr.json" if "zarr.json" in documents else ".zarray"
    document: Document = json.loads(documents[name].to_bytes())
    return document


V2_FIELDS = {"zarr_format", "shape", "chunks", "dtype", "compressor", "fill_value", "order", "filters"}
V2_COMPRESSORS = {"blosc", "bz2", "gzip", "lz4", "lzma", "zlib", "zstd"}
"""Compressors of numcodecs that turn bytes into bytes."""


def _v2(document: Document, array: Array[Any]) -> ChunkFormat | None:
    if not set(document) <= V2_FIELDS | {"dimension_separator"}:
        return None
    if document["order"] != "C" or document["filters"] or not _whole_rows(document["chunks"], array):
        return None
    if np.dtype(_v2_dtype(document["dtype"])) != array.dtype:
        return None
    compressor = document["compressor"]
    if compressor is None:
        return ChunkFormat(())
    return ChunkFormat((numcodecs.get_codec(compressor).decode,)) if compressor["id"] in V2_COMPRESSORS else None


def _v2_dtype(dtype: Any) -> Any:
    """Return a dtype as NumPy takes it: JSON has lists where NumPy has tuples."""
    return dtype if isinstance(dtype, str) else [tuple(map(_v2_dtype, item)) for item in dtype]


V3_FIELDS = {
    "zarr_format",
    "node_type",
    "shape",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "codecs",
    "attributes",
    "dimension_names",
    "storage_transformers",
}
V3_NUMBERS = {
    f"{kind}{bits}"
    for kind, sizes in {
        "int": (8, 16, 32, 64),
        "uint": (8, 16, 32, 64),
        "float": (16, 32, 64),
        "complex": (64, 128),
    }.items()
    for bits in sizes
}
V3_ITEMS = {
    "fixed_length_utf32": {"length_bytes"},
    "null_terminated_bytes": {"length_bytes"},
    "numpy.datetime64": {"unit", "scale_factor"},
    "numpy.timedelta64": {"unit", "scale_factor"},
    "raw_bytes": {"length_bytes"},
    "struct": {"fields"},
    "structured": {"fields"},
}
"""Types with a configuration, and its fields."""

SHARD_FIELDS = {"chunk_shape", "codecs", "index_codecs", "index_location"}
INDEX_CODECS = [("bytes", {"endian": "little"}), ("crc32c", {})]

# Decompression does not need the parameters used for compression.
V3_DECODERS: dict[str, tuple[set[str], Decoder]] = {
    "blosc": ({"typesize", "cname", "clevel", "shuffle", "blocksize"}, Blosc().decode),
    "crc32c": (set(), checked),
    "gzip": ({"level"}, GZip().decode),
    "zstd": ({"level", "checksum"}, Zstd().decode),
}
"""Codec -> the fields of its configuration, and a function that undoes it."""


def _v3(document: Document, array: Array[Any]) -> ChunkFormat | None:
    if not set(document) <= V3_FIELDS or document.get("storage_transformers"):
        return None
    grid, configuration = _named(document["chunk_grid"])
    if grid != "regular" or set(configuration) != {"chunk_shape"} or not _known_items(document["data_type"], array):
        return None
    outer = configuration["chunk_shape"]
    codecs = list(map(_named, document["codecs"]))
    if not _whole_rows(outer, array):
        return None
    if codecs[0][0] != "sharding_indexed":
        decoders = _decoders(codecs, array)
        return None if decoders is None else ChunkFormat(decoders)
    sharding = {"index_location": "end", **codecs[0][1]}
    if len(codecs) > 1 or set(sharding) != SHARD_FIELDS or not _whole_rows(sharding["chunk_shape"], array):
        return None
    location, index_codecs = sharding["index_location"], list(map(_named, sharding["index_codecs"]))
    decoders = _decoders(list(map(_named, sharding["codecs"])), array)
    if location not in ("start", "end") or index_codecs != INDEX_CODECS or decoders is None:
        return None
    return ChunkFormat(decoders, outer[0] // sharding["chunk_shape"][0], location == "start")


def _named(value: Any) -> tuple[str, Document]:
    """Return the name and the configuration of a part of the document, which may be a name alone."""
    if isinstance(value, str):
        return value, {}
    if set(value) <= {"name", "configuration"}:
        return value["name"], value.get("configuration") or {}
    return "", {}  # a field that is not known, such as must_understand


def _known_items(data_type: Any, array: Array[Any]) -> bool:
    """Whether stored items are those of the array's dtype, up to the order of their bytes."""
    name, configuration = _named(data_type)
    if name in V3_NUMBERS or name == "bool":
        return not configuration and np.dtype(name).newbyteorder("<") == array.dtype
    return name in V3_ITEMS and set(configuration) == V3_ITEMS[name]


def _decoders(codecs: Sequence[tuple[str, Document]], array: Array[Any]) -> tuple[Decoder, ...] | None:
    (serializer, order), *compressors = codecs
    if serializer != "bytes" or not set(order) <= {"endian"}:
        return None
    # A type that has an order of bytes needs one here. Zarr before 3.2 does not write one for structs, and reads them
    # in little-endian order.
    ordered = array.dtype.newbyteorder("S") != array.dtype
    legacy = array.dtype.fields is not None and "endian" not in order
    if ordered and not legacy and order.get("endian") != "little":
        return None
    if array.dtype.newbyteorder("<") != array.dtype:
        return None
    decoders = []
    for name, configuration in reversed(compressors):
        fields, decoder = V3_DECODERS.get(name, (set(), None))
        if decoder is None or not set(configuration) <= fields:
            return None
        decoders.append(decoder)
    return tuple(decoders)


def _whole_rows(chunk_shape: Sequence[int], array: Array[Any]) -> bool:
    return tuple(chunk_shape[1:]) == array.shape[1:]
