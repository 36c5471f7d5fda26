"""A session is opened again if a worker is lost meanwhile: for how many workers it waits, and what it says."""

from types import SimpleNamespace

import pytest

from dshuffle.runtime.client import open_session
from dshuffle.runtime.client.open_session import OpenSession
from dshuffle.runtime.scheduler.machine import worker_lost
from dshuffle.runtime.session_spec import EVERY_WORKER


@pytest.mark.parametrize(
    ("elastic", "states", "expected"),
    [
        (True, ["running"] * 5 + ["closing_gracefully"], 2),
        (False, ["running"] * 5 + ["closing_gracefully"], 5),
        (False, ["paused"] * 2, 1),
    ],
)
def test_an_elastic_session_waits_for_its_fewest_workers_only(monkeypatch, caplog, elastic, states, expected):
    """The others may join it later. A wait needs at least one worker, also if all are paused at the moment."""
    workers = {f"tcp://w{number}": {"status": status} for number, status in enumerate(states)}
    monkeypatch.setattr(open_session, "cluster_info", lambda client: {"workers": workers})
    awaited = []
    monkeypatch.setattr(open_session, "wait_for_workers", lambda client, n_workers, *_, **__: awaited.append(n_workers))
    losses = [worker_lost(["rank 1 (tcp://w1) has left the cluster and its partition is lost"], searched=False)]

    class Opening(OpenSession):
        def __init__(self):
            options = SimpleNamespace(elastic=elastic, min_workers=2, on_loss="replace")
            settings = SimpleNamespace(replacement_timeout=60)
            self.request = SimpleNamespace(options=options, former=None, settings=settings, choice=EVERY_WORKER)
            self.calls = SimpleNamespace(client=None)

        def _renew_id(self, **_):
            pass

        def _open(self):
            if losses:
                raise losses.pop()
            return "open"

    assert Opening()._open_repeatedly() == "open"
    assert awaited == [expected]
    [line] = caplog.messages
    assert line.endswith("opened again: rank 1 (tcp://w1) has left the cluster and its partition is lost")
