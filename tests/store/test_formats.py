"""Arrays in any format that Zarr has: rows are those that zarr reads, whichever way dshuffle reads them."""

from __future__ import annotations

import itertools
import os
import tempfile
import warnings
from dataclasses import dataclass, field
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
import zarr.codecs.numcodecs as v3_numcodecs
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec, ZstdCodec

from dshuffle.store import open_dataset
from dshuffle.store.places import open_store

EXAMPLES = int(os.environ.get("DSHUFFLE_EXAMPLES", 3 * settings.default.max_examples))
pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")

RARELY = st.sampled_from([False] * 7 + [True])
NUMBERS = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
OTHERS = ["M8[s]", "m8[ms]", "S3", "U2", "V3", [("a", "i1"), ("b", "f4")], [("a", "u1"), ("b", "S2")]]


@dataclass
class Layout:
    """An array to write: its values, and the chunks of which only some are stored."""

    values: np.ndarray
    chunks: tuple[int, ...]
    stored: list[int]
    fill_value: Any
    numbers: np.random.Generator = field(repr=False)

    def write(self, array: Any) -> None:
        """Write some bands of the array; the others keep the fill value."""
        for band in self.stored:
            rows = slice(band * self.chunks[0], min((band + 1) * self.chunks[0], len(self.values)))
            array[rows] = self.values[rows]


