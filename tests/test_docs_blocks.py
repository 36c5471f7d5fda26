"""The Python blocks of the pages on files, datasets, resuming and pipelines run, one after the other, on small data.

Blocks of other pages are run elsewhere: docs/training.md and docs/iterators.md by the tests of training and of the
integrations, and docs/clusters.md needs a Slurm (tests/benchmarks/slurm.py).
"""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import anndata
import dask.array
import joblib
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from distributed import Client, LocalCluster
from PIL import Image
from sklearn.linear_model import SGDClassifier

import dshuffle
from dshuffle.pipeline import LocalWorkers
from dshuffle.synthetic import keyed_regression
from dshuffle.training import fit_linear_regression

DOCS = Path(__file__).parents[1] / "docs"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DOCS.exists(), reason="the docs are not here")]


def blocks(page, changes=MappingProxyType({})):
    """The Python blocks of a page, with some words replaced by others."""
    found = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    for old, new in changes.items():
        assert any(old in block for block in found), old
        found = [block.replace(old, new) for block in found]
    return found


@pytest.fixture
def two_workers():
    """Make a client of two workers that are threads of this process."""

    @contextlib.contextmanager
    def make():
        with (
            LocalCluster(n_workers=2, processes=False, dashboard_address=":0", memory_limit=0) as cluster,
            Client(cluster) as client,
        ):
            yield client

    return make


