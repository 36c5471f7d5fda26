"""What shuffling does to learning, through the real trainers on a local cluster of logical workers.

Logical workers are threads of one process: they exchange and average as separate ones do, and no seconds are measured.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from distributed import Client, LocalCluster

import dshuffle
from dshuffle.sharding import stratified
from dshuffle.training import (
    EarlyStopping,
    SoftmaxRegression,
    fit_linear_regression,
    fit_parameter_server,
    gaussian_blobs,
    geometric_speeds,
    keyed_regression,
    simulate_parameter_server,
)
from dshuffle.training.variance import variance_ratio


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


@pytest.mark.slow
def test_stratified_shards_make_an_asynchronous_server_scatter_less():
    """Ten tight classes in two dimensions, 12 workers of which the slowest is four times slower; 20 runs of each."""
    made = gaussian_blobs(600, n_features=2, n_classes=10, separation=20)
    arrays = {"x": made["x"].compute() / 10, "y": made["y"].compute()}
    dataset = dshuffle.create_dataset("memory://variance", arrays, overwrite=True)
    model = SoftmaxRegression(10)
    options = {"epochs": 4, "batch_size": 120, "step": 0.3, "pace": "free"}
    seeds = {"random": range(20), "stratified:y": range(20, 40)}

    with logical_workers(12) as client:

        def final_loss(sharding, seed):
            with dshuffle.Shuffler(client, dataset, assignment="local", sharding=sharding, seed=seed) as shuffler:
                history = fit_parameter_server(shuffler, model, speeds=geometric_speeds(12, 4), seed=seed, **options)
            return history.points[-1].error

        losses = {sharding: [final_loss(sharding, seed) for seed in own] for sharding, own in seeds.items()}
    found = variance_ratio(losses["random"], losses["stratified:y"])
    # Speeds are emulated, so that every machine gets the same losses: 13.6 [4.8, 28.5], and 0.96 [0.42, 1.9] below.
    print(found)
    assert found.ratio > 5
    assert found.low > 2
    assert found.verdict == "less"

    def simulated(ranks, seed):
        return simulate_parameter_server(arrays, ranks, model, seed=seed, **options).points[-1].error

    # The null: equally fast workers.
    equal = [
        [simulated(dshuffle.planning.first_assignment("random", 600, 12, seed=seed), seed) for seed in range(20)],
        [simulated(stratified(arrays["y"], 12, seed=seed), seed) for seed in range(20, 40)],
    ]
    null = variance_ratio(*equal)
    print(null)
    assert null.verdict == "none shown"
    assert np.std(equal[1]) < np.std(losses["random"]) / 3
