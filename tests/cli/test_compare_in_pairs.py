"""``dshuffle compare`` with pairs of runs, and with trainings of the user's own."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from .conftest import run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--train nowhere:fit", "--train is not allowed: nowhere:fit cannot be imported: No module named"),
        ("--train own:missing", "--train is not allowed: own:missing cannot be imported: module 'own' has no"),
        ("--train linear", "--train='linear' is not allowed; it must be a function, one of linear_regression"),
        ("--train linear_regression", "missing a required argument: 'step'. It is called with"),
        ("--train own:fit --step 1", "--step is not a parameter of --train own:fit"),
        ("--train own:fit --workers 1", "--workers=1 is not allowed; it must be an integer >= 2"),
        ("--train own:fit --delivery peer", "test: shuffle=['global + peer'] is not allowed; it must"),
    ],
)
def test_trainings_that_cannot_be_compared(elsewhere, url, monkeypatch, options, message):
    (elsewhere / "own.py").write_text("def fit(shuffler, *, epochs, seed):\n    return {}\n")
    monkeypatch.syspath_prepend(elsewhere)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    monkeypatch.setattr("dshuffle.compare.clusters.local_cluster", lambda *_, **__: pytest.fail("started"))
    result = run(url, "--metric", "loss", *options.split())
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.stderr.split())
    alone = run(url, "--workers", 1, "--pairs", 0)
    assert "--workers=1 is not allowed; it must be an integer >= 2. One worker trains on all" in alone.stderr


@pytest.mark.parametrize(
    ("options", "shows_something"),
    [
        ("--delivery peer", False),
        ("--assignment local --assignment partial:0.5", False),
        ("--assignment local --assignment global --choice every=2", False),
        ("--assignment local --assignment global", True),
    ],
)
def test_pairs_that_show_nothing_are_refused(elsewhere, url, monkeypatch, options, shows_something):
    monkeypatch.setattr("dshuffle.compare.pairs.regression_in_pairs", lambda *_, **__: {})
    monkeypatch.setattr("dshuffle.pipeline.pipeline.train", lambda pipeline, *_, **__: 1 / 0)
    words = "they need a strategy that reshuffles everything before every epoch, such as global, and another one."
    asked, unasked = (run(url, *more, *options.split()) for more in (("--pairs", 5), ()))
    assert (f"--pairs 5: {words}" in " ".join(asked.stderr.split())) != shows_something
    assert (asked.exit_code == 2) != shows_something
    # Nobody asked for pairs: the ways are timed.
    assert isinstance(unasked.exception, ZeroDivisionError)
    assert (f"No pairs of runs: {words}" in unasked.stderr) != shows_something


def test_large_datasets_are_not_read_into_this_process_unasked(elsewhere, url, monkeypatch):
    finished = SimpleNamespace(comparison="figures")
    monkeypatch.setattr("dshuffle.pipeline.pipeline.train", lambda *_, **__: finished)
    monkeypatch.setattr("dshuffle.report.render_text", lambda *_: "")
    monkeypatch.setattr("dshuffle.report.write_report", lambda *_: "page")
    tested = []
    monkeypatch.setattr("dshuffle.compare.pairs.regression_in_pairs", lambda *_, **options: tested.append(options))
    assert run(url).exit_code == 0
    assert len(tested) == 1
    monkeypatch.setattr("dshuffle.cli.compare.MOST_NBYTES", 1000)
    result = run(url)
    assert result.exit_code == 0
    assert "No pairs of runs: they read 162 kB into the memory of this process, which is more than" in result.stderr
    assert len(tested) == 1
    assert run(url, "--pairs", 5).exit_code == 0
    assert len(tested) == 2
    monkeypatch.setattr("dshuffle.cli.compare.MEMORY_FRACTION", 1e-9)
    assert "Choose a smaller dataset" in " ".join(run(url, "--pairs", 5).stderr.split())


def test_the_direction_of_an_accuracy_is_not_guessed(elsewhere, url, monkeypatch):
    tests = []
    monkeypatch.setattr("dshuffle.pipeline.pipeline.train", lambda one, *_, **__: tests.append(one.test) or 1 / 0)
    options = (url, "--train", "linear_regression", "--metric", "val_accuracy", "--step", 0.1)
    result = run(*options)
    assert result.exit_code == 1
    assert "--metric='val_accuracy' is not allowed; it must be given with the direction" in result.stderr
    assert "Add --higher-is-better or --lower-is-better" in result.stderr
    run(*options, "--higher-is-better")
    run(*options, "--lower-is-better")
    assert [test.higher_is_better for test in tests] == [True, False]


@pytest.mark.slow
def test_a_training_of_the_user_is_compared_by_its_metric(elsewhere, url, monkeypatch):
    (elsewhere / "own.py").write_text(OWN)
    monkeypatch.syspath_prepend(elsewhere)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    options = ("--assignment", "local", "--assignment", "global", "--choice", "sharding=contiguous", "--workers", 2)
    test = ("--train", "own:fit", "--metric", "val_loss", "--lower-is-better", "--margin", 0.2, "--pairs", 5)
    result = run(url, *test, *options, "--json")
    assert result.exit_code == 0, result.output
    local, reshuffled = json.loads(result.stdout)["ways"]
    assert reshuffled["pairs"] == {}
    local["pairs"] = local["pairs"]["models"]
    assert [local["pairs"][name] for name in ("metric", "margin", "outcome")] == ["val_loss", "0.2", "worse"]
    assert local["pairs"]["text"] in json.loads(result.stdout)["verdict"]
    # Contiguous shards of 180 rows have half of the keys each.
    assert local["pairs"]["way"] == [0.5] * 5
    assert local["pairs"]["reference"][0] < 0.1
    assert "rmse" not in result.stdout


OWN = """
import numpy as np

def share_of_first_half(partition):
    return np.mean(partition.sample_ids < 180)

def fit(shuffler, *, epochs, seed, test):
    assert test.n_samples == 40
    for epoch in shuffler.epochs(epochs):
        shares = shuffler.client.gather(epoch.map(share_of_first_half))
    return {"val_loss": abs(shares[0] - 0.5)}

fit.averages = "models"
"""
