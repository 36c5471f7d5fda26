"""Long waits say what they wait for."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import dask
import pytest
from distributed.comm.core import CommClosedError

from dshuffle.errors import ClusterError
from dshuffle.runtime.client.cluster_view import cluster_info, wait_for_workers
from dshuffle.runtime.client.session_client import install_plugin
from dshuffle.runtime.measure.measurement import diagnose, measure_cluster


class SilentClient:
    """A client whose scheduler is connected. It answers what is in ``answers``, and nothing else."""

    def __init__(self, **answers):
        self.scheduler = SimpleNamespace(address="tcp://silent:1", identity=self._call_of("identity", answers))
        self._run = self._call_of("run", answers)
        self._run_on_scheduler = self._call_of("run_on_scheduler", answers)
        self._register_scheduler_plugin = self._call_of("register", answers)
        self.asynchronous, self.status, self.cluster = False, "running", None

    @staticmethod
    def _call_of(operation, answers):
        async def call(*_, **__):
            if operation not in answers:
                await asyncio.Event().wait()
            return answers[operation]

        return call

    def sync(self, function, *args):
        async def bounded():  # the test fails, and does not hang, if the call has no end
            async with asyncio.timeout(20):
                return await function(*args)

        return asyncio.run(bounded())


@pytest.fixture
def short_timeout(monkeypatch):
    monkeypatch.setattr("dshuffle.runtime.client.cluster_view.ANSWER_WITHIN", 0.1)
    with dask.config.set({"dshuffle.timeout": "300ms"}):
        yield


def test_a_scheduler_that_does_not_say_which_workers_there_are(short_timeout, caplog, monkeypatch):
    monkeypatch.setattr("dshuffle.runtime.client.cluster_view.LOG_AFTER", 0.05)
    with pytest.raises(ClusterError, match=r"the scheduler at tcp://silent:1 did not answer within 0\.3 s"):
        cluster_info(SilentClient())
    assert re.search(r"dshuffle: the scheduler at tcp://silent:1 has not answered for \d+ s", caplog.text)
    assert 1 <= len(caplog.records) <= 3  # after 0.05, 0.1 and 0.2 s


def test_a_cluster_that_is_not_set_up_in_time(short_timeout, monkeypatch):
    monkeypatch.setattr("dshuffle.runtime.client.session_client.SETUP_TIMEOUT", 0.2)
    monkeypatch.setattr("dshuffle.runtime.client.session_client.SETUP_MARGIN", 0.0)
    with pytest.raises(
        ClusterError, match=r"not be set up on all workers .*tcp://silent:1 did not answer within 0\.3 s"
    ) as caught:
        install_plugin(SilentClient(identity={}))
    assert caught.value.transient


def test_a_scheduler_that_waits_for_slow_workers_may_answer_after_the_timeout(short_timeout):
    """Kernels that compile on one worker take longer than this timeout."""
    client = SilentClient(identity={})

    async def register(*_):
        await asyncio.sleep(1)

    client._register_scheduler_plugin = register
    install_plugin(client)


def test_a_worker_that_does_not_say_how_it_is(short_timeout):
    client = SilentClient(identity={"workers": {}}, run_on_scheduler={})
    with pytest.raises(ClusterError, match="a worker, or the scheduler, did not answer within"):
        diagnose(client)


def test_a_worker_that_does_not_answer_a_measurement_is_not_called_lost(short_timeout):
    client = SilentClient(identity={"workers": {"tcp://w0": {}}})
    with pytest.raises(
        ClusterError,
        match=r"^the cluster cannot be measured: a worker, or the scheduler, did not answer within 0\.3 s$",
    ):
        measure_cluster(client, None)


@pytest.mark.parametrize("patience", [0, 0.2])
def test_paused_workers_are_not_counted(patience):
    workers = {"a": {"status": "running"}, "b": {"status": "paused"}}
    client = SilentClient(identity={"workers": workers, "address": "tcp://silent:1"})
    wait_for_workers(client, 1, patience)
    with pytest.raises(ClusterError, match=r"only 1 of min_workers=2 workers are there after .* \(patience\)"):
        wait_for_workers(client, 2, patience)


def test_a_scheduler_that_cannot_be_reached_is_an_error_of_dshuffle():
    def sync(*_, **__):
        raise CommClosedError("the connection is lost")

    client = SimpleNamespace(scheduler=SimpleNamespace(identity=None), sync=sync)
    with pytest.raises(ClusterError, match=r"cannot be reached: the connection is lost\. Make a new Client"):
        cluster_info(client)
