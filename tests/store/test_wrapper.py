"""Whatever zarr reads from our stores passes through their get: retries, limits and counts hold."""

from __future__ import annotations

import http.server
import re
import threading
import time

import numpy as np
import pytest
import zarr
from zarr.abc.store import RangeByteRequest, Store
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, ObjectStore, WrapperStore

from dshuffle.errors import CorruptChunk, InvalidParameter
from dshuffle.store import create_dataset, open_dataset
from dshuffle.store.patient_store import Patience, PatientStore

from ..conftest import in_a_fork

X = np.arange(64 * 8, dtype="f4").reshape(64, 8)


def test_every_way_to_read_is_known():
    """A release of zarr with another one fails here, and not in somebody's training."""
    forwarded = {name for name in vars(WrapperStore) if "get" in name}
    reads = {"_get_many", "get_ranges"}
    assert forwarded <= {"get", "get_partial_values", "get_sync", *reads}, forwarded
    for name in reads:
        assert getattr(PatientStore, name, None) is getattr(Store, name, None)


class Counting(PatientStore):
    """A store that counts what passes through its get."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, "here", Patience())
        self.keys: list[str] = []

    async def get(self, key, prototype=None, byte_range=None):
        self.keys.append(key)
        return await super().get(key, prototype, byte_range)


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
    assert not store._supports_sync_io


@pytest.fixture
def shards(tmp_path):
    """Shards of which only zarr reads the chunks, as these do not span the second axis."""
    zarr.create_group(tmp_path / "g").create_array("x", shape=X.shape, dtype="f4", chunks=(4, 4), shards=(32, 8))[:] = X
    return str(tmp_path / "g")


@pytest.mark.parametrize("pipeline", ["BatchedCodecPipeline", "FusedCodecPipeline"])
def test_a_reset_connection_within_a_shard_is_retried(shards, monkeypatch, pipeline):
    dataset = open_dataset(shards)
    found = type(dataset._sources["x"].array.async_array.codec_pipeline).__name__
    if found != pipeline:
        pytest.skip(f"this release of zarr reads with its {found}")
    method = "get_sync" if pipeline == "FusedCodecPipeline" else "get"
    read, failed = getattr(LocalStore, method), []

    def get(self, key, prototype=None, byte_range=None):
        if isinstance(byte_range, RangeByteRequest) and not failed:
            failed.append(key)
            raise ConnectionResetError("by peer")
        return read(self, key, prototype=prototype, byte_range=byte_range)

    monkeypatch.setattr(LocalStore, method, get)
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


class SlowServer(http.server.ThreadingHTTPServer):
    """A server of the files of a folder that counts its connections."""

    daemon_threads = True

    def __init__(self, folder):
        self.open = self.peak = 0
        server = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def __init__(self, *arguments):
                super().__init__(*arguments, directory=str(folder))

            def log_message(self, *arguments):
                pass

            def setup(self):
                super().setup()
                server.open += 1
                server.peak = max(server.peak, server.open)

            def finish(self):
                super().finish()
                server.open -= 1

            def do_GET(self):
                time.sleep(0.005)
                super().do_GET()

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/d"


@pytest.fixture
def served(tmp_path):
    """A server of a dataset of 100 chunks."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    create_dataset(tmp_path / "d", {"x": np.arange(200)}, chunk_rows=2)
    server = SlowServer(tmp_path)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(("limits", "most"), [({}, 16), ({"connections": 3}, 3)])
def test_few_connections_to_a_server(served, limits, most):
    datasets = [open_dataset(served.url, arrays=["x"], storage_options=limits) for _ in range(2)]
    for dataset in datasets:
        np.testing.assert_array_equal(dataset.read_rows(np.arange(200))["x"], np.arange(200))
    assert 1 < served.peak <= most


def test_a_forked_process_has_connections_of_its_own(served):
    dataset = open_dataset(served.url, arrays=["x"])
    assert dataset.read_rows([7])["x"] == [7]
    assert in_a_fork(lambda: dataset.read_rows([9, 150])["x"].tolist()) == "returned [9, 150]"
    assert dataset.read_rows([150])["x"] == [150]


def test_a_store_that_does_not_survive_a_fork_says_so_at_once(tmp_path):
    obstore = pytest.importorskip("obstore.store", reason="obstore is not installed")
    create_dataset(tmp_path / "d", {"x": np.arange(20)}, chunk_rows=2)
    store = ObjectStore(obstore.LocalStore(str(tmp_path / "d")), read_only=True)
    dataset = open_dataset(store)
    assert dataset.read_rows([7])["x"] == [7]
    words = "DatasetError: cannot read .* in a process that was forked after its parent had used obstore.* spawn"
    for use in (lambda: dataset.read_rows([9]), lambda: open_dataset(store)):
        assert re.match(words, in_a_fork(use))


@pytest.mark.parametrize("name", ["connections", "max_retries"])
def test_wrong_limits(tmp_path, name):
    for value in (-1, True, 2.5, "3"):
        with pytest.raises(InvalidParameter, match=rf"storage_options\['{name}'\]="):
            open_dataset(tmp_path, storage_options={name: value})
