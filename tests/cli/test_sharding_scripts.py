"""The scripts on the tables of Provatas et al. (2021) that take their options with click, in this process."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import dshuffle

PIPELINES = Path(__file__).parents[2] / "pipelines"


def run(script, *arguments):
    main = runpy.run_path(str(PIPELINES / script))["main"]
    return CliRunner().invoke(main, list(map(str, arguments)))


def cells(text):
    """The words of every line."""
    return [line.split() for line in text.splitlines()]


@pytest.fixture
def groups(tmp_path):
    """Five tight groups of three classes; two of them have fewer samples than there are workers."""
    group = np.repeat(np.arange(5), [200, 200, 200, 5, 4])
    centres = np.array([[0, 0], [1, 0], [0, 1], [2, 2], [-1.5, -1.5]])
    x = centres[group] + 0.01 * np.random.default_rng(0).normal(size=(609, 2))
    return dshuffle.create_dataset(tmp_path / "d.zarr", {"x": x, "y": group % 3, "group": group})


@pytest.mark.slow
def test_shardings_are_timed_and_sparse_neighbourhoods_counted(groups):
    options = ("--workers", 6, "--runs", 2, "--clusters", 5, "--clusters", 3)
    ran = run("sharding_tables.py", groups.url, *options, "--epochs", 2, "--batch-size", 60)
    assert ran.exit_code == 0, ran.output
    train = groups.split(0.8)[0]
    sizes = np.bincount(train.read_rows(np.arange(train.n_samples))["group"])
    assert len(sizes) == 5, "no group is held out as a whole"
    rows = cells(ran.stdout)
    for number in "12":
        [found] = [row for row in rows if row[:3] == ["distribution-aware", "5", number]]
        assert found[3:5] == ["2", f"{sizes[3:].mean():.2f}"]
        assert 0 < float(found[5]) <= 1
        [found] = [row for row in rows if row[:3] == ["distribution-aware", "3", number]]
        assert found[3] == "0"
        assert len(found) == 5, "no size"
    first_table = ran.stdout.partition("Sparse neighbourhoods")[0]
    timed = [row for row in cells(first_table) if row[:1] in (["random"], ["stratified"], ["distribution-aware"])]
    assert [row[1:-4] for row in timed] == [[], [], ["5"], ["3"], ["all"]]
    for mean, least, most, processors in (map(float, row[-4:]) for row in timed):
        assert 0 < least <= mean <= most
        assert processors > 0


@pytest.mark.slow
def test_shardings_of_all_samples_are_timed_without_a_training(groups):
    ran = run("sharding_tables.py", groups.url, "--workers", 6, "--runs", 1, "--epochs", 0)
    assert ran.exit_code == 0, ran.output
    assert "Times of sharding: 609 samples, 6 workers, 1 run" in ran.stdout
    # Neighbourhoods are twice, three and four times as many as classes.
    assert [row[1] for row in cells(ran.stdout) if row[:1] == ["distribution-aware"]] == ["6", "9", "12", "all"]
    assert "Sparse" not in ran.stdout


@pytest.mark.slow
def test_the_parameter_server_scatters_less_with_stratified_shards_if_workers_are_unequal():
    ran = run("parameter_server.py", "--seeds", 12, "--samples", 300, "--epochs", 2)
    assert ran.exit_code == 0, ran.output
    rows = {tuple(row[:2]): row for row in cells(ran.stdout) if row[1:2] in (["random"], ["stratified"])}
    assert list(rows) == [("1", "random"), ("1", "stratified"), ("10", "random"), ("10", "stratified")]
    scatter = {key: float(row[4]) for key, row in rows.items()}  # after the mean and a sign
    print(ran.stdout)
    assert scatter["10", "stratified"] < scatter["10", "random"] / 2
    assert scatter["1", "random"] < scatter["10", "random"] / 2
    ratio = {key: float(row[8]) for key, row in rows.items() if key[1] == "stratified"}
    assert ratio["10", "stratified"] == pytest.approx(
        (scatter["10", "random"] / scatter["10", "stratified"]) ** 2, rel=0.15
    )
    assert ratio["1", "stratified"] < 4 < ratio["10", "stratified"]
    assert "240 samples to train, 60 held out" in ran.stdout


def test_a_dataset_that_is_not_there_is_named(tmp_path):
    for arguments in (("parameter_server.py", "--url"), ("sharding_tables.py",)):
        refused = run(*arguments, tmp_path / "absent.zarr")
        assert refused.exit_code == 1
        assert "absent.zarr" in refused.output
