"""Pairs of runs with functions of the user: NumPy, scikit-learn and PyTorch, and those that cannot be compared."""

from __future__ import annotations

import importlib.util
import json
import math
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from distributed.comm.core import CommClosedError
from sklearn.datasets import load_digits

import dshuffle
from dshuffle import Choices, InvalidParameter, Pipeline, Training
from dshuffle.compare import HeldOut, PairedOutcome, PairedTest, local_cluster
from dshuffle.errors import TrainingDiverged, WorkerLost
from dshuffle.pipeline import LocalWorkers, RunningScheduler, each_epoch

pytestmark = pytest.mark.timeout(300)
HERE = LocalWorkers(2, processes=False)
WAYS = ("global", Choices("local", sharding="contiguous"))
SCRIPT = Path(__file__).parents[2] / "pipelines" / "own_training.py"


@pytest.fixture(scope="module")
def examples():
    spec = importlib.util.spec_from_file_location("own_training", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_training"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["own_training"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Digits sorted by class, so that a worker with a contiguous shard has half of the classes."""
    pixels, digit = load_digits(return_X_y=True)
    order = np.argsort(digit, kind="stable")
    arrays = {"x": (pixels[order] / 16).astype(np.float32), "y": digit[order].astype(np.int64)}
    dataset = dshuffle.create_dataset(tmp_path_factory.mktemp("pairs") / "digits.zarr", arrays, chunk_rows=100)
    return dataset.split(0.8)


def compared(digits, fit, test, *, cluster=HERE, epochs=2, ways=WAYS, **options):
    train, held_out = digits
    training = Training(fit, epochs=epochs, test=held_out, **options)
    return Pipeline(train, training, ways, cluster, test=test).run(progress=False)


@pytest.mark.slow
def test_a_trainer_with_an_estimator_and_a_report(digits, examples, tmp_path):
    train, held_out = digits
    test = PairedTest("accuracy", margin=0.5, pairs=5, higher_is_better=True)
    training = Training(examples.with_sklearn, epochs=2, test=held_out, seed=0)
    pipeline = Pipeline(train, training, WAYS, HERE, report=tmp_path, test=test)
    result = pipeline.run(progress=False)
    assert result.ways[1].pairs.test == test
    summary = json.loads((tmp_path / "summary.json").read_text())
    pairs = summary["ways"][1]["pairs"]["models"]
    assert (pairs["metric"], pairs["higher_is_better"], len(pairs["way"])) == ("accuracy", True, 5)
    assert summary["ways"][0]["pairs"] == {}
    assert summary["averages"] == "models", "own_training says so"
    assert pairs["text"] in summary["verdict"]
    assert "All pairs have the same held-out samples" in summary["verdict"]
    assert summary["ways"][0]["history"][-1]["validation"]["accuracy"] == pairs["reference"][0]
    page = (tmp_path / "report.html").read_text()
    assert "Pairs of runs, accuracy" in page
    assert summary["settings"]["training"] == "own_training:with_sklearn"
    assert summary["settings"]["test"].startswith(f"{held_out.n_samples} samples of ")
    assert "accuracy_of_majority" in page


@pytest.mark.slow
def test_a_module_in_pytorch(digits, examples, torch):
    test = PairedTest("accuracy", margin=0.1, pairs=5, higher_is_better=True)
    result = compared(digits, examples.with_torch, test, cluster=LocalWorkers(2), seed=0)
    runs = result.ways[1].pairs
    assert runs.outcome is PairedOutcome.NOT_WORSE, "gradients are averaged in every step"
    assert min(runs.way + runs.reference) > 0.8
    # The first pair has the seeds of the runs that were timed.
    assert runs.reference[0] == result.ways[0].history.points[-1].validation["accuracy"]


def scores(shuffler, *, epochs, test=None, seed=0, value=0.5, noise=0.0, bad_seed=-1, calls=[]):  # noqa: B006
    """Metrics that do not depend on the samples, and some that are not."""
    for epoch in shuffler.epochs(epochs):
        shuffler.client.gather(epoch.map(len))
    calls.append(seed)
    loss = math.nan if seed == bad_seed else value + noise * len(calls)
    return {"loss": loss, "text": "good", "losses": [[1.0, 2.0]]}


def nothing(shuffler, *, epochs):
    for epoch in shuffler.epochs(epochs):
        shuffler.client.gather(epoch.map(len))


@pytest.mark.parametrize(
    ("fit", "options", "metric", "message"),
    [
        (scores, {}, "val_loss", "metric='val_loss' is not allowed; it must be one of loss, losses, text, which the"),
        (scores, {}, "text", "metric is not allowed: text is 'good', and not a number"),
        (scores, {}, "losses", r"metric is not allowed: losses is \[\[1.0, 2.0\]\], and not a number"),
        (nothing, {}, "loss", "metric is not allowed: the training returned None. It must return a History, or a map"),
        (each_epoch, {"fn": len}, "loss", r"metric is not allowed: the training returned \[\["),
    ],
)
def test_metrics_that_are_none_are_refused_after_the_first_way(digits, fit, options, metric, message):
    test = PairedTest(metric, higher_is_better=False)
    pipeline = Pipeline(digits[0], Training(fit, epochs=2, **options), WAYS, HERE, test=test)
    with pytest.raises(InvalidParameter, match=message):
        pipeline.run(progress=False)


@pytest.mark.slow
def test_progress_counts_ways_and_then_pairs(digits):
    """A function without on_epoch moves the count when a strategy has ended."""
    calls = []
    pipeline = Pipeline(
        digits[0], Training(scores, epochs=2, noise=1e-4, calls=[]), WAYS, HERE, test=PairedTest("loss")
    )
    pipeline.run(progress=lambda done, most, text: calls.append((done, most, text)))
    counts = list(dict.fromkeys(call[:2] for call in calls))
    assert counts[:5] == [(done, 6) for done in (0, 1, 2, 4, 6)], "two preparations, then epochs"
    assert counts[-5:] == [(pair, 20) for pair in range(5)]


@pytest.mark.slow
def test_a_run_of_the_reference_that_diverges(digits, tmp_path):
    """The comparison and its report stay. It does not matter whether the run was one of those that were timed."""
    for value, bad_seed, reason in ((math.nan, -1, "reference diverged"), (0.5, 2, "constant")):
        training = Training(scores, epochs=2, value=value, bad_seed=bad_seed)
        pipeline = Pipeline(digits[0], training, WAYS, HERE, report=tmp_path, test=PairedTest("loss", pairs=5))
        runs = pipeline.run(progress=False).ways[1].pairs
        assert runs.outcome is PairedOutcome.CANNOT_TELL
        assert (runs.n_pairs, runs.reason) == (5, reason)
        said = json.loads((tmp_path / "summary.json").read_text())["verdict"]
        assert ("take a smaller step" in said) == (reason == "reference diverged")


def unstable(shuffler, *, epochs, seed=0, error=None):
    """Diverge without reshuffling: with one seed by NaN, and with another one by an error."""
    for epoch in shuffler.epochs(epochs):
        shuffler.client.gather(epoch.map(len))
    local = not shuffler.choices.assignment.moves
    if local and seed == 3 and error is not None:
        raise error
    return {"loss": math.nan if local and seed != 2 else 1.0 + 0.001 * seed}


@pytest.mark.slow
def test_a_way_that_diverges_is_worse(digits, tmp_path):
    training = Training(unstable, epochs=2, error=TrainingDiverged("weights"))
    pipeline = Pipeline(digits[0], training, WAYS, HERE, report=tmp_path, test=PairedTest("loss"))
    runs = pipeline.run(progress=False).ways[1].pairs
    assert str(runs) == "worse: it diverged in 9 of 10 pairs, and reshuffling in 0"
    assert str(runs) in json.loads((tmp_path / "summary.json").read_text())["verdict"]
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [WorkerLost("rank 1 has left. Make a new session"), CommClosedError("in <TCP>: closed")]
)
def test_a_cluster_that_fails_ends_the_pairs_and_not_the_report(digits, tmp_path, error):
    training = Training(unstable, epochs=2, error=error)
    pipeline = Pipeline(digits[0], training, WAYS, HERE, report=tmp_path, test=PairedTest("loss"))
    with pytest.warns(UserWarning, match="The pairs of runs have ended early: (rank 1 has left$|in <TCP>: closed$)"):
        result = pipeline.run(progress=False)
    runs = result.ways[1].pairs
    assert (runs.n_pairs, runs.outcome) == (3, None)
    assert "not clear yet (3 pairs)" in json.loads((tmp_path / "summary.json").read_text())["verdict"]
    assert result.comparison.ways[1].records


