"""Limits of open files: workers raise theirs, and sessions say what they need."""

from __future__ import annotations

import resource
from typing import Any

import pytest
from distributed import Client

from dshuffle import Shuffler
from dshuffle.runtime.process import too_few_files
from dshuffle.runtime.worker import worker_plugin


@pytest.mark.slow
def test_workers_raise_their_soft_limits(new_processes: Any, small: Any) -> None:
    def lower() -> int:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        return hard

    with new_processes(2) as cluster, Client(cluster) as client:
        hard = client.run(lower)
        with Shuffler(client, small):
            limits = client.run(lambda: resource.getrlimit(resource.RLIMIT_NOFILE))
        assert limits == {address: (most, most) for address, most in hard.items()}


def test_opening_says_what_is_needed(
    cluster_of: Any, small: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_plugin, "raise_limit", lambda: 67)
    with cluster_of({"0": {}, "1": {}, "2": {}}) as cluster, Client(cluster) as client:
        with Shuffler(client, small, delivery="storage"), Shuffler(client, small, assignment="local"):
            assert "open files" not in caplog.text
        with Shuffler(client, small):
            assert "3 of 3 workers may have fewer than the 68 open files that this session needs" in caplog.text


def test_whose_limits_are_too_low() -> None:
    limits = {"a": 4096, "b": 1024, "c": None, "d": 1500}
    words = too_few_files(limits, 999)
    assert words.startswith("2 of 4 workers may have fewer than the 1575 open files that this session needs, b only 1")
    assert "ulimit -Hn" in words
    assert too_few_files(limits, 100) == ""
