"""Jobs are watched until their workers connect: refused, pending, running and failed ones."""

from __future__ import annotations

import asyncio
import subprocess

import dask
import psutil
import pytest

import dshuffle
from dshuffle import ClusterError, InvalidParameter, Pipeline, Training
from dshuffle.pipeline import BatchJobs, jobs
from dshuffle.pipeline.jobs import PAUSE, JobRecords, State
from dshuffle.synthetic import keyed_regression

from .fake_slurm import FakeSlurm

pytest.importorskip("dask_jobqueue")
pytestmark = pytest.mark.timeout(120)
URL = "memory://test-job-watch"
LINEAR = Training("linear_regression", epochs=3, step=0.1)
OPTIONS = {"cores": 1, "memory": "1 GiB", "interface": "lo", "scheduler_options": {"dashboard_address": ":0"}}
OPTIONS |= {"silence_logs": False}  # by default Dask changes the handlers of distributed, to which pytest adds its own
REFUSAL = (
    "sbatch: error: invalid partition specified: gpuu\nsbatch: error: Batch job submission failed: Invalid partition"
)


@pytest.fixture(scope="module", autouse=True)
def dataset():
    return dshuffle.create_dataset(URL, keyed_regression(300, n_keys=5, n_dense=4), chunk_rows=20, overwrite=True)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake = FakeSlurm(tmp_path)
    monkeypatch.setenv("PATH", fake.path)
    monkeypatch.setattr("dshuffle.pipeline.jobs.LOOK", 0.2)
    monkeypatch.setattr("dshuffle.runtime.client.cluster_view.STEP", 0.2)
    with dask.config.set({"distributed.adaptive.interval": "200ms"}):
        yield fake


def opened(n_jobs, **options):
    """Open a cluster of jobs. Its patience is an hour, far more than the time limit of these tests."""
    with BatchJobs("SLURM", n_jobs, options=OPTIONS | options).open():
        pass


def opened_within(patience, n_jobs):
    with BatchJobs("SLURM", n_jobs, options=OPTIONS, patience=patience).open():
        pass


def test_a_refusal_is_said_at_once(slurm):
    slurm.refuse(REFUSAL)
    with pytest.raises(
        ClusterError, match=r"SLURM has refused . of 2 jobs, so at most . of 2 workers can come"
    ) as raised:
        opened(2, queue="gpuu")
    assert "invalid partition specified: gpuu / sbatch: error: Batch job submission failed" in str(raised.value)
    assert not raised.value.transient


def test_a_command_that_is_not_there_is_a_refusal(slurm):
    for command in ("sbatch", "scancel"):
        (slurm.commands / command).unlink()
    with pytest.raises(ClusterError, match=r"SLURM has refused 1 of 1 jobs.*sbatch"):
        opened(1)


@pytest.mark.slow
def test_jobs_that_end_before_their_workers_connect_are_submitted_three_times(slurm, caplog):
    with pytest.raises(ClusterError, match=r"[12] of 2 jobs have failed 3 times") as raised:
        opened(2, python="/nowhere/python")
    assert 5 <= len(slurm.jobs) <= 6
    assert "FAILED, exit code 127:0, on w7" in str(raised.value)
    assert "/nowhere/python: not found" in str(raised.value)
    for text in ("attempt 1 of 3", "attempt 2 of 3", "attempt 3 of 3"):
        assert text in caplog.text
    assert "/nowhere/python: not found" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(300)  # it loads or compiles kernels
def test_a_job_that_fails_once_is_submitted_again_and_trains(slurm, caplog, tmp_path):
    fails_once = '[ "$JOB" -gt 1 ] || { echo "no module is loaded" >&2; exit 3; }'
    source = BatchJobs("SLURM", 1, options=OPTIONS | {"job_script_prologue": [fails_once]})
    dataset = dshuffle.create_dataset(tmp_path / "d.zarr", keyed_regression(300, n_keys=5, n_dense=4))
    assert len(Pipeline(dataset, LINEAR, cluster=source).run(progress=False).records) == 3
    assert len(slurm.jobs) == 2
    assert "exit code 3:0" in caplog.text
    assert "no module is loaded" in caplog.text


class Said:
    """What a run says of its progress. It can stop the run."""

    text, stops = "", False

    def __call__(self, done, total, text):
        self.text = text
        if self.stops:
            raise InterruptedError


def test_the_line_of_a_wait_tells_pending_running_and_failed_jobs_apart(slurm, eventually):
    slurm.be_full()
    said = Said()
    submitted = Pipeline(URL, LINEAR, cluster=BatchJobs("SLURM", 2, options=OPTIONS)).submit(said)
    expected = "waiting for 2 workers in 2 SLURM jobs: 0 of 2 workers have connected; jobs: 2 pending (Resources)"
    eventually(lambda: said.text == expected, seconds=60)
    said.stops = True
    with pytest.raises(InterruptedError):
        submitted.result(timeout=60)
    assert {(job / "state").read_text().strip() for job in slurm.jobs} == {"CANCELLED"}