def test_the_blocks_on_datasets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    create, opened, split, windows, patches, stores = blocks("datasets.md")

    x, y = rng.random((40, 3)), np.arange(40)
    fields = {name: (("time", "lat", "lon"), rng.random((120, 128, 64), "f4")) for name in ("t2m", "precipitation")}
    ds = xr.Dataset(fields, coords={"time": np.arange(120)})
    names = {"dshuffle": dshuffle, "np": np, "x": x, "y": y, "frame": pd.DataFrame({"a": y, "b": y / 2})}
    exec(create, names)
    assert dshuffle.open_dataset("table.zarr").n_samples == 40

    ds.to_zarr("era5.zarr", mode="w", consolidated=False, encoding={name: {"chunks": (12, 128, 64)} for name in fields})
    kinds = pd.DataFrame({"kind": pd.Categorical(["a", "b", "c"] * 10)}, index=[f"cell {n}" for n in range(30)])
    cells = anndata.AnnData(rng.random((30, 4)), obs=kinds)
    cells.obsm["X_pca"] = rng.random((30, 2))
    with warnings.catch_warnings(action="ignore"):  # of anndata, about the Zarr format that it writes
        cells.write_zarr("cells.zarr")
    exec(opened, names)
    assert set(names["dataset"].arrays) == {"X", "obs/kind/codes", "obsm/X_pca"}

    arrays = {"patient": y // 4, "label": y % 4, "age": np.arange(40), "x": x}
    names["dataset"] = dshuffle.create_dataset(None, arrays, chunk_rows=4)
    exec(split, names)
    assert names["adults"].n_samples == 22
    patients = [set(part.read_rows(np.arange(part.n_samples))["patient"]) for part in (names["train"], names["test"])]
    assert not patients[0] & patients[1]

    names["era5"] = dshuffle.open_dataset("era5.zarr", arrays=["t2m", "precipitation"])
    exec(windows, names)
    assert names["train"].n_samples + names["test"].n_samples <= names["forecast"].n_samples == 117
    exec(patches, names)
    assert names["regions"].arrays["t2m"].shape == (3, 64, 64)

    with zarr.storage.ZipStore("era5.zip", mode="w") as store:
        zarr.create_group(store).create_array("x", data=x)
    store = zarr.storage.MemoryStore()
    for path in ("", "train"):
        zarr.create_group(store, path=path).create_array("x", data=x)
    session = SimpleNamespace(store=store)  # as icechunk has it, which only the newest Python has
    names |= {"zarr": zarr, "store": store, "repository": SimpleNamespace(readonly_session=lambda branch: session)}
    exec(stores, names)


def test_the_blocks_on_files(two_workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, light in (("cats", 60), ("dogs", 180)):
        Path("pictures", name).mkdir(parents=True)
        for number in range(10):
            pixels = rng.integers(light - 20, light + 20, (70, 90, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(f"pictures/{name}/{number}.png")
    fields = {name: (("time", "lat"), rng.random((50, 8))) for name in ("t2m", "precipitation")}
    ds = xr.Dataset(fields, coords={"time": pd.date_range("2000-01-01", periods=50)})
    packed = {"dtype": "int16", "scale_factor": np.float32(1e-4), "_FillValue": -1}
    ds.to_zarr("era5.zarr", consolidated=False, encoding={"t2m": packed})

    created, split, rows, scored, sums, normalized, opened, windows, table = blocks("from-your-files.md")
    with two_workers() as client:
        names = {"dshuffle": dshuffle, "np": np, "client": client, "dask": dask, "zarr": zarr}
        for block in (created, split, rows, scored, sums, normalized):
            exec(block, names)
    assert names["images"].classes == ("cats", "dogs")
    assert names["model"].score(names["samples"]["x"], names["samples"]["y"]) > 0.9
    assert names["flat"].arrays["x"].shape == (64 * 64 * 3,)
    train, test = (part.read_rows(np.arange(part.n_samples)) for part in (names["train"], names["test"]))
    assert np.bincount(test["y"]).tolist() == [2, 2]
    batch = names["normalized"](train)
    assert batch.dtype == np.float32
    np.testing.assert_allclose(batch.mean(axis=(0, 1, 2)), 0, atol=1e-4)
    np.testing.assert_allclose(batch.std(axis=(0, 1, 2)), 1, atol=1e-4)

    numbers = np.arange(200)
    frame = pd.DataFrame({"kind": np.where(numbers % 3, "new", "used"), "price": numbers % 50 + 0.5, "returned": 0})
    frame["sold"] = pd.Timestamp("2026-01-01") + pd.to_timedelta(numbers, "D")
    frame["returned"] = (frame["price"] > 25).astype(int)
    frame.loc[::20, "price"] = np.nan
    frame.to_parquet("sales.parquet")
    with two_workers():
        exec(table, names | {"pandas": pd, "joblib": joblib, "SGDClassifier": SGDClassifier})
    saved = joblib.load("model.joblib")
    assert saved.score((numbers[:, None] % 50 - 25.0) * [1, 0, 0], numbers % 50 > 25) > 0.9

    exec(opened, names)
    assert names["era5"].arrays["t2m"].dtype == xr.open_zarr("era5.zarr", consolidated=False)["t2m"].dtype == np.float64
    exec(windows, names)
    past, future = (part.read_rows(np.arange(part.n_samples)) for part in (names["past"], names["future"]))
    assert past["t2m"].shape[1:] == (3, 8)
    assert past["time"].max() < future["time"].min()


def test_the_blocks_on_resuming(two_workers, tmp_path, capsys):
    arrays = {name: array.compute() for name, array in keyed_regression(600).items()}
    dshuffle.create_dataset(tmp_path / "train.zarr", arrays)
    changes = {"90": "3", "min_workers=4": "min_workers=2"}  # first, as paths have numbers, too
    changes |= {"s3://bucket": str(tmp_path), "/local/scratch/rows": str(tmp_path / "rows")}
    made, resumed, retried, jobs, elastic, pieces, kept, attached, fitted = blocks("resuming.md", changes)
    one_epoch = "    for epoch in shuffler.epochs(1):\n        shuffler.client.gather(epoch.map(len))\n"

    with two_workers() as client, two_workers() as other_client:
        names = {"dshuffle": dshuffle, "np": np, "time": time, "contextlib": contextlib, "client": client}
        names |= {"other_client": other_client, "fit_linear_regression": fit_linear_regression}
        names |= {"make_client": lambda: contextlib.nullcontext(client)}
        exec(made, names)
        assert len(names["shuffler"].records) == 3
        exec(resumed, names)
        assert names["shuffler"].next_epoch == 3
        (tmp_path / "run.json").unlink()
        names |= {"step": lambda partition, weights: weights + 1, "first_weights": np.zeros(2)}
        exec(retried, names)
        assert (tmp_path / "run.json").exists()
        names |= {"train": lambda partition, weights: weights + 1, "weights": np.zeros(2)}
        exec(elastic, names)
        assert len(names["shuffler"].records) == 3
        assert names["weights"].tolist() == [3, 3]
        (tmp_path / "run.json").unlink()
        check_pieces(pieces, names, tmp_path)
        (tmp_path / "run.json").unlink()
        exec(kept.replace("    ...\n", one_epoch), names)
        assert names["shuffler"].next_epoch == 2

        (tmp_path / "run.json").unlink()
        with dshuffle.Shuffler(client, tmp_path / "train.zarr", checkpoint=tmp_path / "run.json") as shuffler:
            for epoch in shuffler.epochs(1):
                client.gather(epoch.map(len))
                shuffler.attach(np.zeros(2))
        exec(attached, names)
        (tmp_path / "run.json").unlink()
        exec(fitted, names)
        assert len(names["history"].points) == 3
        exec(jobs, names)  # it only defines a function, which needs a Slurm
        assert callable(names["make_client"])


def check_pieces(block, names, folder):
    """A run that is interrupted after some pieces and resumed has trained once on every sample of each epoch."""
    dataset = dshuffle.create_dataset(folder / "ids.zarr", {"id": np.arange(500)})
    saved = []

    class Interrupted(dshuffle.Shuffler):
        def save(self, url):
            super().save(url)
            saved.append(url)
            if len(saved) == 14:
                raise KeyboardInterrupt

    def step(counts, batch):  # twice, as the mean over two workers is taken
        return counts + 2 * np.bincount(batch["id"], minlength=500)

    names |= {"step": step}
    exec(block, names)
    client, options = names["client"], {"checkpoint": folder / "run.json"}
    with pytest.raises(KeyboardInterrupt), Interrupted(client, dataset, **options) as shuffler:
        names["train_epochs"](shuffler, np.zeros(500))
    with dshuffle.Shuffler.resume(client, dataset, folder / "run.json") as shuffler:
        assert shuffler.next_epoch == 1
        counts = names["train_epochs"](shuffler, None)
    np.testing.assert_array_equal(counts, np.full(500, 3))


def test_the_blocks_on_pipelines(two_workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arrays = {name: array.compute() for name, array in keyed_regression(400).items()}
    dshuffle.create_dataset("keyed.zarr", arrays)
    first, fit, own, ways, submitted = blocks("pipelines.md", {"LocalWorkers(4)": "LocalWorkers(2, processes=False)"})
    names = {"__name__": "__main__", "mean_of_batches": lambda partition, scale: scale * len(partition)}
    exec(first, names)
    assert len(names["result"].records) == 5
    exec(fit, names)
    cluster = {"cluster": LocalWorkers(2, processes=False)}
    written = {}
    for block in (own, ways):
        names["Pipeline"] = lambda *args, **options: written.update(one=dshuffle.Pipeline(*args, **options | cluster))
        exec(block, names)
        assert written["one"].run().records
    assert (tmp_path / "report" / "report.html").exists()
    names["pipeline"] = dshuffle.Pipeline(
        "keyed.zarr", dshuffle.Training("linear_regression", epochs=5, step=0.01), checkpoint="run.json", **cluster
    )
    exec(submitted, names)
    assert names["run"].result(60).records
