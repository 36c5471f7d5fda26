"""Pipelines as values: what is checked, run, stopped and continued."""

from __future__ import annotations

import json

import numpy as np
import pytest
from distributed import Client, LocalCluster

import dshuffle
from dshuffle import Choices, InvalidParameter, Pipeline, Training
from dshuffle.compare import Way
from dshuffle.errors import ClusterError, DatasetNotFound
from dshuffle.pipeline import BatchJobs, LocalWorkers, RunningScheduler, each_epoch
from dshuffle.runtime.client.cluster_view import wait_for_workers
from dshuffle.synthetic import keyed_regression
from dshuffle.training import fit_linear_regression

pytestmark = pytest.mark.timeout(120)
URL = "memory://test-pipeline"
LINEAR = Training("linear_regression", epochs=3, step=0.1)
HERE = LocalWorkers(2, processes=False)


@pytest.fixture(scope="module", autouse=True)
def dataset():
    return dshuffle.create_dataset(URL, keyed_regression(300, n_keys=5, n_dense=4), chunk_rows=20, overwrite=True)


def targets(partition):
    return np.concatenate([batch["y"] for batch in partition.batches(50)])


def test_a_pipeline_gives_what_the_trainer_gives():
    result = Pipeline(URL, LINEAR, shuffle="partial:0.5", cluster=HERE).run(progress=False)
    with HERE.open() as client, dshuffle.Shuffler(client, URL, assignment="partial:0.5") as shuffler:
        history = fit_linear_regression(shuffler, epochs=3, step=0.1)
    assert np.array_equal(result.model, history.model)
    assert [point.error for point in result.history.points] == [point.error for point in history.points]
    assert [str(record.choices.assignment) for record in result.records] == ["partial:0.5"] * 3
    assert result.ways[0].n_workers == 2
    assert result.report is None


@pytest.mark.slow
def test_several_ways_are_compared_in_the_report(tmp_path):
    ways = ["local", Way("from shared storage", Choices("global", "storage")), Choices("global")]
    pipeline = Pipeline(URL, LINEAR, shuffle=ways, cluster=HERE, report=tmp_path / "report")
    seen = []
    result = pipeline.run(progress=lambda *progress: seen.append(progress))
    assert seen[-1] == (13, 13, "global + peer"), "4 preparations, and 3 epochs of each strategy"
    assert [way.label for way in result.ways] == ["local", "from shared storage", "global + peer"]
    assert result.model is result.ways[0].model
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    assert [way["label"] for way in summary["ways"]] == [way.label for way in result.ways]
    assert [len(way["history"]) for way in summary["ways"]] == [3, 3, 3]
    assert summary["settings"]["training"] == "dshuffle.training.linear_regression:fit_linear_regression"
    page = result.report.read_text()
    assert "from shared storage" in page
    records = (tmp_path / "report" / "records.jsonl").read_text().splitlines()
    assert len(records) == 9


def test_a_pipeline_continues_from_its_checkpoint(tmp_path):
    failures = [ClusterError("the cluster is gone")]

    def fit(shuffler, *, epochs, on_epoch=None):
        def strike(point):
            if point.epoch == 1 and failures:
                raise failures.pop()
            on_epoch(point)

        return fit_linear_regression(shuffler, epochs=epochs, step=0.1, on_epoch=strike)

    pipeline = Pipeline(URL, Training(fit, epochs=3), cluster=HERE, checkpoint=tmp_path / "run.json")
    whole = Pipeline(URL, LINEAR, cluster=HERE).run(progress=False)
    result = pipeline.run(progress=False)
    assert not failures
    assert np.array_equal(result.model, whole.model)
    assert len(result.history.points) == 3
    again = pipeline.run(progress=False)  # a job that starts again after its end
    assert np.array_equal(again.model, whole.model)