@pytest.mark.slow
def test_jobs_that_slurm_has_never_listed_stay_submitted(slurm):
    """They may be on another cluster (``--clusters``)."""
    slurm.be_full()
    slurm.forget()
    with pytest.raises(ClusterError, match=r"only 0 of min_workers=1 .* after 3 s; jobs: 1 submitted\. Start"):
        opened_within(3, 1)
    assert len(slurm.jobs) == 1


def test_a_job_that_slurm_has_listed_and_forgotten_has_failed(slurm, caplog, eventually):
    slurm.be_full()
    said = Said()
    submitted = Pipeline(URL, LINEAR, cluster=BatchJobs("SLURM", 1, options=OPTIONS)).submit(said)
    eventually(lambda: said.text.endswith("jobs: 1 pending (Resources)"), seconds=60)
    slurm.forget()
    eventually(
        lambda: "Slurm does not say how it ended (scontrol: slurm_load_jobs error: Invalid" in caplog.text, seconds=60
    )
    said.stops = True
    with pytest.raises(InterruptedError):
        submitted.result(timeout=60)


def ended(number):
    return not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_a_command_of_slurm_that_hangs_is_ended(slurm, monkeypatch, eventually):
    slurm.hang()
    monkeypatch.setattr(jobs, "ANSWER_WITHIN", 0.5)
    with pytest.raises(subprocess.TimeoutExpired, match=r"squeue.* timed out after 0\.5 seconds"):
        asyncio.run(jobs.slurm_states())
    assert slurm.hanging is not None
    eventually(lambda: ended(slurm.hanging), seconds=60)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_records_of_jobs():
    records = JobRecords("SLURM", 3, 2, lost_after=5, clock=(clock := Clock()))
    for name, number in ("a", "1"), ("b", "2"), ("c", "3"):
        records.note(name, State.SUBMITTED, number=number)
    records.note("a", State.PENDING, "Priority")
    records.note("b", State.RUNNING)
    records.note("c", State.CONNECTED)
    records.note("a worker that somebody has started", State.CONNECTED)
    records.note("a worker that somebody has started", State.LEFT)
    assert str(records) == "jobs: 1 pending (Priority), 1 running"
    records.check(6)
    for _ in range(2):
        records.note("b", State.FAILED, "exit code 1")
        assert records.due() == ["b"]
        records.note("b", State.SUBMITTED, number="2")
    records.check(6)
    records.note("b", State.FAILED, "exit code 1")
    assert records.due() == []  # the limit
    assert str(records) == "jobs: 1 failed, 3 failures so far, 1 pending (Priority)"
    records.check(4)
    with pytest.raises(ClusterError, match=r"1 of 3 jobs have failed 3 times .* most 4 of 5 workers .*: exit code 1"):
        records.check(5)
    records.note("c", State.LEFT)
    clock.now = 4.9
    assert records.due() == []
    clock.now = 5.0
    assert records.due() == ["c"]


def test_a_refusal_after_workers_have_connected_may_pass():
    records = JobRecords("PBS", 2, 1, 0.0, clock=(clock := Clock()))
    records.note("a", State.SUBMITTED, number="1")
    records.note("b", State.REFUSED, "cannot contact the server")
    with pytest.raises(ClusterError, match="PBS has refused 1 of 2 jobs, so at most 1 of 2 workers"):
        records.check(2)
    records.note("a", State.CONNECTED)
    records.check(2)
    assert records.due() == []
    for _ in range(2):
        clock.now += PAUSE
        assert records.due() == ["b"]
        records.note("b", State.REFUSED, "cannot contact the server")
    clock.now += PAUSE
    assert records.due() == []
    with pytest.raises(ClusterError, match="cannot contact the server"):
        records.check(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wall_time": "01:00"}, "SLURMCluster refuses them: .* unexpected keyword argument 'wall_time'"),
        ({"config_name": "slrum"}, "SLURMCluster refuses them: .*slrum"),
        ({"cores": None}, "SLURMCluster refuses them: You must specify how much cores and memory"),
    ],
)
def test_options_that_the_class_does_not_have_are_refused_before_anything_starts(options, message):
    with pytest.raises(InvalidParameter, match=message):
        Pipeline(URL, LINEAR, cluster=BatchJobs("SLURM", 2, options=OPTIONS | options)).check()


def test_a_scheduler_that_cannot_start_says_why():
    with pytest.raises(ClusterError, match=r"the scheduler of the jobs cannot start: .*ib77.*is not a valid"):
        opened(1, interface="ib77")
