"""Clusters of several sizes, a dataset, and a checkpoint in the middle of an epoch."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from distributed import Client

import dshuffle
from dshuffle import Shuffler

from .stopping import trained


@pytest.fixture(scope="package")
def clusters(cluster_of):
    """Clients of clusters with 3, 4 and 7 workers in this process."""
    with ExitStack() as stack:  # a client that is closed before a later one leaves Dask's default scheduler behind
        made = {n: stack.enter_context(cluster_of({str(name): {} for name in range(n)})) for n in (3, 4, 7)}
        yield {n: stack.enter_context(Client(cluster)) for n, cluster in made.items()}


@pytest.fixture(scope="package")
def labelled(tmp_path_factory):
    """A dataset that no test writes to."""
    x = np.random.default_rng(0).random((700, 3))
    y = np.arange(700) % 5
    return dshuffle.create_dataset(tmp_path_factory.mktemp("labelled") / "d.zarr", {"x": x, "y": y}, chunk_rows=20)


@pytest.fixture(scope="package")
def saved(clusters, labelled, tmp_path_factory):
    """A checkpoint of three ranks that have trained on 16, 24 and 32 samples."""
    path = tmp_path_factory.mktemp("saved") / "run.json"
    with Shuffler(clusters[3], labelled) as shuffler:
        trained(clusters[3], next(shuffler.epochs(1)), [3, 4, 5])
        shuffler.save(path)
    return path.read_text()


@pytest.fixture
def written(saved, tmp_path):
    """The checkpoint in a file of one's own."""
    path = tmp_path / "run.json"
    path.write_text(saved)
    return path
