"""Long waits say what they wait for."""

from __future__ import annotations

import threading
import time

import pytest

from dshuffle.runtime.waiting import said


def test_a_long_wait_is_said_less_and_less_often(caplog):
    with said("work is being done", after=0.2):
        time.sleep(2)
    lines = [record.getMessage() for record in caplog.records]
    assert set(lines) == {"dshuffle: work is being done"}
    assert 1 <= len(lines) <= 4  # after 0.2, 0.6 and 1.4 s
    assert "dshuffle-said" not in {thread.name for thread in threading.enumerate()}


def test_a_short_wait_is_silent(caplog):
    with pytest.raises(ZeroDivisionError), said("work is being done", after=60):
        raise ZeroDivisionError
    assert not caplog.records
    assert "dshuffle-said" not in {thread.name for thread in threading.enumerate()}
