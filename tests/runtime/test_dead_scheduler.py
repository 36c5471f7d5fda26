"""The scheduler dies or is stopped: a session ends soon, and says what has died."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import dask.array
import numpy as np
import pytest
from distributed import Client

import dshuffle
from dshuffle import Shuffler, create_dataset
from dshuffle.errors import ClusterError
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.runtime.measure.measurement import diagnose

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

GONE = r"the scheduler at tcp://127\.0\.0\.1:\d+ does not answer \(.+\): it has died, or cannot be reached from here"

ENDS_WITHIN = 5.0
"""Seconds in which a session ends, as the documentation says."""

RECONNECT = 4.0
"""Seconds in which the client may connect again. They are 15 outside of tests."""


@pytest.fixture
def processes(tmp_path):
    """A client of a cluster of three processes, and the process of its scheduler."""
    file = str(tmp_path / "scheduler.json")
    place = ["--scheduler-file", file, "--no-dashboard"]
    with contextlib.ExitStack() as running:

        def start(what, *options):
            process = subprocess.Popen([sys.executable, "-m", f"distributed.cli.{what}", *place, *options])
            running.enter_context(process)
            running.callback(process.kill)
            return process.pid

        scheduler = start("dask_scheduler", "--host", "127.0.0.1", "--port", "0")
        for _ in range(2):
            start("dask_worker", "--no-nanny", "--nthreads", "1")
        while not os.path.exists(file):
            time.sleep(0.05)
        client = Client(scheduler_file=file)
        client.wait_for_workers(2)
        try:
            yield client, scheduler
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(scheduler, signal.SIGKILL)
            client.close(timeout=1)


@pytest.fixture
def reconnects_soon(monkeypatch):
    monkeypatch.setattr("dshuffle.runtime.client.session_client.RECONNECT", RECONNECT)


@pytest.fixture
def dataset(tmp_path):
    return create_dataset(tmp_path / "d.zarr", {"x": np.arange(100.0)})


@pytest.mark.parametrize(("how", "fails"), [(signal.SIGKILL, True), (signal.SIGSTOP, False)])
def test_the_block_is_left(processes, dataset, how, fails, caplog):
    client, scheduler = processes
    struck = []

    def train():
        with Shuffler(client, dataset) as shuffler:
            client.gather(next(shuffler.epochs(2)).map(len))
            os.kill(scheduler, how)
            struck.append(time.monotonic())
            if fails:
                raise ValueError("an error of the user")

    with pytest.raises(ValueError if fails else ClusterError, match="of the user" if fails else GONE) as caught:
        train()
    assert time.monotonic() - struck[0] < ENDS_WITHIN
    if fails:  # the error of the user is not replaced
        assert re.search(GONE, caplog.text)
    else:
        assert caught.value.transient


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_session_whose_epochs_have_ended_is_left_without_an_error(processes, dataset, how, caplog):
    """A scheduler that is busy for some seconds is no reason to fail when everything was trained on."""
    client, scheduler = processes
    with Shuffler(client, dataset) as shuffler:
        for epoch in shuffler.epochs(2):
            client.gather(epoch.map(len))
        assert list(shuffler.epochs(0)) == []  # the last epoch ends here
        os.kill(scheduler, how)
        struck = time.monotonic()
    assert time.monotonic() - struck < ENDS_WITHIN
    assert shuffler.closed
    if how is signal.SIGSTOP:  # else the client may know already that its scheduler is gone
        assert re.search(GONE, caplog.text)


def test_the_block_is_left_while_tasks_run(processes, dataset):
    """Whether the tasks have ended cannot be known any more."""
    client, scheduler = processes
    struck = []

    def train():
        with Shuffler(client, dataset) as shuffler:
            next(shuffler.epochs(2)).map(lambda partition: time.sleep(60))
            os.kill(scheduler, signal.SIGSTOP)
            struck.append(time.monotonic())

    with pytest.raises(ClusterError, match=GONE):
        train()
    assert time.monotonic() - struck[0] < 15 + ENDS_WITHIN


@pytest.mark.usefixtures("reconnects_soon")
def test_an_epoch_is_not_waited_for(processes, dataset):
    client, scheduler = processes
    with contextlib.suppress(ClusterError), Shuffler(client, dataset) as shuffler:
        epochs = shuffler.epochs(2)
        client.gather(next(epochs).map(len))
        os.kill(scheduler, signal.SIGKILL)
        struck = time.monotonic()
        with pytest.raises(ClusterError, match=GONE):
            next(epochs)
        assert RECONNECT / 2 < time.monotonic() - struck < 8 * RECONNECT
        struck = time.monotonic()
    assert time.monotonic() - struck < ENDS_WITHIN  # it is known by now


@pytest.mark.usefixtures("reconnects_soon")
def test_a_session_does_not_open(processes, dataset):
    client, scheduler = processes
    os.kill(scheduler, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(ClusterError, match=GONE) as caught:
        Shuffler(client, dataset)
    assert time.monotonic() - started < 20
    assert not re.search("version", str(caught.value))


def test_a_stopped_scheduler_does_not_say_which_workers_there_are(processes, monkeypatch):
    client, scheduler = processes
    assert len(cluster_info(client)["workers"]) == 2
    os.kill(scheduler, signal.SIGSTOP)
    silent = rf"the scheduler at {re.escape(client.scheduler.address)} did not answer within 1 s"
    monkeypatch.setattr("dshuffle.runtime.client.cluster_view.ANSWER_WITHIN", 1.0)
    with dask.config.set({"dshuffle.timeout": "1s"}):
        for call in (
            lambda: cluster_info(client),
            lambda: dshuffle.permute(client, dask.array.arange(10, chunks=5)),
            lambda: diagnose(client),
            lambda: dshuffle.measure_cluster(client, None),
        ):
            started = time.monotonic()
            with pytest.raises(ClusterError, match=silent):
                call()
            assert time.monotonic() - started < ENDS_WITHIN
