"""Long waits say what they wait for."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from distributed.comm.core import CommClosedError

from dshuffle.errors import ClusterError
from dshuffle.runtime.cluster_view import cluster_info
from dshuffle.runtime.waiting import said


def test_a_long_wait_is_said_less_and_less_often(caplog):
    with said("work is being done", after=0.05):
        time.sleep(0.5)
    lines = [record.getMessage() for record in caplog.records]
    assert set(lines) == {"dshuffle: work is being done"}
    assert 1 <= len(lines) <= 4  # after 0.05, 0.15 and 0.35 s
    assert "dshuffle-said" not in {thread.name for thread in threading.enumerate()}


def test_a_short_wait_is_silent(caplog):
    with pytest.raises(ZeroDivisionError), said("work is being done", after=60):
        raise ZeroDivisionError
    assert not caplog.records
    assert "dshuffle-said" not in {thread.name for thread in threading.enumerate()}


def test_a_scheduler_that_cannot_be_reached_is_an_error_of_dshuffle():
    def sync(*_, **__):
        raise CommClosedError("the connection is lost")

    client = SimpleNamespace(scheduler=SimpleNamespace(identity=None), sync=sync)
    with pytest.raises(ClusterError, match=r"cannot be reached: the connection is lost\. Make a new Client"):
        cluster_info(client)
