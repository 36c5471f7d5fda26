"""How rows are read: every chunk once, within the budget, from several threads; and what is said of lost chunks."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import pickle
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore

from dshuffle.errors import CorruptChunk, DatasetError, InvalidParameter
from dshuffle.store import Dataset, create_dataset, open_dataset, reader, verify_dataset
from dshuffle.store.places import PatientStore, judged

N = 100
X = np.random.default_rng(0).random((N, 6)).astype("f4")
Y = np.arange(N)
CHUNK = 5 * 6 * 4 + 4
"""Bytes of a stored chunk of five rows."""


@pytest.fixture
def dataset() -> Dataset:
    return create_dataset("memory://reading", {"x": X, "y": Y}, chunk_rows=7, overwrite=True)


def through_zarr(dataset: Dataset) -> Dataset:
    """The same, with zarr's decoders."""
    sources = {name: dataclasses.replace(source, decoders=None) for name, source in dataset._sources.items()}
    assert all(source.decoders is not None for source in dataset._sources.values())
    return dataclasses.replace(dataset, _sources=sources)


@pytest.mark.parametrize("span_nbytes", [1, 500, 4 << 20])
def test_each_chunk_is_fetched_once(dataset: Dataset, monkeypatch: Any, span_nbytes: int) -> None:
    monkeypatch.setattr(reader, "_SPAN_NBYTES", span_nbytes)
    rng = np.random.default_rng(1)
    for ids in (rng.permutation(N), rng.integers(0, N, 300), np.array([8, 8, 7, 99]), np.array([], int)):
        before = dataset.traffic
        dataset.read_rows(ids)
        cost = dataset.traffic - before
        n_chunks = len(np.unique(ids // 7))
        assert cost.requests == 2 * n_chunks
        # Chunks are stored whole, each with a checksum of four bytes.
        assert cost.fetched_bytes == n_chunks * (7 * 6 * 4 + 4 + 7 * 8 + 4)
        assert cost.delivered_bytes == len(ids) * 32
        assert cost.seconds > 0


def test_a_failure_stops_what_has_not_begun_and_waits_for_the_rest() -> None:
    log: list[str] = []

    async def slow() -> None:
        await asyncio.sleep(0.01)
        log.append("slow is done")

    async def fail() -> None:
        raise OSError("broken")

    async def never() -> None:
        log.append("started after the failure")

    async def main() -> None:
        await reader.run_bounded([(1, slow), (1, fail), (2, never)], 2)

    with pytest.raises(OSError, match="broken"):
        asyncio.run(main())
    assert log == ["slow is done"]


@pytest.mark.parametrize("budget", [1, 1000, 64 << 20])
@pytest.mark.parametrize("way", ["own", "zarr"])
def test_chunks_in_flight_stay_within_the_budget(monkeypatch: Any, budget: int, way: str) -> None:
    dataset = create_dataset("memory://reading", {"x": X, "y": Y}, chunk_rows=7, overwrite=True)
    monkeypatch.setattr(reader, "_SPAN_NBYTES", 1)
    in_flight = peak = 0
    fetch = PatientStore._fetch

    async def watched(self: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal in_flight, peak
        cost = 2 * 7 * (24 if key.startswith("x/") else 8)
        in_flight += cost
        peak = max(peak, in_flight)
        await asyncio.sleep(0.001)
        result = await fetch(self, key, *args, **kwargs)
        in_flight -= cost
        return result

    if way == "zarr":
        dataset = through_zarr(dataset)
    monkeypatch.setattr(PatientStore, "_fetch", watched)
    np.testing.assert_array_equal(dataset.read_rows(np.arange(N), memory_budget=budget)["x"], X)
    largest = 2 * 7 * 6 * 4
    assert peak <= max(budget, largest)
    assert peak == largest if budget == 1 else peak > largest


def test_memory_beside_the_result_stays_within_the_budget(tmp_path: Path) -> None:
    n, chunk_nbytes, budget = 4096, 64 << 10, 2 << 20
    x = np.zeros((n, 4096), np.uint8)  # 16 MiB
    dataset = create_dataset(tmp_path / "d", {"x": x}, chunk_rows=chunk_nbytes // 4096)
    rows = dataset.layout.empty(n)
    ids = np.random.default_rng(0).permutation(n)
    dataset.read_into(rows, ids, ids, memory_budget=budget)
    tracemalloc.start()
    try:
        dataset.read_into(rows, ids, ids, memory_budget=budget)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Ids, slots and Python's own objects come to less than 1 MiB. On a busy machine few chunks are read at a time.
    assert 2 * chunk_nbytes < peak < budget + (1 << 20)


@pytest.mark.slow
def test_threads_share_a_dataset(tmp_path: Path) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": X, "y": Y}, chunk_rows=3)
    rows = dataset.layout.empty(8 * N)

    def work(k: int) -> None:
        for _ in range(5):
            ids = np.random.default_rng(k).permutation(N)
            dataset.read_into(rows, k * N + ids, ids)
            np.testing.assert_array_equal(dataset.read_rows(ids)["x"], X[ids])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    np.testing.assert_array_equal(dataset.layout.column(rows, "x"), np.tile(X, (8, 1)))
    np.testing.assert_array_equal(dataset.layout.column(rows, "y"), np.tile(Y, 8))
    assert dataset.traffic.requests == 8 * 5 * 2 * 2 * 34


def test_a_pickle_opens_the_same_data(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    dataset = create_dataset("x.zarr", {"x": X})
    monkeypatch.chdir(os.sep)
    data = pickle.dumps(dataset)
    assert len(data) < 500
    np.testing.assert_array_equal(pickle.loads(data).read_rows([3])["x"], X[[3]])


def test_bad_ids_and_targets(dataset: Dataset) -> None:
    for ids, words in (
        ([3, -1, 200], r"ids\[1\]=-1 .* \[0, 100\)"),
        (np.zeros(N, bool), "boolean mask.*flatnonzero"),
        ([1.0], "float64"),
        ([[1]], r"\(1, 1\)"),
    ):
        with pytest.raises(InvalidParameter, match=words):
            dataset.read_rows(ids)
        with pytest.raises(InvalidParameter, match=words):
            dataset.read_into(dataset.layout.empty(3), [0, 1, 2], ids)
    rows = dataset.layout.empty(10)
    read_only = rows.copy()
    read_only.flags.writeable = False
    for bad in (rows[:, ::2], rows[::2], rows.astype("i2"), rows[0], read_only):
        with pytest.raises(InvalidParameter, match=r"rows=.* is not allowed.*a writeable matrix"):
            dataset.read_into(bad, [0], [0])
    for slots, words in (([0, 10], r"slots\[1\]=10"), ([1, 1], "2 distinct numbers"), ([1], "one for each id")):
        with pytest.raises(InvalidParameter, match=words):
            dataset.read_into(rows, slots, [0, 1])
    with pytest.raises(InvalidParameter, match="memory_budget="):
        dataset.read_into(rows, [1], [0], memory_budget=0)
    assert dataset.traffic.requests == 0


COLUMNS = ["?", "i1", "u2", "f2", "f4", "i8", "c16", "S3", "M8[s]"]


@pytest.mark.slow
@pytest.mark.parametrize("n_rows", [1, 37])
def test_columns_of_a_table_are_read_together(tmp_path, n_rows):
    """Also if one of them lacks a chunk, which has the fill value, or has other chunks."""
    rng = np.random.default_rng(n_rows)
    columns = {f"c{number:02}": rng.integers(0, 2, n_rows).astype(item) for number, item in enumerate(COLUMNS * 4)}
    group = zarr.create_group(tmp_path / "d")
    for number, (name, values) in enumerate(columns.items()):
        group.create_array(name, data=values, chunks=(10 if number % 7 else 4,))
    (tmp_path / "d" / "c05" / "c" / "0").unlink(missing_ok=True)
    columns["c05"][:10] = np.zeros((), columns["c05"].dtype)
    dataset = open_dataset(tmp_path / "d")
    for ids in (rng.permutation(n_rows), rng.integers(0, n_rows, 5), []):
        rows = dataset.layout.empty(50)
        slots = rng.permutation(50)[: len(ids)]
        dataset.read_into(rows, slots, ids)
        for name, values in columns.items():
            np.testing.assert_array_equal(dataset.layout.column(rows, name)[slots], values[np.asarray(ids, int)])
            np.testing.assert_array_equal(dataset.read_rows(ids)[name], values[np.asarray(ids, int)])


def test_few_requests_are_under_way_at_a_time(monkeypatch: Any) -> None:
    """A store behind a network would refuse thousands of requests at once; absent chunks count, too."""
    n_columns, n_rows = 90, 40
    store = MemoryStore()
    group = zarr.create_group(store)
    for number in range(n_columns):
        array = group.create_array(f"c{number:02}", shape=(n_rows,), dtype="f8", chunks=(5,), fill_value=-1.0)
        if number % 2:
            array[:] = np.arange(n_rows) + 100 * number
    dataset = open_dataset(store)
    fetch, running, peak = MemoryStore.get, [0], [0]

    async def get(self: MemoryStore, *args: Any, **options: Any) -> Any:
        running[0] += 1
        peak[0] = max(peak[0], running[0])
        try:
            await asyncio.sleep(0.001)
            return await fetch(self, *args, **options)
        finally:
            running[0] -= 1

    monkeypatch.setattr(MemoryStore, "get", get)
    rows = dataset.layout.empty(n_rows)
    dataset.read_into(rows, np.arange(n_rows), np.arange(n_rows))
    assert peak[0] == 64
    for number in range(n_columns):
        expected_column = np.arange(n_rows) + 100 * number if number % 2 else np.full(n_rows, -1.0)
        assert np.array_equal(dataset.layout.column(rows, f"c{number:02}"), expected_column)
    assert dataset.traffic.requests == n_columns * 8


# -- Shards ------------------------------------------------------------------------------------------------------------


def cost_of(dataset: Dataset, ids: Any) -> tuple[int, int]:
    before = dataset.traffic
    np.testing.assert_array_equal(dataset.read_rows(ids)["x"], X[ids])
    cost = dataset.traffic - before
    return cost.requests, cost.fetched_bytes


def test_rows_of_a_shard_cost_their_chunks_and_the_index(tmp_path: Path, monkeypatch: Any) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": X}, chunk_rows=5, shard_rows=50)
    assert len([path for path in (tmp_path / "d" / "x" / "c").rglob("*") if path.is_file()]) == 2
    index = 10 * 16 + 4
    assert cost_of(dataset, [7]) == (2, CHUNK + index)
    # Chunks 0, 2, 3 of the first shard, with what lies between, and 0 of the second: each index once.
    assert cost_of(dataset, [0, 11, 19, 50]) == (2 + 2, 2 * index + 5 * CHUNK)
    assert cost_of(dataset, [0, 49]) == (3, index + 2 * CHUNK), "much lies between"
    assert cost_of(dataset, np.arange(100)) == (4, 2 * (10 * CHUNK + index))
    dataset = create_dataset(tmp_path / "e", {"x": X}, chunk_rows=5, shard_rows=100)
    monkeypatch.setattr(reader, "_SPAN_NBYTES", 3 * 5 * 24)
    assert cost_of(dataset, np.arange(100)) == (7 + 7, 7 * (20 * 16 + 4) + 20 * CHUNK), "each part reads the index"


def test_shards_that_only_zarr_reads(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((23, 10, 3))
    array = zarr.create_group(tmp_path / "g").create_array(
        "x", shape=x.shape, dtype="f8", chunks=(1, 5, 3), shards=(4, 10, 3)
    )
    array[:] = x
    dataset = open_dataset(tmp_path / "g")
    np.testing.assert_array_equal(dataset.read_rows(np.arange(23))["x"], x)
    # The last shard reaches beyond the array, so zarr does not take it for whole. It fetches the index, then 6 chunks,
    # which newer releases fetch as one range.
    assert dataset.traffic.requests in {5 + 1 + 1, 5 + 1 + 6}


# -- Lost and damaged chunks -------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[17] ^= 1
    path.write_bytes(data)


DAMAGES = [truncate, empty, flip, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("shard_rows", [None, 30])
def test_a_damaged_chunk_is_named(tmp_path: Path, damage: Callable[[Path], None], shard_rows: int | None) -> None:
    arrays = {"x": X, "y": Y, "z": Y}  # y and z are read together
    dataset = create_dataset(tmp_path / "d", arrays, chunk_rows=6, shard_rows=shard_rows)
    key, first, last = ("y/c/2", 12, 17) if shard_rows is None else ("y/c/1", 30, 35)
    damage(tmp_path / "d" / key)
    words = rf"chunk \({first // 6},\) of array 'y' of {tmp_path}/d \(store key '{key}'; samples {first} to {last}\)"
    if damage is Path.unlink:
        words = rf"the chunk {key} of {tmp_path}/d is missing"
    for ids in (np.arange(40), [first + 1]):
        with pytest.raises(CorruptChunk, match=words) as caught:
            dataset.read_into(dataset.layout.empty(len(ids)), np.arange(len(ids)), ids)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    # The other chunks still serve.
    np.testing.assert_array_equal(dataset.read_rows([11, 65])["x"], X[[11, 65]])


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("damage", [truncate, empty])
def test_chunks_that_only_zarr_reads(tmp_path: Path, zarr_format: Any, damage: Callable[[Path], None]) -> None:
    """The error has their samples, and verifying names the chunk."""
    group = zarr.create_group(tmp_path / "g", zarr_format=zarr_format)
    array = group.create_array("x", shape=(N, 6), dtype="f4", chunks=(6, 2), compressors=None)
    array[:] = X
    key = "x/1.1" if zarr_format == 2 else "x/c/1/1"
    damage(tmp_path / "g" / key)
    with pytest.raises(CorruptChunk, match=r"one of the chunks with samples 0 to 11 of array 'x' of "):
        open_dataset(tmp_path / "g").read_rows([0, 19, 7])
    [said] = verify_dataset(tmp_path / "g").bad
    assert f"chunk (1, 1) of array 'x' of {tmp_path}/g (store key '{key}'; samples 6 to 11)" in said
    np.testing.assert_array_equal(open_dataset(tmp_path / "g", sample_dim=1).read_rows([0, 5])["x"], X.T[[0, 5]])


def test_verify_finds_all(tmp_path: Path) -> None:
    dataset = create_dataset(tmp_path / "d", {"x": X[:20], "y": np.zeros(20)}, chunk_rows=6)
    calls: list[tuple[int, int]] = []
    report = verify_dataset(dataset, progress=lambda done, total: calls.append((done, total)))
    assert (report.n_chunks, report.bytes, report.bad) == (8, X[:20].nbytes + 160, ())
    assert report.ok
    assert calls == [(i, 8) for i in range(1, 9)]
    assert dataset.traffic.requests == 8
    keys = ("x/c/0/0", "x/c/3/0", "y/c/0", "y/c/1")
    for damage, key in zip(DAMAGES, keys, strict=True):
        damage(tmp_path / "d" / key)
    report = verify_dataset(dataset)
    assert (report.ok, report.n_chunks) == (False, 8)
    assert [key for message in report.bad for key in keys if key in message] == list(keys)


# -- Errors that may pass are asked again, a bounded number of times and for a bounded time; others are not. -----------


class StatusError(Exception):
    """As aiohttp and what is built on it raise."""

    def __init__(self, **fields: int) -> None:
        self.__dict__.update(fields)


def test_what_may_pass_and_what_is_refused() -> None:
    codes = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTUNREACH)
    passing = [TimeoutError(), ConnectionResetError(), StatusError(status=503), StatusError(status=429)]
    assert all(judged(error)[1] for error in [*passing, *(OSError(code, "") for code in codes)])
    codes = (errno.ENOENT, errno.ENOSPC, errno.EROFS, errno.EINVAL)
    lasting = [StatusError(status=404), ValueError("x"), MemoryError(), OSError("no number")]
    lasting += [PermissionError("<Error><Code>ExpiredToken</Code></Error>"), *(OSError(code, "") for code in codes)]
    refused = [PermissionError("no"), StatusError(status=403), OSError("<Code>AccessDenied</Code>")]
    for errors, advised in ((lasting, False), (refused, True)):
        for said, passes in (judged(error) for error in errors):
            assert (passes, "anon=True" in said) == (False, advised)
    said = judged(ValueError("hunter2 is no hunter22"), ["hunter2", "hunter22", "", "no"])
    assert said[0] == "ValueError: *** is no ***"


def failing(monkeypatch: Any, times: int, error: Exception | None, delay: float = 0.0) -> list[str]:
    """Let the first reads of chunk 3 fail."""
    read, failed = PatientStore._read_file, []

    def broken(store: PatientStore, key: str, wanted: Any) -> Any:
        if key == "x/c/3/0" and len(failed) < times:
            failed.append(key)
            time.sleep(delay)
            if error is not None:
                raise error
        return read(store, key, wanted)

    monkeypatch.setattr(PatientStore, "_read_file", broken)
    return failed


@pytest.mark.parametrize(
    ("error", "times", "tried", "words"),
    [
        (OSError(errno.ESTALE, "Stale file handle"), 3, 3, ""),
        (OSError(errno.EIO, "Input/output error"), 99, 3, r"OSError: .*Input/output error; tried 3 times in \d"),
        (PermissionError(errno.EACCES, "Permission denied"), 99, 1, "Permission denied$"),
    ],
)
@pytest.mark.parametrize("across", [6, 3])
def test_a_file_system_that_fails(
    tmp_path: Path, monkeypatch: Any, error: Exception, times: int, tried: int, words: str, across: int
) -> None:
    """Also where zarr reads, which happens if chunks are narrower than rows. Its fused pipeline tries once before."""
    group = zarr.create_group(tmp_path / "d")
    group.create_array("x", data=X, chunks=(10, across))
    dataset = open_dataset(tmp_path / "d", storage_options={"max_retries": 2})
    pipeline = dataset._sources["x"].array.async_array.codec_pipeline
    before = across == 3 and type(pipeline).__name__ == "FusedCodecPipeline"
    failed = failing(monkeypatch, times if words else times - 1 + before, error)
    if words:
        with pytest.raises(DatasetError, match=rf"cannot fetch x/c/3/0 of {tmp_path}/d: .*{words}") as caught:
            dataset.read_rows([30])
        assert not isinstance(caught.value, CorruptChunk)
    else:
        np.testing.assert_array_equal(dataset.read_rows(np.arange(100))["x"], X)
        assert (dataset.traffic.retries, dataset.traffic.requests) == (tried - 1, 60 // across)
    assert len(failed) == (tried if words else tried - 1) + before


def test_a_file_system_that_hangs(tmp_path: Path, monkeypatch: Any) -> None:
    create_dataset(tmp_path / "d", {"x": X}, chunk_rows=10)
    dataset = open_dataset(tmp_path / "d", storage_options={"timeout": 0.2, "max_retries": 50})
    failing(monkeypatch, 4, None, delay=1.5)
    started = time.monotonic()
    with pytest.raises(DatasetError, match=r"cannot fetch x/c/3/0 .*no answer within 0.2 s; tried [23] times"):
        dataset.read_rows([30])
    assert time.monotonic() - started < 5
    np.testing.assert_array_equal(dataset.read_rows(np.arange(30))["x"], X[:30])


@pytest.mark.parametrize("change", [-5, 5])
def test_a_range_of_the_wrong_length(monkeypatch: Any, change: int) -> None:
    dataset = create_dataset("memory://ranges", {"x": X}, chunk_rows=5, shard_rows=50, overwrite=True)
    read = MemoryStore.get

    async def wrong(self: Any, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        data = await read(self, key, prototype, byte_range)
        if hasattr(byte_range, "end"):  # not the index
            data = data[:change] if change < 0 else data + data[:change]
        return data

    monkeypatch.setattr(MemoryStore, "get", wrong)
    with pytest.raises(CorruptChunk, match=r"124 bytes of x/c/0/0 of .* was answered with \d+; .*wrongly"):
        dataset.read_rows([7])
