"""The scripts of ``pipelines/`` and ``storage/``, run as users run them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / script, *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_dataset_is_made_and_trained_on(tmp_path):
    url = tmp_path / "d.zarr"
    made = run("storage/make_dataset.py", url, "--samples", "2_000", "--features", 20)
    assert made.returncode == 0, made.stderr
    assert f"2,000 samples, 168 kB: {url}" in made.stdout
    trained = run("pipelines/linear_regression.py", url, "--workers", 2, "--epochs", 3)
    assert trained.returncode == 0, trained.stderr
    lines = trained.stdout.splitlines()
    errors = [float(line.split("error ")[1].split(",")[0]) for line in lines[:3]]
    assert errors[0] > errors[1] > errors[2]
    assert [line.split(":")[0] for line in lines[3:]] == ["epoch 0 (load)", "epoch 1 (peer)", "epoch 2 (peer)"]


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
    # Nine settings with two shardings, three with three; random is what the others are compared with.
    assert (len(rows), len(runs)) == (1 + 9 + 3 * 2, 1 + 5 * (9 * 2 + 3 * 3))
    assert "none shown" in ran.stdout, "five runs tell nothing"
    assert "<html" in (tmp_path / "study" / "variances.html").read_text()


@pytest.mark.slow
def test_an_epoch_is_broken_down(tmp_path):
    url = tmp_path / "d.zarr"
    assert run("storage/make_dataset.py", url, "--samples", "2_000", "--features", 20).returncode == 0
    ran = run("pipelines/exchange_breakdown.py", url, "--workers", 2, "--epochs", 2, "--output", tmp_path / "out")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("partial 0.") == 5
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.slow
def test_the_papers_tables_are_measured(tmp_path):
    arguments = ["--mbit", 1000, "--data", tmp_path, "--scale", 0.001, "--epochs", 1, "--workers", 3]
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
    found = json.loads(out.read_text())["b"]
    assert found["rows"] == 300
    # 35 s of a link of 1 Gbit/s carry 80 % of 300,000 rows, if a row has 18,229 bytes.
    assert abs(found["row_nbytes"] - 35 * 125e6 / (300_000 * 0.8)) < 8
    assert {"server", "coded", "ubershuffle", "clique", "peer", "disk"} < set(found["ways"])
    assert found["ways"]["server"]["packets"] > found["ways"]["clique"]["packets"] > 0
    assert "1.38" in ran.stdout, "the paper's 35.0 over 25.3"
