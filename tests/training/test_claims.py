"""What shuffling does to learning, through the real trainers on a local cluster of logical workers.

Logical workers are threads of one process: they exchange and average as separate ones do, and no seconds are measured.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from distributed import Client, LocalCluster

import dshuffle
from dshuffle.training import EarlyStopping, fit_linear_regression, keyed_regression


@contextmanager
def logical_workers(n_workers):
    with (
        LocalCluster(
            n_workers=n_workers,
            threads_per_worker=1,
            processes=False,
            memory_limit=0,
            dashboard_address=None,
            scheduler_kwargs={"dashboard": False, "dashboard_address": "127.0.0.1:0"},
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


class Reached(EarlyStopping):
    """Stop at an error of 1e-2."""

    def is_due(self, points):
        return points[-1].error < 1e-2


@pytest.mark.slow
def test_rows_sorted_by_a_key_need_one_shuffle(tmp_path):
    dataset = dshuffle.create_dataset(str(tmp_path / "keyed.zarr"), keyed_regression(4000), chunk_rows=200)
    with logical_workers(20) as client:

        def epochs_needed(assignment, sharding, at_most):
            with dshuffle.Shuffler(client, dataset, assignment=assignment, sharding=sharding) as shuffler:
                history = fit_linear_regression(shuffler, epochs=at_most, step=1.0, early_stopping=Reached())
            return len(history.points) if history.stopped_early else at_most + 1

        needed = {
            "stored": epochs_needed("local", "contiguous", 30),
            "once": epochs_needed("local", "random", 10),
            "partial": epochs_needed("partial:0.1", "contiguous", 15),
            "global": epochs_needed("global", "random", 10),
        }
    # In simulation over seeds: 82, 3.3, 8 and 3.2.
    print(needed)
    assert needed["stored"] > 30
    assert 2 <= needed["once"] <= 5
    assert 5 <= needed["partial"] <= 12
    assert 2 <= needed["global"] <= 5
