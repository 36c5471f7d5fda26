"""What the scheduler shows of sessions: the page of its dashboard, and the same for clients."""

from __future__ import annotations

import dataclasses
import re
import sys
import urllib.request

import numpy as np
import pytest
from distributed import Client, LocalCluster

from dshuffle import Shuffler, create_dataset
from dshuffle.records import Measures
from dshuffle.runtime.messages import EpochExchange, TrainingTime
from dshuffle.runtime.scheduler.snapshot import EpochFigures, Participant, SessionSnapshot

from ..conftest import OPTIONS

MEASURES = Measures(wire_sent_bytes=(0, 0), wire_received_bytes=(2_000_000, 3_000_000), server_sent_bytes=5_000_000)
EXCHANGE = EpochExchange(
    epoch=7,
    run_id=8,
    delivery="server",
    needed=0,
    packets=0,
    components=0,
    exchange_seconds=0.5,
    waited_seconds=0.25,
    measures=MEASURES,
    addresses={},
    training_before=None,
)
FIGURES = EpochFigures(exchange=EXCHANGE, training=None)
TRAINED = EpochFigures(
    exchange=dataclasses.replace(EXCHANGE, epoch=6), training=(TrainingTime(seconds=0.5), TrainingTime(seconds=2.0))
)
SNAPSHOT = SessionSnapshot(
    session_id="abc",
    way="global <&> server",
    n_samples=1000,
    row_nbytes=8,
    epoch=7,
    phase="waiting",
    waiting_for="a worker for <rank 1>",
    participants=(
        Participant(name="rank 0", address="tcp://a", state="ready", held=1250),
        Participant(name="rank 1", address="tcp://b", state="lost", held=1000),
        Participant(name="the server", address="tcp://c", state="ready"),
    ),
    epochs=(TRAINED, FIGURES),
    slow_rank="rank 1 trained <4.0> times as long",
)


def test_a_session_is_shown_with_its_participants():
    html = SNAPSHOT._repr_html_()
    assert "<b>global &lt;&amp;&gt; server</b>" in html
    assert "<td>epoch 7, waiting</td>" in html
    assert "<th>waiting</th><td>a worker for &lt;rank 1&gt;</td>" in html
    assert "<td>rank 1 trained &lt;4.0&gt; times as long</td>" in html
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", html)]
    assert [row for row in rows if len(row) == 8] == [
        ["rank 0", "tcp://a", "ready", "1,250", "500 ms", "2.00 MB", "0 B", "4.00 MB/s"],
        ["rank 1", "tcp://b", "lost", "1,000", "2.00 s", "3.00 MB", "0 B", "6.00 MB/s"],
        ["the server", "tcp://c", "ready", "", "", "-", "5.00 MB", "-"],
    ]
    assert "training 2.00 s, waiting 250 ms, exchange 500 ms (server)" in html
    widths = [float(width) for width in re.findall(r"width:([\d.]+)em", html)]
    assert widths == [10.67, 1.33, 1.33]  # of at most 12, for training and waiting
    before = dataclasses.replace(SNAPSHOT, epoch=None, epochs=(), waiting_for="", slow_rank="")._repr_html_()
    assert "<td>before its first epoch, waiting</td>" in before
    assert "<th>waiting</th>" not in before
    assert before.count("<td></td><td>-</td><td>-</td><td>-</td>") == 3


@pytest.fixture(scope="module")
def dashboard():
    """A cluster with a dashboard at a prefix, as behind a proxy, and where it is."""
    with (
        LocalCluster(
            n_workers=2,
            processes=False,
            dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"http_prefix": "/proxied"},
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client, f"http://127.0.0.1:{cluster.scheduler.http_server.port}/proxied"


def read(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


@pytest.mark.slow
def test_a_snapshot_says_what_records_say(dashboard, tmp_path):
    client, url = dashboard
    data = create_dataset(str(tmp_path / "d.zarr"), {"x": np.zeros((600, 3))})
    with Shuffler(client, data) as first, Shuffler(client, data, delivery="storage") as second:
        for shuffler in (first, second):
            for epoch in shuffler.epochs(3):
                client.gather(epoch.map(len))
        page = read(f"{url}/dshuffle")
        for shuffler in (first, second):
            found = shuffler._calls.ask(SessionSnapshot, "snapshot")
            assert (found.n_samples, found.row_nbytes, found.epoch) == (600, 24, 2)
            assert tuple(one.address for one in found.participants) == tuple(shuffler.addresses)
            assert f"<b>{shuffler.choices.label}</b>" in page
            for figures, record in zip(found.epochs, shuffler.records, strict=True):
                exchange = figures.exchange
                assert (exchange.epoch, exchange.exchange_seconds) == (record.epoch, record.exchange_seconds)
                assert exchange.measures.wire_received_bytes == record.wire_received_bytes
            # The last epoch's training is still going on for all that the scheduler knows.
            *trained, last = [one.training_seconds for one in found.epochs]
            assert last is None
            assert min(trained) > 0
    assert "No session is open" in read(f"{url}/dshuffle")
    assert '<a href="dshuffle">dshuffle</a>' in read(f"{url}/status")  # in the menu


@pytest.mark.slow
def test_a_page_that_cannot_be_added_does_not_stop_training(small, caplog, monkeypatch):
    """For instance because a later release of distributed has its dashboard elsewhere."""
    monkeypatch.setitem(sys.modules, "distributed.dashboard.scheduler", None)
    with (
        LocalCluster(n_workers=1, processes=False, **OPTIONS) as cluster,
        Client(cluster) as client,
    ):
        cluster.scheduler.http_application.applications.append(type("Dashboard", (), {"prefix": ""})())
        with Shuffler(client, small) as shuffler:
            [epoch] = shuffler.epochs(1)
            assert client.gather(epoch.map(len)) == [1000]
        cluster.scheduler.http_application.applications.pop()
    assert "could not be added to the dashboard" in caplog.text
