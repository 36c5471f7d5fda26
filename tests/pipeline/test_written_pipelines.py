"""A pipeline is written as JSON, read again, and shown."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

import dshuffle
from dshuffle import Choices, InvalidParameter, Pipeline, Training
from dshuffle.compare import Way
from dshuffle.errors import DatasetChanged
from dshuffle.pipeline import BatchJobs, LocalWorkers, RunningScheduler, each_epoch

URL = "memory://test-pipeline"
LINEAR = Training("linear_regression", epochs=3, step=0.1)


def test_a_pipeline_as_json():
    pipeline = Pipeline(
        URL,
        Training("linear_regression", epochs=2, step=0.1, step_decay=0.5),
        shuffle=["local", Way("storage", Choices("partial:0.5", "storage", seed=0))],
        cluster=BatchJobs("SLURM", 3, min_workers=2, options={"cores": 1, "memory": "1 GiB"}),
        session={"on_loss": "raise"},
        report="somewhere",
    )
    written = json.loads(json.dumps(pipeline.to_dict()))
    assert Pipeline.from_dict(written) == pipeline
    assert pickle.loads(pickle.dumps(pipeline)) == pipeline
    for cluster in (
        LocalWorkers(3),
        LocalWorkers(links="1gbit", store="8mbit"),
        RunningScheduler("tcp://a:1", patience=3),
    ):
        again = Pipeline(URL, LINEAR, cluster=cluster)
        assert Pipeline.from_dict(again.to_dict()) == again
    for changes, message in [
        ({"cluster": {"kind": "cloud"}}, r"cluster\['kind'\]='cloud'"),
        ({"other": 1}, "other"),
        ({"cluster": {"kind": "local", "workers": 3}}, "cluster lacks a name, or has an unknown one: .*'workers'"),
        ({"shuffle": [{"label": "a"}]}, "shuffle lacks a name, or has an unknown one"),
        ({"training": {"fit": "linear_regression"}}, "training lacks a name, or has an unknown one: 'options'"),
        ({"training": {"fit": "os:getcwd2", "epochs": 1, "options": {}}}, "cannot be imported"),
    ]:
        with pytest.raises(InvalidParameter, match=message):
            Pipeline.from_dict({**written, **changes})
    with pytest.raises(InvalidParameter, match="it lacks dataset, training"):
        Pipeline.from_dict({})


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (lambda: Training(lambda shuffler, epochs: None), "cannot be imported"),
        (lambda: Training(each_epoch, fn=len), "cannot be written as JSON"),
    ],
)
def test_what_cannot_be_written_as_json(training, message):
    with pytest.raises(InvalidParameter, match=message):
        Pipeline(URL, training()).to_dict()


def test_what_of_a_dataset_was_chosen_is_written(tmp_path):
    dshuffle.create_dataset(tmp_path / "d.zarr", {"x": np.arange(40.0), "y": np.arange(40)})
    dataset = dshuffle.open_dataset(tmp_path / "d.zarr", arrays=["y"], decode=False, absent_chunks="fill")
    train, test = dataset.split(0.5)
    for part in (dataset, train, test.select([0, 3])):
        again = Pipeline.from_dict(json.loads(json.dumps(Pipeline(part, LINEAR).to_dict()))).dataset
        assert again.identity == part.identity
        assert again._opening == part._opening
        np.testing.assert_array_equal(
            again.read_rows(np.arange(again.n_samples))["y"], part.read_rows(np.arange(part.n_samples))["y"]
        )
    written = Pipeline(train, LINEAR).to_dict()
    for changes, message in [
        ({"selected": "!"}, "its selection of samples is damaged"),
        ({"selected": "eJxjAAAAAQAB"}, "its selection of samples is damaged"),
        ({"sample": 1}, "its description is not one that to_dict wrote"),
    ]:
        with pytest.raises(InvalidParameter, match=message):
            Pipeline.from_dict({**written, "dataset": {**written["dataset"], **changes}})
    dshuffle.create_dataset(tmp_path / "d.zarr", {"y": np.arange(41)}, overwrite=True)
    with pytest.raises(DatasetChanged, match="has 41 samples, but a part of 40 samples"):
        Pipeline.from_dict(written)


def test_storage_options_are_not_written(tmp_path):
    dshuffle.create_dataset(tmp_path / "d.zarr", {"x": np.arange(4.0)})
    dataset = dshuffle.open_dataset(tmp_path / "d.zarr", storage_options={"max_retries": 3})
    assert dataset.storage_options == {"max_retries": 3}
    assert "max_retries" not in json.dumps(Pipeline(dataset, LINEAR).to_dict())


def test_a_pipeline_says_what_was_chosen():
    pipeline = Pipeline(
        "s3://key:word@host/data.zarr",
        Training("linear_regression", step=0.1),
        shuffle="local",
        session={"on_loss": "raise"},
    )
    assert "shuffle=['local'], on_loss='raise')" in repr(pipeline)
    assert "Training(fit_linear_regression, epochs=5, step=0.1)" in repr(pipeline)
    assert "word" not in repr(pipeline)
    assert "checkpoint" not in repr(pipeline)