@st.composite
def layouts(draw: st.DrawFn, dtypes: list[Any], orders: str = "<") -> Layout:
    dtype = np.dtype(draw(st.sampled_from(dtypes))).newbyteorder(draw(st.sampled_from(orders)))
    across = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    n_rows, chunk_rows = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    chunks = (chunk_rows, *((1 for _ in across) if draw(RARELY) else across))
    numbers = np.random.default_rng(draw(st.integers(0, 99)))
    items = numbers.integers(0, 256, (n_rows, *across, dtype.itemsize), dtype=np.uint8)
    if dtype.kind == "b":
        items &= 1
    elif dtype.kind == "U":
        items = np.zeros_like(items)
        items.view("u4")[:] = numbers.integers(97, 123, items.view("u4").shape)
        if dtype.byteorder == ">":
            items = items.view("u4").byteswap().view("u1")
    values = items.view(dtype).reshape(n_rows, *across)
    fill_value = values.reshape(-1)[0] if dtype.kind in "iuf" and draw(st.booleans()) else None
    bands = range(-(-n_rows // chunk_rows))
    stored = draw(st.sets(st.sampled_from(bands))) if draw(st.booleans()) else set(bands)
    return Layout(values, chunks, sorted(stored), fill_value, numbers)


def chains(codecs: list[Any], most: int = 2) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(codecs), max_size=most)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # numcodecs has no specification for v3
    EXTENSIONS = [v3_numcodecs.LZ4(), v3_numcodecs.BZ2(), v3_numcodecs.Zlib(), v3_numcodecs.Adler32()]

V3_COMPRESSORS = [
    Crc32cCodec(),
    ZstdCodec(level=1),
    ZstdCodec(level=3, checksum=True),
    GzipCodec(level=1),
    BloscCodec(typesize=4, cname="lz4", shuffle="shuffle"),
    BloscCodec(typesize=1, cname="zstd", shuffle="bitshuffle"),
    BloscCodec(typesize=2, cname="zlib", shuffle="noshuffle"),
]
ENDIANS = st.sampled_from(["little", "little", "little", "big"])


@st.composite
def v3_options(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
    """Options of ``create_array`` for Zarr v3."""
    dtype = layout.values.dtype
    has_order = dtype.itemsize > 1 and dtype.kind not in "SV?"
    serializer = BytesCodec(endian=draw(ENDIANS)) if has_order else BytesCodec()
    filters: list[Any] = []
    if layout.values.ndim > 1 and draw(RARELY):
        filters = [TransposeCodec(order=tuple(reversed(range(layout.values.ndim))))]
    elif dtype.kind in "iu" and draw(RARELY):
        filters = [v3_numcodecs.Delta(dtype=dtype.str)]
    compressors = draw(chains(V3_COMPRESSORS))
    if draw(RARELY):
        compressors.insert(0, v3_numcodecs.Shuffle(elementsize=dtype.itemsize))
    elif draw(RARELY):
        compressors.append(draw(st.sampled_from(EXTENSIONS)))
    options: dict[str, Any] = {"order": draw(st.sampled_from("CF")), "write_empty_chunks": draw(st.booleans())}
    # Zarr before 3.2 cannot write numcodecs, structs or raw bytes into shards.
    unshardable = dtype.kind == "V" or any(hasattr(codec, "codec_config") for codec in [*filters, *compressors])
    if unshardable or not draw(st.booleans()):
        return {"filters": filters, "serializer": serializer, "compressors": compressors, "config": options}
    sharding = ShardingCodec(
        chunk_shape=layout.chunks,
        codecs=[*filters, serializer, *compressors],
        index_codecs=[BytesCodec(endian=draw(ENDIANS)), *draw(st.sampled_from([[Crc32cCodec()], [Crc32cCodec()], []]))],
        index_location=draw(st.sampled_from(["start", "end"])),
    )
    shard = (layout.chunks[0] * draw(st.integers(1, 3)), *layout.chunks[1:])
    after = draw(st.sampled_from([[], [], [], [Crc32cCodec()]]))
    return {"chunks": shard, "filters": [], "serializer": sharding, "compressors": after, "config": options}


V2_COMPRESSORS = [
    None,
    numcodecs.Blosc(cname="lz4"),
    numcodecs.Blosc(cname="zstd", shuffle=2),
    numcodecs.Zstd(level=1),
    numcodecs.GZip(level=1),
    numcodecs.Zlib(level=1),
    numcodecs.LZ4(),
    numcodecs.BZ2(level=1),
    numcodecs.LZMA(),
]


@st.composite
def v2_options(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
    """Options of ``create_array`` for Zarr v2."""
    dtype = layout.values.dtype
    filters: list[Any] = []
    if dtype.kind in "iu":
        filters = draw(chains([numcodecs.Delta(dtype=dtype.str)], 1))
    if draw(RARELY):
        filters.append(numcodecs.Shuffle(elementsize=dtype.itemsize))
    return {
        "filters": filters or None,
        "compressors": draw(st.sampled_from(V2_COMPRESSORS)),
        "order": draw(st.sampled_from("CCF")),
        "chunk_key_encoding": {"name": "v2", "separator": draw(st.sampled_from("./"))},
    }


names = itertools.count()


def check(url: str, layout: Layout) -> None:
    """Compare rows of a dataset, in some order, with those that zarr reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        truth = zarr.open_array(open_store(url, None, read_only=True), path="x", mode="r")[...]
        dataset = open_dataset(url, decode=False)
    event("zarr" if dataset._sources["x"].decoders is None else "own decoders")
    assert dataset.arrays["x"].dtype == truth.dtype
    ids = layout.numbers.integers(0, len(truth), 2 * len(truth))
    assert dataset.read_rows(ids)["x"].tobytes() == truth[ids].tobytes()
    rows = dataset.layout.empty(len(truth))
    slots = layout.numbers.permutation(len(truth))
    dataset.read_into(rows, slots, np.arange(len(truth)))
    assert rows[slots].tobytes() == truth.tobytes()


def create(layout: Layout, zarr_format: Any, options: dict[str, Any]) -> str:
    url = f"memory://formats-{next(names)}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = zarr.create_group(open_store(url, None, read_only=False), zarr_format=zarr_format)
        array = group.create_array(
            "x",
            **{"chunks": layout.chunks, **options},
            shape=layout.values.shape,
            dtype=layout.values.dtype,
            fill_value=layout.fill_value,
        )
        layout.write(array)
    return url


@pytest.mark.parametrize(("zarr_format", "orders", "options"), [(3, "<", v3_options), (2, "<>", v2_options)])
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_format(zarr_format: int, orders: str, options: Any, data: st.DataObject) -> None:
    layout = data.draw(layouts([*NUMBERS, *OTHERS], orders))
    check(create(layout, zarr_format, data.draw(options(layout))), layout)


def tensorstore_v3(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
    dtype = layout.values.dtype
    order = {"endian": draw(ENDIANS)} if dtype.itemsize > 1 else {}
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": order}]
    if layout.values.ndim > 1 and draw(RARELY):
        axes = list(reversed(range(layout.values.ndim)))
        codecs.insert(0, {"name": "transpose", "configuration": {"order": axes}})
    blosc = {"typesize": 4, "cname": "lz4", "clevel": 5, "shuffle": "shuffle", "blocksize": 0}
    compressors = [("crc32c", {}), ("gzip", {"level": 1}), ("zstd", {"level": 1}), ("blosc", blosc)]
    codecs += [{"name": name, "configuration": fields} for name, fields in draw(chains(compressors))]
    chunks = layout.chunks
    if draw(st.booleans()):
        index_codecs = [{"name": "bytes", "configuration": {"endian": draw(ENDIANS)}}, {"name": "crc32c"}]
        location = draw(st.sampled_from(["start", "end"]))
        fields = {"chunk_shape": chunks, "codecs": codecs, "index_codecs": index_codecs, "index_location": location}
        codecs = [{"name": "sharding_indexed", "configuration": fields}]
        chunks = (chunks[0] * draw(st.integers(1, 3)), *chunks[1:])
    grid = {"name": "regular", "configuration": {"chunk_shape": chunks}}
    return {"shape": layout.values.shape, "data_type": dtype.name, "chunk_grid": grid, "codecs": codecs}


def tensorstore_v2(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
    compressors = [
        None,
        {"id": "zlib", "level": 1},
        {"id": "zstd", "level": 1},
        {"id": "bz2", "level": 1},
        {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1},
    ]
    return {
        "shape": layout.values.shape,
        "chunks": layout.chunks,
        "dtype": layout.values.dtype.str,
        "compressor": draw(st.sampled_from(compressors)),
        "order": draw(st.sampled_from("CCF" if layout.values.ndim > 1 else "C")),
        "dimension_separator": draw(st.sampled_from("./")),
    }


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_arrays_that_tensorstore_wrote(data: st.DataObject) -> None:
    tensorstore = pytest.importorskip("tensorstore", reason="tensorstore is not installed")
    zarr_format, orders, describe = data.draw(
        st.sampled_from([(3, "<", tensorstore_v3), (3, "<", tensorstore_v3), (2, "<>", tensorstore_v2)])
    )
    layout = data.draw(layouts(NUMBERS, orders))
    metadata = describe(data.draw, layout)
    with tempfile.TemporaryDirectory() as folder:
        zarr.create_group(folder, zarr_format=zarr_format)
        driver = "zarr3" if zarr_format == 3 else "zarr"
        kvstore = {"driver": "file", "path": f"{folder}/x"}
        spec = {"driver": driver, "kvstore": kvstore, "metadata": metadata, "create": True}
        if layout.fill_value is not None:
            spec["schema"] = {"fill_value": layout.fill_value.item()}
        layout.write(tensorstore.open(spec).result())
        check(folder, layout)
