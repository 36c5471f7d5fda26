"""Pipelines in the jobs of batch systems: what dask-jobqueue is asked for, without a batch system."""

from __future__ import annotations

import signal
import sys

import dask
import pytest

import dshuffle
from dshuffle import InvalidParameter, Pipeline, Training
from dshuffle.pipeline import BatchJobs
from dshuffle.pipeline.jobs import SYSTEMS, cluster_class_of
from dshuffle.synthetic import keyed_regression

from .fake_slurm import FakeSlurm

pytestmark = pytest.mark.timeout(120)
URL = "memory://test-batch-jobs"
LINEAR = Training("linear_regression", epochs=3, step=0.1)


@pytest.fixture(scope="module", autouse=True)
def dataset():
    return dshuffle.create_dataset(URL, keyed_regression(300, n_keys=5, n_dense=4), chunk_rows=20, overwrite=True)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A Slurm that is full."""
    pytest.importorskip("dask_jobqueue")
    fake = FakeSlurm(tmp_path)
    fake.be_full()
    monkeypatch.setenv("PATH", fake.path)
    monkeypatch.setattr("dshuffle.runtime.client.cluster_view.STEP", 0.1)
    return fake


class Enough(Exception):
    pass


def submitted(slurm, source):
    """The scripts of all jobs, and the value of a setting of Dask while they are waited for."""
    values = []

    def waiting(text):
        values.append(dask.config.get("distributed.deploy.lost-worker-timeout"))
        if len(slurm.jobs) == source.jobs:
            raise Enough

    with pytest.raises(Enough), source.open(waiting):
        pass
    return [(job / "script").read_text() for job in slurm.jobs], values[-1]


@pytest.mark.parametrize("configured", [False, True])
def test_jobs_are_submitted_with_the_arguments_of_the_user(slurm, configured):
    options = {"cores": 1, "memory": "1 GiB", "interface": "lo", "scheduler_options": {"dashboard_address": ":0"}}
    lifetime = ["--lifetime", "115m"]
    own = {} if configured else {"worker_extra_args": lifetime}
    source = BatchJobs("slurm", 3, min_workers=2, options=options | own)
    assert str(source) == "2 workers in 3 slurm jobs"
    settings = {"distributed.deploy.lost-worker-timeout": "15s"}
    with dask.config.set(settings | {"jobqueue.slurm.worker-extra-args": lifetime if configured else []}):
        scripts, lost = submitted(slurm, source)
        assert lost == "5s"
        assert dask.config.get("distributed.deploy.lost-worker-timeout") == "15s"
    assert len(scripts) == 3
    for words in ("--memory-limit 1.00GiB", "--interface lo", "--lifetime 115m --preload dshuffle"):
        assert all(words in script for script in scripts)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "configured", "n_workers"), [({}, 2, 6), ({"processes": 4}, 2, 12), ({}, None, 3)])
def test_a_job_is_a_single_worker_unless_the_user_has_set_another_number(slurm, options, configured, n_workers):
    """Dask-jobqueue itself starts several for a job of many cores."""
    options = {"cores": 16, "memory": "48 GiB", "scheduler_options": {"dashboard_address": ":0"}, **options}
    with dask.config.set({"jobqueue.slurm.processes": configured}):
        source = BatchJobs("SLURM", 3, options=options)
        assert source.n_workers == n_workers
        assert source.awaited == (n_workers, "1h")
        scripts, lost = submitted(slurm, source)
    assert lost == "1h"  # of conftest.py: what the user has set
    processes = n_workers // 3
    assert all((f"--nworkers {processes} " in script) == (processes > 1) for script in scripts)
    assert all(f"--nthreads {16 // processes} " in script for script in scripts)


def test_jobs_without_dask_jobqueue(monkeypatch):
    monkeypatch.setitem(sys.modules, "dask_jobqueue", None)
    with pytest.raises(InvalidParameter, match="BatchJobs needs dask-jobqueue"):
        Pipeline(URL, LINEAR, cluster=BatchJobs("SLURM", 2)).check()


def test_the_import_of_dask_jobqueue_does_not_change_ctrl_c(monkeypatch, tmp_path):
    text = "import signal\nsignal.signal(signal.SIGINT, lambda *_: None)\nSLURMCluster = None\n"
    (tmp_path / "dask_jobqueue.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "dask_jobqueue", raising=False)
    before = signal.getsignal(signal.SIGINT)
    cluster_class_of("slurm")
    assert signal.getsignal(signal.SIGINT) is before
    del sys.modules["dask_jobqueue"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_dask_jobqueue_knows_the_systems_and_options(system):
    pytest.importorskip("dask_jobqueue")
    options = {
        "cores": 1,
        "memory": "1 GiB",
        "interface": "lo",
        "local_directory": "/local",
        "worker_extra_args": ["--lifetime", "115m"],
        "scheduler_options": {"dashboard_address": ":0"},
    }
    options |= {"HTCondor": {"disk": "1 GiB"}, "OAR": {"memory_per_core_property_name": "mem_core"}}.get(system, {})
    BatchJobs(system, 1, options=options).check()
    with cluster_class_of(system)(**options) as cluster:
        script = cluster.job_script()
    assert "--interface lo" in script or "'--interface', 'lo'" in script or '"--interface" "lo"' in script
    assert "/local" in script
    assert "115m" in script
