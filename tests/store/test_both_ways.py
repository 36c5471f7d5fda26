"""Zarr and dshuffle's own reader are compared, and a difference is an error; only known formats are read directly."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, ZstdCodec
from zarr.core.buffer import default_buffer_prototype

from dshuffle.errors import CorruptChunk, ReadersDiffer
from dshuffle.store import Dataset, both_ways, create_dataset, open_dataset, verify_dataset
from dshuffle.store.chunk_format import ChunkFormat

N = 40
X = np.arange(N * 3, dtype="i4").reshape(N, 3)


@pytest.fixture
def url(tmp_path: Path) -> str:
    create_dataset(tmp_path / "d", {"x": X, "y": np.arange(N)}, chunk_rows=10)
    return str(tmp_path / "d")


def swapped(data: Any) -> np.ndarray:
    return np.frombuffer(bytes(data)[:-4], "<i4").byteswap().view("u1")


def refused(data: Any) -> np.ndarray:
    raise ValueError("unknown frame")


def misread(monkeypatch: pytest.MonkeyPatch, decoder: Callable[[Any], Any]) -> None:
    """Let dshuffle's own reader take a wrong decoder for the array x."""
    understood = ChunkFormat.of.__func__

    def of(cls: type[ChunkFormat], array: Any) -> ChunkFormat | None:
        chunk_format = understood(cls, array)
        return dataclasses.replace(chunk_format, decoders=(decoder,)) if array.path == "x" else chunk_format

    monkeypatch.setattr(ChunkFormat, "of", classmethod(of))


@pytest.mark.parametrize(
    ("decoder", "reason"), [(swapped, "the bytes differ"), (refused, "only zarr can read it .*unknown frame")]
)
def test_a_difference_is_an_error_before_any_row_is_read(url, monkeypatch, decoder, reason):
    misread(monkeypatch, decoder)
    dataset = open_dataset(url)
    rows = np.full((N, dataset.row_nbytes), 7, np.uint8)
    for attempt in (dataset, pickle.loads(pickle.dumps(dataset))):  # as on the client, and as on a worker
        with pytest.raises(ReadersDiffer, match=rf"chunk \(3, 0\) of array 'x' of .*{reason}"):
            attempt.read_into(rows, np.arange(5), np.arange(35, 40))
    assert (rows == 7).all()


@pytest.mark.parametrize("decoder", [swapped, refused])
def test_verification_compares_every_chunk(url, monkeypatch, decoder):
    assert verify_dataset(open_dataset(url)).ok
    misread(monkeypatch, decoder)
    report = verify_dataset(open_dataset(url))
    assert len(report.bad) == 4
    assert all("of array 'x'" in message for message in report.bad)


def test_an_array_is_compared_once_and_not_counted_as_traffic(url):
    dataset = open_dataset(url)
    fetched: list[str] = []
    get = type(dataset._store.bare).get

    async def counted(self: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        fetched.append(key)
        return await get(self, key, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(dataset._store.bare), "get", counted)
        for view in (dataset, dataset.select(np.arange(30, 40)), dataset.windows({"x": [0, 1]})):
            view.read_rows([0])
    assert sorted(key for key in fetched if key in ("x/c/0/0", "y/c/0"))[:2] == ["x/c/0/0", "x/c/0/0"]
    assert sum(key == "x/c/3/0" for key in fetched) == 1, "the second view reads without comparing again"
    assert dataset.traffic.requests == 6


def test_of_arrays_with_equal_metadata_eight_are_compared(tmp_path, monkeypatch):
    table = {f"c{i:02}": np.arange(N, dtype="f4") for i in range(20)} | {"y": np.arange(N), "z": np.arange(N) / 2}
    create_dataset(tmp_path / "d", table, chunk_rows=10)
    dataset = open_dataset(tmp_path / "d")
    names: list[str] = []
    compare = both_ways.compare

    async def noted(source: Any, *args: Any) -> bool:
        names.append(source.name)
        return await compare(source, *args)

    monkeypatch.setattr(both_ways, "compare", noted)
    for ids in ([3], [30, 1]):
        rows = dataset.read_rows(ids)
        assert all(np.array_equal(rows[name], table[name][ids]) for name in table)
    assert sorted(names) == [*(f"c{i:02}" for i in range(8)), "y", "z"]


def test_damaged_and_absent_chunks_are_reported_as_before(url):
    chunk = Path(url) / "x/c/0/0"
    stored = chunk.read_bytes()
    chunk.write_bytes(stored[:-1])
    dataset = open_dataset(url)
    with pytest.raises(CorruptChunk, match="x/c/0/0"):
        dataset.read_rows([0])
    chunk.unlink()
    with pytest.raises(CorruptChunk, match="x/c/0/0"):
        dataset.read_rows([0])
    chunk.write_bytes(stored)
    assert dataset.read_rows([0])["x"].tolist() == [[0, 1, 2]]


def v3(path: Path, **options: Any) -> Dataset:
    settings = {"chunks": (10, 3), "compressors": None, **options}
    zarr.create_group(path).create_array("x", shape=X.shape, dtype="i4", **settings)[:] = X
    return open_dataset(path)


def sharded(**options: Any) -> dict[str, Any]:
    codecs = [BytesCodec(), Crc32cCodec()]
    return {"chunks": (20, 3), "serializer": ShardingCodec(chunk_shape=(5, 3), codecs=codecs, **options)}


INDEXES = {
    "start": {"index_location": "start"},
    "big-endian": {"index_codecs": [BytesCodec(endian="big"), Crc32cCodec()]},
    "unchecked": {"index_codecs": [BytesCodec(endian="little")]},
}


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({}, "direct"),
        ({"compressors": [ZstdCodec(checksum=True), Crc32cCodec()]}, "direct"),
        ({"compressors": [GzipCodec()]}, "direct"),
        ({"serializer": BytesCodec(endian="big")}, "zarr"),
        ({"chunks": (10, 1)}, "zarr"),
        (sharded(), "direct"),
        (sharded(**INDEXES["start"]), "direct"),
        (sharded(**INDEXES["big-endian"]), "zarr"),
        (sharded(**INDEXES["unchecked"]), "zarr"),
    ],
)
def test_what_is_read_directly(tmp_path, options, way):
    dataset = v3(tmp_path / "g", **options)
    assert dataset.read_by == {"x": way}
    assert np.array_equal(dataset.read_rows(np.arange(N))["x"], X)


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(extension={"must_understand": False}),
        lambda document: document["codecs"][1]["configuration"].update(dictionary="a", must_understand=False),
    ],
)
def test_documents_with_unknown_fields_are_left_to_zarr(change):
    array = zarr.create_array({}, shape=X.shape, dtype="i4", chunks=(10, 3), compressors=[GzipCodec()])
    document = json.loads(array.metadata.to_buffer_dict(default_buffer_prototype())["zarr.json"].to_bytes())
    assert ChunkFormat.of(StandIn(document, array)) is not None
    change(document)
    assert ChunkFormat.of(StandIn(document, array)) is None


class StandIn:
    """An array with another metadata document than zarr would accept or keep."""

    def __init__(self, document: dict[str, Any], array: Any) -> None:
        self._document, self.shape, self.dtype, self.metadata = document, array.shape, array.dtype, self

    def to_buffer_dict(self, prototype: Any) -> dict[str, Any]:
        return {"zarr.json": prototype.buffer.from_bytes(json.dumps(self._document).encode())}
