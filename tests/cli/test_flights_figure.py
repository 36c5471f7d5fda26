"""The figure of flights, on a small dataset in their place."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import dshuffle
from dshuffle.synthetic import keyed_regression

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "pipelines/flights_figure.py"))
OPTIONS = ["--seeds", "2", "--epochs", "3", "--workers", "4"]


@pytest.fixture
def arrays():
    """Rows that are sorted by a key, with noise."""
    made = keyed_regression(480, n_dense=4, noise=0.3)
    return {name: values.compute().astype(np.float64) for name, values in made.items()}


def test_the_excess_is_that_of_plain_loops(tmp_path, arrays):
    dshuffle.create_dataset(tmp_path / "d.zarr", arrays)
    out = tmp_path / "figure"
    ran = CliRunner().invoke(SCRIPT["main"], [str(tmp_path / "d.zarr"), *OPTIONS, "--output", str(out)])
    assert ran.exit_code == 0, ran.output
    rows = list(csv.DictReader((out / "flights.csv").read_text().splitlines()))
    assert len(rows) == 5 * 4 * 2 * 3
    step = max(float(row["first_step"]) for row in rows)
    found = {
        (row["way"], int(row["seed"]), int(row["epoch"])): float(row["excess"])
        for row in rows
        if float(row["first_step"]) == step
    }

    x, y = arrays["x"], arrays["y"]
    best = np.linalg.lstsq(x, y, rcond=None)[0]
    weights = np.zeros(x.shape[1])
    for epoch in range(3):
        passes = []
        for shard in np.split(np.arange(480), 4):
            own = weights.copy()
            for sample in shard:
                own -= step * (1 - epoch / 3) * (own @ x[sample] - y[sample]) * x[sample]
            passes.append(own)
        weights = np.mean(passes, axis=0)
        excess = np.sum((x @ weights - y) ** 2) / np.sum((x @ best - y) ** 2) - 1
        for seed in range(2):
            assert found["none", seed, epoch + 1] == pytest.approx(excess, rel=1e-4)
    assert min(found.values()) > 0
    assert found["local", 0, 1] != found["local", 1, 1]
    assert found["global", 0, 3] < found["none", 0, 3]
    assert "<html" in (out / "flights.html").read_text()
    assert f"least ||Xw - y|| / ||y|| is {np.linalg.norm(x @ best - y) / np.linalg.norm(y):.4f}" in " ".join(
        ran.output.split()
    )


def test_the_least_error_allows_features_that_depend_on_each_other(arrays):
    doubled = {"x": np.hstack([arrays["x"], arrays["x"][:, :3]]), "y": arrays["y"]}
    least = [
        SCRIPT["least_error"](dshuffle.create_dataset(f"memory://flights-{name}", of, overwrite=True))
        for name, of in (("plain", arrays), ("doubled", doubled))
    ]
    assert least[0] == pytest.approx(least[1], rel=1e-9)


def test_a_dataset_that_does_not_suit_is_refused(tmp_path):
    dshuffle.create_dataset(tmp_path / "d.zarr", {"z": np.ones(40)})
    ran = CliRunner().invoke(SCRIPT["main"], [str(tmp_path / "d.zarr"), "--output", str(tmp_path / "figure")])
    assert ran.exit_code == 1
    assert ran.output.startswith("Error: features='x' is not allowed")
