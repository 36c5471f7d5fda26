"""Functions of the user in a pipeline: what they say of their epochs, and what a checkpoint has of them."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest

import dshuffle
from dshuffle import InvalidParameter, Pipeline, Training
from dshuffle.cli.run import json_lines, lines_of
from dshuffle.pipeline import LocalWorkers, PipelineResult, TrainedWay, each_epoch
from dshuffle.report import TrainingPoint
from dshuffle.synthetic import keyed_regression

pytestmark = pytest.mark.timeout(120)
URL = "memory://test-own-functions"
HERE = LocalWorkers(2, processes=False)


@pytest.fixture(scope="module", autouse=True)
def dataset():
    return dshuffle.create_dataset(URL, keyed_regression(300, n_keys=5, n_dense=4), chunk_rows=20, overwrite=True)


@pytest.mark.slow
def test_a_function_that_calls_on_epoch_has_a_history(tmp_path):
    def fit(shuffler, *, epochs, on_epoch=None):
        for epoch in shuffler.epochs(epochs):
            shuffler.client.gather(epoch.map(len))
            time.sleep(0.05)  # what the client does after an epoch belongs to its time
            on_epoch(TrainingPoint(epoch=epoch.number, seconds=1.0, error=0.5 / (1 + epoch.number)))
        return {"loss": 0.25}

    result = Pipeline(URL, Training(fit, epochs=3), cluster=HERE, report=tmp_path).run(progress=False)
    assert result.history is None
    assert [point.error for point in result.comparison.ways[0].history] == [0.5, 0.25, 0.5 / 3]
    assert all(record.epoch_seconds >= 0.05 for record in result.records)
    page = result.report.read_text()
    assert "The error that the training function reports, after each epoch on a logarithmic scale" in page
    assert "‖" not in page
    training = Training(each_epoch, epochs=3, fn=len)
    result = Pipeline(URL, training, cluster=HERE, report=tmp_path).run(progress=False)
    [way] = json.loads((tmp_path / "summary.json").read_text())["ways"]
    assert [point["error"] for point in way["history"]] == [None] * 3, "it calls on_epoch, without an error"
    assert "Error after each epoch" not in result.report.read_text()


def test_on_epoch_takes_nothing_a_number_or_metrics():
    class Session:
        epoch = None

    own = TrainingPoint(epoch=7, seconds=1.0, error=0.1)

    def fit(shuffler, *, epochs, on_epoch=None):
        for shuffler.epoch, given in enumerate([(), (np.float32(0.5),), ({"val_loss": 0.25},), (own,)]):
            on_epoch(*given)

    points = []
    Training(fit).run(Session(), points.append)
    assert [point.epoch for point in points] == [0, 1, 2, 7]
    assert str([point.error for point in points]) == "[nan, 0.5, nan, 0.1]"
    assert [dict(point.validation) for point in points] == [{}, {}, {"val_loss": 0.25}, {}]
    for wrong in ("x", {"val_loss": "x"}, [0.5, 0.5]):
        with pytest.raises(InvalidParameter, match=r"on_epoch=.* is not allowed; it must be called with nothing, the"):
            Training(lambda shuffler, *, epochs, on_epoch=None, wrong=wrong: on_epoch(wrong)).run(Session(), print)


def test_metrics_of_a_function_are_those_that_it_returned_or_told():
    told = TrainingPoint(epoch=0, seconds=1.0, error=math.nan, validation={"val_loss": 0.5})
    assert TrainedWay("local", {"loss": np.float32(0.25), "model": None}, (), 2).metrics == {"loss": 0.25}
    way = TrainedWay("local", None, (), 2, reported=(told,))
    assert way.metrics == {"val_loss": 0.5}
    assert [json.loads(line) for line in json_lines(PipelineResult((way,), None))] == [
        {"way": "local", "metrics": {"val_loss": 0.5}}
    ]
    assert lines_of(PipelineResult((way,), None), "") == ["local, 2 workers", "  val_loss 0.5000"]


def counting(shuffler, *, epochs, keep=True, seen=None):
    """Count epochs, and keep the count in the checkpoint."""
    count = shuffler.attached or 0
    for epoch in shuffler.epochs(max(0, epochs - shuffler.next_epoch)):
        shuffler.client.gather(epoch.map(len))
        count += 1
        if keep:
            shuffler.attach(count)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, False])
def test_a_checkpoint_without_a_model_is_noticed_and_a_run_without_epochs_keeps_the_report(tmp_path, caplog, keep):
    for epochs, done in ((2, 2), (3, 3 if keep else 1)):
        training = Training(counting, epochs=epochs, keep=keep)
        pipeline = Pipeline(URL, training, cluster=HERE, checkpoint=tmp_path / "run.json", report=tmp_path / "report")
        result = pipeline.run(progress=False)
        assert result.model == done
    assert ("epochs before 2 are done, and no model was attached in them" in caplog.text) == (not keep)
    before = result.report.read_text()
    again = pipeline.run(progress=False)
    assert (again.report, again.records) == (None, ())
    assert result.report.read_text() == before
    assert "all epochs were done before, as the checkpoint says" in caplog.text