def test_one_worker_of_a_running_cluster_has_nothing_to_compare(digits):
    with local_cluster(1, processes=False) as client:
        cluster = RunningScheduler(client.scheduler.address)
        pipeline = Pipeline(digits[0], Training(scores, epochs=2), WAYS, cluster, test=PairedTest("loss"))
        with pytest.raises(InvalidParameter, match="workers=1 is not allowed"):
            pipeline.run(progress=False)


def by_sample(shuffler, *, epochs, test, seed=0):
    """The held-out labels as losses, which are known without training."""
    for epoch in shuffler.epochs(epochs):
        shuffler.client.gather(epoch.map(len))
    losses = test.read_rows(np.arange(test.n_samples))["y"] + 1.0 + 0.01 * seed
    return {"loss": losses + (0.0 if shuffler.choices.assignment.moves else 0.002 * losses)}


def test_each_pair_holds_out_other_samples_unless_they_are_fixed(digits):
    """And losses of single samples of a fixed set have its sampling error."""
    train, held_out = digits

    def pairs(test):
        training = Training(by_sample, epochs=2, test=test)
        return (
            Pipeline(train, training, WAYS, HERE, test=PairedTest("loss", "1%", pairs=5))
            .run(progress=False)
            .ways[1]
            .pairs
        )

    runs = pairs(HeldOut(0.2, stratify="y"))
    part, drawn = train.split(0.8, stratify="y", seed=3)
    labels = drawn.read_rows(np.arange(drawn.n_samples))["y"]
    assert runs.reference[3] == pytest.approx(np.mean(labels) + 1.03)
    assert len({round(value % 0.01, 9) for value in runs.reference}) > 1
    assert runs.test_to_train == pytest.approx(drawn.n_samples / part.n_samples, rel=0.01)
    assert (runs.fixed, runs.by_sample, runs.mean) == (False, None, pytest.approx(0.002))
    runs = pairs(held_out)
    losses = held_out.read_rows(np.arange(held_out.n_samples))["y"] + 1.0
    assert runs.fixed
    assert runs.by_sample.std() == pytest.approx(0.002 * losses.std(), rel=1e-6)