def test_a_run_is_stopped_after_the_epoch_and_continued_from_its_checkpoint(tmp_path):
    training = Training("linear_regression", epochs=4, step=0.1)
    pipeline, seen = Pipeline(URL, training, cluster=HERE, checkpoint=tmp_path / "run.json"), []

    def stop(done, total, text):
        seen.append(done)
        if done == 2 + 2:  # preparations, and epochs
            raise InterruptedError

    with pytest.raises(InterruptedError):
        pipeline.submit(stop).result(timeout=60)
    assert max(seen) == 4
    result = pipeline.run(progress=False)
    assert len(result.history.points) == 4
    assert np.array_equal(result.model, Pipeline(URL, training, cluster=HERE).run(progress=False).model)


def test_waits_for_workers_are_said_stopped_and_end(monkeypatch, caplog):
    """A wait does not change what a cluster knows of its workers: such a cluster would not replace lost ones."""
    monkeypatch.setattr("dshuffle.runtime.client.cluster_view.STEP", 0.05)

    def stop(done, total, text):
        if text.endswith("1 of 2 workers have connected"):
            raise InterruptedError(text)

    def status(dask_scheduler, value):
        for worker in dask_scheduler.workers.values():
            dask_scheduler.handle_worker_status_change(value, worker, "test")

    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster, Client(cluster) as client:
        before, source = (
            cluster.scheduler_info,
            RunningScheduler(cluster.scheduler_address, min_workers=2, patience="1m"),
        )
        expected = f"waiting for the cluster at {cluster.scheduler_address}: 1 of 2 workers have connected"
        with pytest.raises(InterruptedError, match=expected):
            Pipeline(URL, LINEAR, cluster=source).run(progress=stop)
        wait_for_workers(client, 1, 10)
        with pytest.raises(ClusterError, match=r"only 1 of min_workers=2 .* after 0\.5 s"):
            wait_for_workers(client, 2, "0.5s")
        assert 1 <= len([one for one in caplog.messages if "1 of 2 workers have connected after" in one]) <= 5
        assert cluster.scheduler_info is before
        client.run_on_scheduler(status, value="closing_gracefully")
        with pytest.raises(ClusterError, match="only 0 of min_workers=1 workers are there"):
            wait_for_workers(client, 1, 0.2)


def test_a_running_cluster_is_used_and_left_running(tmp_path):
    with LocalCluster(n_workers=2, processes=False, protocol="tcp://", dashboard_address=":0") as cluster:
        source = RunningScheduler(cluster.scheduler_address, min_workers=2)
        pipeline = Pipeline(URL, LINEAR, cluster=source, checkpoint=tmp_path / "run.json")
        assert len(pipeline.run(progress=False).records) == 3
        with Client(cluster) as client:
            assert len(client.scheduler_info(n_workers=-1)["workers"]) == 2
        few = RunningScheduler(cluster.scheduler_address, min_workers=3, patience=0.1)
        with pytest.raises(ClusterError, match=r"only 2 of min_workers=3 workers are there after 0\.1 s"):
            Pipeline(URL, LINEAR, cluster=few).run(progress=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Training("nothing"), "fit='nothing' is not allowed; it must be a function, one of linear_regression"),
        (lambda: Training("os:nothing"), "os:nothing cannot be imported"),
        (lambda: Training(5), "fit=5 is not allowed"),
        (lambda: Training(each_epoch, epochs=0, fn=len), "epochs=0 is not allowed"),
        (
            lambda: Training("linear_regression"),
            "missing a required argument: 'step'. It is called with a shuffler, epochs= and the options of "
            "the training. Its parameters are shuffler, epochs, step,",
        ),
        (lambda: Training("linear_regression", step=1, stop=2), "unexpected keyword argument 'stop'"),
        (
            lambda: Pipeline(URL, "linear_regression"),
            "training='linear_regression' is not allowed",
        ),
        (lambda: Pipeline(URL, LINEAR, shuffle=[]), "at least one strategy"),
        (lambda: Pipeline(URL, LINEAR, shuffle=5), "shuffle=5 is not allowed"),
        (lambda: Pipeline(URL, LINEAR, shuffle="globall"), "globall"),
        (lambda: Pipeline(URL, LINEAR, shuffle=["global", "global"]), "strategies with different labels"),
        (lambda: Pipeline(URL, LINEAR, shuffle=["local", Choices(seed=1)]), "strategies with the same seed"),
        (lambda: Pipeline(URL, LINEAR, cluster="tcp://x"), "cluster='tcp://x' is not allowed"),
        (
            lambda: Pipeline(URL, LINEAR, session={"seed": 1}),
            "session='seed' is not allowed",
        ),
        (
            lambda: Pipeline(URL, LINEAR, session={"min_workers": 2}),  # a parameter of the cluster
            "session='min_workers' is not allowed",
        ),
        (lambda: Pipeline(URL, LINEAR, shuffle=["local", "global"], checkpoint="x"), "None with several strategies"),
        (lambda: LocalWorkers(0), "n_workers=0 is not allowed"),
        (lambda: LocalWorkers(2, links="fast"), "links='fast' is not allowed; it must be a rate"),
        (lambda: LocalWorkers(2, store=25e6), "store=25000000.0 is not allowed; it must be None, or text such as"),
        (lambda: LocalWorkers(2, store=""), "store='' is not allowed; it must be a rate"),
        (lambda: LocalWorkers(2, processes=False, store="1gbit"), "processes=False is not allowed; it must be True"),
        (lambda: RunningScheduler("tcp://x", patience="soon"), "patience='soon' is not allowed"),
        (lambda: BatchJobs("Slurmm", 2), "system='Slurmm' is not allowed; it must be one of HTCondor, LSF"),
        (lambda: BatchJobs("SLURM", 0), "jobs=0 is not allowed"),
        (lambda: BatchJobs("slurm", 2, min_workers=5, options={"processes": 2}), "min_workers=5 is not allowed; it"),
    ],
)
def test_values_that_are_not_allowed(make, message):
    with pytest.raises(InvalidParameter, match=message.replace("(", r"\(")):
        make()


