"""Datasets in Zarr store objects, instead of at URLs."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from zarr.abc.store import Store
from zarr.storage import FsspecStore, LocalStore, MemoryStore, ObjectStore, StorePath, ZipStore

import dshuffle
from dshuffle.errors import CheckpointError, DatasetError, DatasetNotFound, InvalidParameter
from dshuffle.store import read_sharding, stored_shardings, verify_dataset, write_sharding

X = np.random.default_rng(0).random((40, 3))
IDS = [39, 0, 7, 7]


def test_closing_a_dataset_closes_its_file_until_more_is_read(tmp_path: Path) -> None:
    store = zip_file(tmp_path)

    def is_open() -> bool:
        names = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
        return str(tmp_path / "x.zip") in names

    dataset = dshuffle.open_dataset(store)
    np.testing.assert_array_equal(dataset.read_rows(IDS)["x"], X[IDS])
    assert is_open()
    dataset.close()
    dataset.close()
    assert not is_open()
    np.testing.assert_array_equal(dataset.read_rows(IDS)["x"], X[IDS])
    dataset.close()
    assert not is_open()


def fill(store: Store, path: str = "") -> None:
    group = zarr.create_group(store, path=path)
    group.create_array("x", data=X, chunks=(6, 3))
    group.create_array("y", data=np.arange(40), chunks=(12,))


def obstore_files(folder: Path) -> Store:
    stores = pytest.importorskip("obstore.store", reason="obstore is not installed")
    return ObjectStore(stores.LocalStore(str(folder / "objects"), mkdir=True))


WRITABLE: dict[str, Callable[[Path], Store]] = {
    "memory": lambda folder: MemoryStore(),
    "local": lambda folder: LocalStore(folder / "local"),
    "obstore": obstore_files,
    "fsspec": lambda folder: FsspecStore.from_url(f"local://{folder}/fsspec", storage_options={"auto_mkdir": True}),
}


def zip_file(folder: Path) -> Store:
    with ZipStore(folder / "x.zip", mode="w") as store:
        fill(store)
    return ZipStore(folder / "x.zip", mode="r")


def icechunk_snapshot(folder: Path) -> Store:
    icechunk = pytest.importorskip("icechunk", reason="icechunk is not installed (Python 3.12 or later)")
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(folder / "ice")))
    session = repository.writable_session("main")
    fill(session.store)
    session.commit("first")
    store: Store = repository.readonly_session("main").store
    return store


def filled(kind: str, folder: Path) -> Store:
    """A store of this kind with two arrays."""
    if kind in WRITABLE:
        fill(store := WRITABLE[kind](folder))
        return store
    return zip_file(folder) if kind == "zip" else icechunk_snapshot(folder)


READABLE = [*WRITABLE, "zip", "icechunk"]


@pytest.mark.parametrize("kind", READABLE)
def test_a_store_is_opened(tmp_path: Path, kind: str) -> None:
    store = filled(kind, tmp_path)
    dataset = dshuffle.open_dataset(store)
    again = pickle.loads(pickle.dumps(dataset))
    for opened in (dataset, again, dshuffle.open_dataset(zarr.open_group(store, mode="r"))):
        read = opened.read_rows(IDS)
        np.testing.assert_array_equal(read["x"], X[IDS])
        np.testing.assert_array_equal(read["y"], IDS)
        assert opened.identity == dataset.identity
    dataset.check_unchanged()
    assert verify_dataset(store).ok
    assert stored_shardings(dataset) == ()
    assert dataset.traffic.requests > 0
    assert repr(dataset).startswith("<Dataset ")
    assert type(store).__name__ in repr(dataset) or type(store) is LocalStore
    with pytest.raises(DatasetNotFound, match=r"exists at .*absent"):
        dshuffle.open_dataset(StorePath(store, "absent"))
    # The same data at a URL are the same dataset.
    fill(LocalStore(tmp_path / "copy"))
    assert dshuffle.open_dataset(tmp_path / "copy").identity == dataset.identity


@pytest.mark.parametrize("kind", WRITABLE)
def test_a_group_in_a_store_is_opened(tmp_path: Path, kind: str) -> None:
    store = WRITABLE[kind](tmp_path)
    zarr.create_group(store)
    fill(store, "deep/group")
    with pytest.raises(DatasetError, match=r"It has groups: deep\."):
        dshuffle.open_dataset(store)
    for place in (StorePath(store, "deep/group"), zarr.open_group(store, path="deep/group", mode="r")):
        dataset = pickle.loads(pickle.dumps(dshuffle.open_dataset(place)))
        np.testing.assert_array_equal(dataset.read_rows(IDS)["x"], X[IDS])
    dataset = dshuffle.open_dataset(StorePath(store, "deep/group"))
    write_sharding(dataset, "mine", np.arange(40) % 2)
    assert stored_shardings(dataset) == ("mine",)
    np.testing.assert_array_equal(read_sharding(dataset, "mine"), np.arange(40) % 2)
    assert "shards" in zarr.open_group(store, path="deep/group", mode="r")


def test_a_store_that_cannot_be_pickled_is_refused() -> None:
    stores = pytest.importorskip("obstore.store", reason="obstore is not installed")
    store: Store = ObjectStore(stores.MemoryStore())
    fill(store)
    words = r"this ObjectStore cannot be pickled, so workers cannot open it \(TypeError: .*Open the dataset by its URL"
    with pytest.raises(InvalidParameter, match=words):
        dshuffle.open_dataset(store)
    icechunk = pytest.importorskip("icechunk", reason="icechunk is not installed (Python 3.12 or later)")
    store = icechunk.Repository.create(icechunk.in_memory_storage()).writable_session("main").store
    fill(store)
    with pytest.raises(InvalidParameter, match=r"IcechunkStore cannot be pickled.*store of a read-only session"):
        dshuffle.open_dataset(store)


def test_options_of_a_store(tmp_path: Path) -> None:
    store = filled("memory", tmp_path)
    assert dshuffle.open_dataset(store, storage_options={"max_retries": 1, "timeout": 5}).n_samples == 40
    with pytest.raises(InvalidParameter, match=r"storage_options=\['key'\] .*Set other options of a store"):
        dshuffle.open_dataset(store, storage_options={"key": "hunter2"})
    with pytest.raises(InvalidParameter, match="must be a path or a URL"):
        dshuffle.create_dataset(store, {"x": [1]})  # type: ignore[arg-type]


def test_a_store_does_not_show_its_secrets() -> None:
    stores = pytest.importorskip("obstore.store", reason="obstore is not installed")
    secret = "hunter2hunter2"
    config = {"access_key_id": "AKIAEXAMPLE", "secret_access_key": secret, "endpoint": "http://127.0.0.1:9"}
    retries = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
    s3 = stores.S3Store("bucket", config=config, client_options={"allow_http": True}, retry_config=retries)
    with pytest.raises(DatasetError, match=r"cannot fetch zarr.json of ObjectStore") as caught:
        dshuffle.open_dataset(ObjectStore(s3), storage_options={"max_retries": 0})
    assert secret not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", READABLE)
def test_workers_open_a_store(tmp_path: Path, kind: str) -> None:
    store: Any = filled(kind, tmp_path)
    checkpoint = tmp_path / "run.json"
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=":0") as client:
        with dshuffle.Shuffler(client, store, delivery="storage", checkpoint=checkpoint) as shuffler:
            for epoch in shuffler.epochs(2):
                values = client.gather(epoch.map(lambda partition: partition["y"].copy()))
                np.testing.assert_array_equal(np.sort(np.concatenate(values)), np.arange(40))
            json.dumps(shuffler.state_dict())
        with dshuffle.Shuffler.resume(client, store, checkpoint) as shuffler:
            assert shuffler.dataset.n_samples == 40
        fill(LocalStore(tmp_path / "other"))
        zarr.open_group(tmp_path / "other")["y"][:] = 5
        with pytest.raises(CheckpointError):
            dshuffle.Shuffler.resume(client, LocalStore(tmp_path / "other"), checkpoint)