def test_a_training_says_what_it_averages():
    assert Training("linear_regression", step=0.1).averages == "models"
    assert Training("linear_regression", step=0.1, average="gradients").averages == "gradients"
    assert Training("synchronous_sgd", network=None, batch_size=1, step=0.1).averages == "gradients"
    assert Training(scores).averages == "unknown"
    assert Training(declared).averages == "gradients"


def declared(shuffler, *, epochs):
    """A function that says what it averages."""


declared.averages = "gradients"


@pytest.mark.parametrize(
    ("ways", "epochs", "workers", "message"),
    [
        (WAYS, 1, 2, "test: epochs=1 is not allowed; it must be an integer >= 2. The first epoch is only loaded"),
        (WAYS, 2, 1, "test: workers=1 is not allowed; it must be an integer >= 2. One worker trains on all samples"),
        (("local", "partial:0.5"), 2, 2, "test: ways=.* of which one reshuffles everything, such as 'global'"),
        (("global", Choices("global", "storage")), 2, 2, "test: shuffle=.* such as 'local'"),
    ],
)
def test_what_cannot_be_tested_is_said_before_anything_runs(digits, ways, epochs, workers, message):
    cluster = LocalWorkers(workers, processes=False)
    pipeline = Pipeline(digits[0], Training(scores, epochs=epochs), ways, cluster, test=PairedTest("loss"))
    with pytest.raises(InvalidParameter, match=message):
        pipeline.check()


def test_a_test_is_a_part_of_the_description():
    with pytest.raises(InvalidParameter, match="test='loss' is not allowed; it must be None or a PairedTest"):
        Pipeline("memory://a", Training("linear_regression", step=0.1), test="loss")
    test = PairedTest("accuracy", margin="0.7%", pairs=7, higher_is_better=True)
    pipeline = Pipeline("memory://a", Training("linear_regression", step=0.1), WAYS, test=test)
    assert pickle.loads(pickle.dumps(pipeline)) == pipeline