def test_all_reasons_why_a_pipeline_cannot_run_are_given_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    pipeline = Pipeline(
        URL,
        Training("linear_regression", step=0.1, target="z"),
        shuffle=["local", Way("named", Choices(sharding="unknown")), Way("balanced", Choices(balance="w"))],
        cluster=LocalWorkers(400, processes=False),
        report=tmp_path / "file" / "report",
    )
    with pytest.raises(InvalidParameter) as caught:
        pipeline.check()
    for reason in ("training: target='z' is not allowed", "local: ", "named: ", "balanced: ", "report="):
        assert reason in str(caught.value)
    with pytest.raises(DatasetNotFound):
        Pipeline("memory://not-there", LINEAR).check()
    with pytest.raises(InvalidParameter, match="cannot run"):  # before a thread starts
        pipeline.submit()


def test_a_way_that_trains_on_a_copy_of_the_dataset(tmp_path):
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", keyed_regression(200, n_keys=5, n_dense=4), chunk_rows=20)
    copy = dshuffle.shuffle_dataset(dataset, tmp_path / "copy.zarr", seed=1, chunk_rows=20)
    choices = Choices("local", sharding="contiguous")
    ways = [Way("stored", choices), Way("copied", choices, copy)]
    trained = Pipeline(dataset, Training(each_epoch, epochs=1, fn=targets), ways, HERE).run(progress=False).ways
    first, last = (np.arange(100) + start for start in (0, 100))
    for way, source in zip(trained, (dataset, copy), strict=True):
        [(here, there)] = way.value
        assert np.array_equal(np.sort(here), np.sort(source.read_rows(first)["y"]))
        assert np.array_equal(np.sort(there), np.sort(source.read_rows(last)["y"]))
    assert not np.array_equal(np.sort(trained[0].value[0][0]), np.sort(trained[1].value[0][0]))


def test_a_pipeline_says_what_was_chosen():
    training = Training("linear_regression", step=0.1)
    shown = repr(Pipeline("s3://key:word@host/data.zarr", training, shuffle="local"))
    assert "Training(fit_linear_regression, epochs=5, step=0.1), shuffle=['local'], cluster=LocalWorkers(" in shown
    assert "word" not in shown
