"""Pipelines in the jobs of batch systems: what dask-jobqueue is asked for, without a batch system."""

from __future__ import annotations

import signal
import sys
import types

import dask
import pytest
from distributed import LocalCluster

import dshuffle
from dshuffle import InvalidParameter, Pipeline, Training
from dshuffle.pipeline import BatchJobs
from dshuffle.pipeline.clusters import SYSTEMS, jobqueue
from dshuffle.synthetic import keyed_regression

pytestmark = pytest.mark.timeout(120)
URL = "memory://test-batch-jobs"
LINEAR = Training("linear_regression", epochs=3, step=0.1)


@pytest.fixture(scope="module", autouse=True)
def dataset():
    return dshuffle.create_dataset(URL, keyed_regression(300, n_keys=5, n_dense=4), chunk_rows=20, overwrite=True)


class FakeCluster:
    """A class of dask-jobqueue, on threads; notes what was asked for."""

    asked: dict

    def __init__(self, **options):
        if "cores" not in options:
            raise ValueError("You must specify how many cores")
        type(self).asked = {"options": options, "lost": dask.config.get("distributed.deploy.lost-worker-timeout")}
        self._cluster = LocalCluster(n_workers=2, processes=False, dashboard_address=":0")

    def __enter__(self):
        return self._cluster.__enter__() and self

    def __exit__(self, *error):
        return self._cluster.__exit__(*error)

    def adapt(self, **jobs):
        self.asked["adapt"] = jobs

    def __getattr__(self, name):
        return getattr(self._cluster, name)


def test_jobs_are_submitted_and_kept(monkeypatch):
    monkeypatch.setitem(sys.modules, "dask_jobqueue", types.SimpleNamespace(SLURMCluster=FakeCluster))
    source = BatchJobs("slurm", 3, min_workers=2, options={"cores": 1, "memory": "1 GiB", "interface": "lo"})
    result = Pipeline(URL, LINEAR, cluster=source).run(progress=False)
    assert len(result.records) == 3
    assert FakeCluster.asked["options"] == {**source.options, "processes": 1}
    assert FakeCluster.asked["adapt"] == {"minimum_jobs": 3, "maximum_jobs": 3}
    assert str(source) == "2 workers in 3 slurm jobs"
    assert FakeCluster.asked["lost"] == "1h"  # of conftest.py: what the user has set
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "15s"}):
        Pipeline(URL, LINEAR, cluster=source).run(progress=False)
        assert FakeCluster.asked["lost"] == "5s"
        assert dask.config.get("distributed.deploy.lost-worker-timeout") == "15s"
    with pytest.raises(InvalidParameter, match="dask-jobqueue refuses them for SLURM: You must specify how many cores"):
        Pipeline(URL, LINEAR, cluster=BatchJobs("slurm", 3)).run(progress=False)


@pytest.mark.parametrize(("options", "configured", "n_workers"), [({}, 2, 6), ({"processes": 4}, 2, 12), ({}, None, 3)])
def test_a_job_is_a_single_worker_unless_the_user_has_set_another_number(monkeypatch, options, configured, n_workers):
    """Dask-jobqueue itself starts several for a job of many cores."""
    monkeypatch.setitem(sys.modules, "dask_jobqueue", types.SimpleNamespace(PBSCluster=FakeCluster))
    with dask.config.set({"jobqueue.pbs.processes": configured}):
        source = BatchJobs("PBS", 3, options={"cores": 16, "memory": "48 GiB", **options})
        assert source.n_workers == n_workers
        assert source.worker_memory == 48 * 2**30 * 3 // n_workers
        assert source.awaited == (n_workers, "1h")
        monkeypatch.setattr("dshuffle.pipeline.clusters.wait_for_workers", lambda *_: None)
        with source.open():
            assert FakeCluster.asked["options"]["processes"] == n_workers // 3
    with dask.config.set({"jobqueue.big.processes": 5}):
        assert BatchJobs("PBS", 3, options={"config_name": "big"}).n_workers == 15
    with pytest.raises(InvalidParameter, match=r"options\['processes'\]=0 is not allowed"):
        BatchJobs("PBS", 3, options={"processes": 0})
    with pytest.raises(InvalidParameter, match=r"options\['memory'\]='much' is not allowed"):
        BatchJobs("PBS", 3, options={"cores": 16, "memory": "much"})


def test_jobs_without_dask_jobqueue(monkeypatch):
    monkeypatch.setitem(sys.modules, "dask_jobqueue", None)
    with pytest.raises(InvalidParameter, match="BatchJobs needs dask-jobqueue"):
        Pipeline(URL, LINEAR, cluster=BatchJobs("SLURM", 2)).check()


def test_the_import_of_dask_jobqueue_does_not_change_ctrl_c(monkeypatch, tmp_path):
    (tmp_path / "dask_jobqueue.py").write_text("import signal\nsignal.signal(signal.SIGINT, lambda *_: None)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "dask_jobqueue", raising=False)
    before = signal.getsignal(signal.SIGINT)
    jobqueue()
    assert signal.getsignal(signal.SIGINT) is before
    del sys.modules["dask_jobqueue"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_dask_jobqueue_knows_the_systems_and_options(system):
    cluster_of = pytest.importorskip("dask_jobqueue") and getattr(jobqueue(), f"{system}Cluster")
    options = {
        "cores": 1,
        "memory": "1 GiB",
        "interface": "lo",
        "local_directory": "/local",
        "worker_extra_args": ["--lifetime", "115m"],
        "scheduler_options": {"dashboard_address": ":0"},
    }
    options |= {"HTCondor": {"disk": "1 GiB"}, "OAR": {"memory_per_core_property_name": "mem_core"}}.get(system, {})
    with cluster_of(**options) as cluster:
        script = cluster.job_script()
    assert "--interface lo" in script or "'--interface', 'lo'" in script or '"--interface" "lo"' in script
    assert "/local" in script
    assert "115m" in script
