"""Whatever zarr reads from our stores passes through their get: retries, limits and counts hold."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import zarr
from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore, WrapperStore

from dshuffle.errors import CorruptChunk
from dshuffle.store import open_dataset
from dshuffle.store.backends.chunk_cache import ChunkCache
from dshuffle.store.backends.local import LocalFiles
from dshuffle.store.backends.metered import MeteredStore
from dshuffle.store.backends.refusals import RefusalsAsAbsence
from dshuffle.store.backends.retrying import RetryingStore
from dshuffle.store.backends.suffixes import ShorterSuffixes
from dshuffle.store.backends.wrapper import READS, Wrapper

X = np.arange(64 * 8, dtype="f4").reshape(64, 8)
WRAPPERS = [ChunkCache, MeteredStore, RefusalsAsAbsence, RetryingStore, ShorterSuffixes]


def test_every_way_to_read_is_known():
    """A release of zarr with another one fails here, and not in somebody's training."""
    forwarded = {name for name in vars(WrapperStore) if "get" in name}
    assert forwarded <= {"get", "get_partial_values", "get_sync", *READS}, forwarded
    assert all(issubclass(kind, Wrapper) for kind in WRAPPERS)
    for kind in WRAPPERS:
        for name in READS:
            assert getattr(kind, name, None) is getattr(Store, name, None)


class Counting(Wrapper):
    """A store that counts what passes through its get."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.keys: list[str] = []

    async def get(self, key, prototype, byte_range=None):
        self.keys.append(key)
        return await self._store.get(key, prototype, byte_range)


async def consumed(answers):
    return [answer async for answer in answers]


def test_ranges_and_lists_pass_through_get():
    prototype = default_buffer_prototype()
    store = Counting(MemoryStore({"a": prototype.buffer.from_bytes(bytes(range(9)))}))
    sync(consumed(store._get_many([("a", prototype, None)])))
    assert store.keys == ["a"]
    if hasattr(Store, "get_ranges"):
        [[(_, first), *_]] = sync(consumed(store.get_ranges("a", [RangeByteRequest(2, 4)], prototype=prototype)))
        assert first.to_bytes() == bytes([2, 3])
        assert store.keys == ["a", "a"]
    assert not inspect.getattr_static(store, "_supports_sync_io")


@pytest.fixture
def shards(tmp_path):
    """Shards of which only zarr reads the chunks, as these do not span the second axis."""
    zarr.create_group(tmp_path / "g").create_array("x", shape=X.shape, dtype="f4", chunks=(4, 4), shards=(32, 8))[:] = X
    return str(tmp_path / "g")


def test_a_reset_connection_within_a_shard_is_retried(shards, monkeypatch):
    dataset = open_dataset(shards)
    read, failed = LocalFiles.get, []

    async def get(self, key, prototype=None, byte_range=None):
        if isinstance(byte_range, RangeByteRequest) and not failed:
            failed.append(key)
            raise ConnectionResetError("by peer")
        return await read(self, key, prototype, byte_range)

    monkeypatch.setattr(LocalFiles, "get", get)
    assert np.array_equal(dataset.read_rows([0, 1, 40])["x"], X[[0, 1, 40]])
    assert failed
    assert dataset.traffic.retries == 1
    assert dataset.traffic.fetched_bytes > 0


def test_an_absent_chunk_is_an_error_with_every_codec_pipeline(tmp_path):
    pipeline = pytest.importorskip("zarr.core.codec_pipeline")
    if not hasattr(pipeline, "FusedCodecPipeline"):
        pytest.skip("this release of zarr has one codec pipeline")
    array = zarr.create_group(tmp_path / "g").create_array("x", shape=X.shape, dtype="f4", chunks=(4, 2))
    array[:] = X
    (tmp_path / "g/x/c/0/0").unlink()
    with zarr.config.set({"codec_pipeline.path": "zarr.core.codec_pipeline.FusedCodecPipeline"}):
        dataset = open_dataset(tmp_path / "g", absent_chunks="error")
        with pytest.raises(CorruptChunk, match="x/c/0/0"):
            dataset.read_rows([0])
        assert dataset.traffic.requests > 0
