"""How rows are read: every chunk once, within the budget, from several threads; and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.storage import MemoryStore

from dshuffle.errors import CorruptChunk, DatasetError, InvalidParameter
from dshuffle.store import Dataset, create_dataset, open_dataset, reader
from dshuffle.store.patient_store import PatientStore

N = 100
X = np.random.default_rng(0).random((N, 6)).astype("f4")
Y = np.arange(N)


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


def test_opening_is_not_counted(dataset: Dataset) -> None:
    assert open_dataset("memory://reading").traffic.requests == 0


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 60))
def test_the_budget_bounds_what_runs(costs: list[int], budget: int) -> None:
    running: list[int] = []
    peak = done = 0

    async def job(cost: int) -> None:
        nonlocal peak, done
        running.append(cost)
        assert len(running) == 1 or sum(running) <= budget
        peak = max(peak, len(running))
        await asyncio.sleep(0)
        running.remove(cost)
        done += 1

    asyncio.run(reader.run_bounded(((cost, lambda c=cost: job(c)) for cost in costs), budget))
    assert done == len(costs)
    assert not costs or peak >= 1
    if len(costs) >= 2 and costs[0] + costs[1] <= budget:
        assert peak >= 2


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
    get = PatientStore.get

    async def watched(self: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal in_flight, peak
        cost = reader.cost(7 * (24 if key.startswith("x/") else 8))
        in_flight += cost
        peak = max(peak, in_flight)
        await asyncio.sleep(0.001)
        result = await get(self, key, *args, **kwargs)
        in_flight -= cost
        return result

    if way == "zarr":
        dataset = through_zarr(dataset)
    monkeypatch.setattr(PatientStore, "get", watched)
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


@pytest.mark.slow
def test_pickling_opens_the_same_data_anywhere(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    dataset = create_dataset("x.zarr", {"x": X})
    assert dataset.url == str(tmp_path / "x.zarr")
    data = pickle.dumps(dataset)
    assert len(data) < 500
    (tmp_path / "data.pickle").write_bytes(data)
    script = "import pickle; d = pickle.load(open(r'%s', 'rb')); print(d.url, d.read_rows([3])['x'].sum())"
    other = subprocess.run(
        [sys.executable, "-c", script % (tmp_path / "data.pickle")],
        cwd=os.sep,
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.split() == [str(tmp_path / "x.zarr"), str(X[3].sum())]


def test_secrets_stay_out_of_repr_and_errors(tmp_path: Path) -> None:
    secret = {"secret": "hunter2"}
    with pytest.raises(InvalidParameter, match=r"storage_options=.'secret'.") as caught:
        open_dataset(tmp_path, storage_options=secret)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([3, -1, 200], r"ids\[1\]=-1 .* \[0, 100\)"),
        ([3, 4, 100], r"ids\[2\]=100 "),
        (np.array([2**63 + 1], "u8"), r"ids\[0\]=9223372036854775809 "),
        (np.zeros(N, bool), "boolean mask.*flatnonzero"),
        ([1.0], "float64"),
        ([[1]], r"\(1, 1\)"),
        (3, r"\(\)"),
        (["a"], "integers"),
    ],
)
def test_bad_ids(dataset: Dataset, ids: Any, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words):
        dataset.read_rows(ids)
    with pytest.raises(InvalidParameter, match=words):
        dataset.read_into(dataset.layout.empty(3), [0, 1, 2], ids)
    assert dataset.traffic.requests == 0


def test_bad_targets(dataset: Dataset) -> None:
    rows = dataset.layout.empty(10)
    read_only = rows.copy()
    read_only.flags.writeable = False
    for bad in (rows[:, ::2], rows[::2], rows[:, :5], rows.astype("i2"), rows[0], read_only, None):
        with pytest.raises(InvalidParameter, match=r"rows is not allowed: .*\(capacity, 32\) uint8"):
            dataset.read_into(bad, [0], [0])  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match=r"slots\[1\]=10"):
        dataset.read_into(rows, [0, 10], [0, 1])
    with pytest.raises(InvalidParameter, match="distinct"):
        dataset.read_into(rows, [1, 1], [0, 1])
    with pytest.raises(InvalidParameter, match=r"len\(slots\)=1 .*number of ids \(2\)"):
        dataset.read_into(rows, [1], [0, 1])
    for budget in (0, True, 1.5):
        with pytest.raises(InvalidParameter, match="memory_budget="):
            dataset.read_into(rows, [1], [0], memory_budget=budget)  # type: ignore[arg-type]
    assert dataset.traffic.requests == 0


def test_an_unreachable_store_is_not_taken_for_corruption(dataset: Dataset, monkeypatch: Any) -> None:
    async def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("no")

    store = next(iter(dataset._sources.values())).array.store
    assert isinstance(store, PatientStore)
    monkeypatch.setattr(type(store._store), "get", refuse)
    with pytest.raises(DatasetError, match=r"cannot fetch .*PermissionError: no") as caught:
        dataset.read_rows([0])
    assert not isinstance(caught.value, CorruptChunk)


COLUMNS = ["?", "i1", "u2", "f2", "f4", "i8", "c16", "S3", "M8[s]"]


@pytest.mark.slow
@pytest.mark.parametrize("n_rows", [1, 37])
def test_columns_of_a_table_are_read_together(tmp_path, n_rows):
    """Also if one of them lacks a chunk, which has the fill value, or has other chunks."""
    rng = np.random.default_rng(n_rows)
    columns = {f"c{number}": rng.integers(0, 2, n_rows).astype(item) for number, item in enumerate(COLUMNS * 4)}
    group = zarr.create_group(tmp_path / "d")
    for number, (name, values) in enumerate(columns.items()):
        group.create_array(name, data=values, chunks=(10 if number % 7 else 4,))
    (tmp_path / "d" / "c5" / "c" / "0").unlink(missing_ok=True)
    columns["c5"][:10] = np.zeros((), columns["c5"].dtype)
    dataset = open_dataset(tmp_path / "d")
    for ids in (rng.permutation(n_rows), rng.integers(0, n_rows, 5), []):
        rows = dataset.layout.empty(50)
        slots = rng.permutation(50)[: len(ids)]
        dataset.read_into(rows, slots, ids)
        for name, values in columns.items():
            np.testing.assert_array_equal(dataset.layout.column(rows, name)[slots], values[np.asarray(ids, int)])
            np.testing.assert_array_equal(dataset.read_rows(ids)[name], values[np.asarray(ids, int)])


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"damaged")])
def test_a_bad_chunk_of_a_column_is_named(tmp_path, damage):
    dataset = create_dataset(tmp_path / "d", {f"c{number}": np.arange(9) for number in range(20)}, chunk_rows=4)
    damage(tmp_path / "d" / "c13" / "c" / "1")
    with pytest.raises(CorruptChunk, match="c13"):
        dataset.read_into(dataset.layout.empty(9), np.arange(9), np.arange(9))


@pytest.mark.parametrize(("limits", "expected"), [({}, 64), ({"connections": 5}, 5)])
def test_few_requests_are_under_way_at_a_time(monkeypatch: Any, limits: dict[str, int], expected: int) -> None:
    """A store behind a network would refuse thousands of requests at once; absent chunks count, too."""
    n_columns, n_rows = 90, 40
    store = MemoryStore()
    group = zarr.create_group(store)
    for number in range(n_columns):
        array = group.create_array(f"c{number:02}", shape=(n_rows,), dtype="f8", chunks=(5,), fill_value=-1.0)
        if number % 2:
            array[:] = np.arange(n_rows) + 100 * number
    dataset = open_dataset(store, storage_options=limits)
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
    assert peak[0] == expected
    for number in range(n_columns):
        expected_column = np.arange(n_rows) + 100 * number if number % 2 else np.full(n_rows, -1.0)
        assert np.array_equal(dataset.layout.column(rows, f"c{number:02}"), expected_column)
    assert dataset.traffic.requests == n_columns * 8
