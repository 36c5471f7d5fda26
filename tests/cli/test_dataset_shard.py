import numpy as np
import pytest
from click.testing import CliRunner

import dshuffle
from dshuffle.cli import main
from dshuffle.store import read_sharding, stored_shardings


@pytest.fixture
def dataset(tmp_path):
    label = np.repeat(np.arange(4), [400, 300, 295, 5])
    x = 100 * np.eye(4)[label] + np.random.default_rng(0).normal(size=(1000, 4))
    return dshuffle.create_dataset(tmp_path / "d.zarr", {"x": x, "y": label, "id": np.arange(1000)}, chunk_rows=100)


def run(dataset, *arguments):
    return CliRunner().invoke(main, ["dataset", "shard", dataset.url, *map(str, arguments)])


@pytest.mark.parametrize("by", ["random", "contiguous", "round-robin", "stratified", "distribution-aware"])
def test_a_table_of_classes_and_the_ranks_beside_the_dataset(dataset, by):
    options = ("--clusters", 3) if by == "distribution-aware" else ()
    result = run(dataset, "--by", by, "--labels", "y", "--workers", 6, "--write", *options)
    assert result.exit_code == 0, result.output
    assert f"{by}: 1,000 samples for 6 workers in" in result.stdout
    assert "shards of 166 to 167 samples" in result.stdout
    assert stored_shardings(dataset) == (f"{by}-6",)
    ranks = read_sharding(dataset, f"{by}-6")
    row = next(line.split() for line in result.stdout.splitlines() if line.strip().startswith("2 "))
    counts = np.bincount(ranks[700:995], minlength=6)
    assert row[:3] == ["2", "295", str(counts.min())]
    assert row[4:] == [str(counts.max()), str(np.ptp(counts))]
    if by == "stratified":
        assert row[5] == "1"
        assert "warning: 1 of 4 classes have fewer samples than there are workers (6)" in result.stderr
    assert "already" in run(dataset, "--by", by, "--labels", "y", "--workers", 6, "--write", *options).stderr


def test_a_box_plot(dataset, tmp_path):
    page = tmp_path / "plot.html"
    result = run(dataset, "--by", "random", "--labels", "y", "--workers", 6, "--output", page)
    assert result.exit_code == 0, result.output
    assert f"random sharding of {dataset.url} for 6 workers" in page.read_text()
    assert stored_shardings(dataset) == ()


def test_what_is_broadcast_is_said(dataset):
    result = run(dataset, "--by", "distribution-aware", "--clusters", 4, "--workers", 6)
    assert result.exit_code == 0, result.output
    assert "4 neighbourhoods of 5 to 400 samples; 5 samples are broadcast" in result.stdout


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--by", "stratified", "--workers", 6), 2, "--labels is required"),
        (("--by", "random", "--workers", 6, "--name", "mine"), 2, "--name needs --write"),
        (("--workers", 6, "--labels", "z"), 1, "--labels='z' is not allowed"),
        (("--workers", 6, "--labels", "id"), 1, "1000 distinct values"),
        (("--workers", 6, "--labels", "x"), 1, "labels.shape=(1000, 4)"),
        (("--workers", 1001, "--labels", "y"), 1, "fewer samples than workers"),
        (("--by", "distribution-aware", "--workers", 6, "--features", "z", "--clusters", 2), 1, "array='z'"),
        (("--by", "distribution-aware", "--workers", 6, "--clusters", 1001), 1, "at most 1000"),
    ],
)
def test_refusals(dataset, options, code, message):
    result = run(dataset, *options)
    assert result.exit_code == code
    assert message in result.stderr
    assert stored_shardings(dataset) == ()
