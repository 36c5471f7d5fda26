"""A dataset, a task that checks its samples, and workers that may be lost."""

from __future__ import annotations

import dask
import numpy as np
import pytest
from distributed import Client, Status

from dshuffle import create_dataset

from ..conftest import task_that_checks


@pytest.fixture
def labelled(tmp_path):
    arrays = {"x": np.random.default_rng(0).random((1000, 7)), "y": np.arange(1000), "label": np.arange(1000) % 3}
    return create_dataset(str(tmp_path / "labelled.zarr"), arrays, chunk_rows=50)


@pytest.fixture
def checked(labelled):
    return task_that_checks(labelled)


@pytest.fixture
def lonely(new_processes):
    """Three worker processes that nobody starts again."""
    with dask.config.set({"dshuffle.replacement-timeout": "500ms"}), new_processes(3) as cluster:
        for nanny in cluster.workers.values():
            nanny.status = Status.closing_gracefully  # as after SIGTERM
        with Client(cluster) as client:
            yield client
