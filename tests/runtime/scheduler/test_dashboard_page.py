"""What the scheduler shows of sessions: the page of its dashboard, the same as JSON, and counters for Prometheus."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import urllib.request
from urllib.error import HTTPError

import numpy as np
import pytest
from distributed import Client, LocalCluster

from dshuffle import Shuffler, create_dataset
from dshuffle.runtime.scheduler.snapshot import EpochFigures, LinkFigures, Participant, SessionSnapshot

from ..conftest import OPTIONS

FIGURES = EpochFigures(
    epoch=7,
    delivery="server",
    exchange_seconds=0.5,
    waited_seconds=0.25,
    training_seconds=None,
    sent_bytes=(0, 0),
    received_bytes=(2_000_000, 3_000_000),
    server_sent_bytes=5_000_000,
    store_bytes=0,
    rank_training_seconds=(0.5, 2.0),
)
TRAINED = dataclasses.replace(FIGURES, epoch=6, training_seconds=0.75)
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
    epochs=(FIGURES,),
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
    assert "received by, from" not in html
    before = dataclasses.replace(SNAPSHOT, epoch=None, epochs=(), waiting_for="", slow_rank="")._repr_html_()
    assert "<td>before its first epoch, waiting</td>" in before
    assert "<th>waiting</th>" not in before
    assert before.count("<td></td><td>-</td><td>-</td><td>-</td>") == 3


def test_times_of_epochs_are_bars():
    html = dataclasses.replace(SNAPSHOT, epochs=(FIGURES, TRAINED))._repr_html_()
    assert "training 750 ms, waiting 250 ms, exchange 500 ms (server)" in html
    assert [float(width) for width in re.findall(r"width:([\d.]+)em", html)] == [3.0, 9.0, 3.0]  # of at most 12


def test_the_links_of_the_last_exchange_are_shown():
    links = (
        LinkFigures(receiver="rank 0", sender="the server", nbytes=2_000_000, seconds=0.5),
        LinkFigures(receiver="rank 1", sender="rank 0", nbytes=3_000_000, seconds=0.0),
    )
    html = dataclasses.replace(SNAPSHOT, links=links)._repr_html_()
    head = "".join(f"<th>{name}</th>" for name in ("received by, from", "rank 0", "rank 1", "the server"))
    assert head in html
    found = re.findall(r'<td style="background:rgba\(0,114,178,([\d.]+)\)" title="(.*?)">(.*?)</td>', html)
    assert found == [
        ("0.60", "rank 0 from the server: 2.00 MB (4.00 MB/s)", "2.00 MB (4.00 MB/s)"),
        ("0.00", "rank 1 from rank 0: 3.00 MB (0 B/s)", "3.00 MB (0 B/s)"),
    ]
    assert "<td>rank 0</td><td></td><td></td><td style" in html
    assert html.count("<table") == html.count("</table>") == 4


@pytest.mark.parametrize("delivery", ["peer", "server", "storage"])
def test_links_have_what_crossed_the_network(threads, small, check_ids, delivery):
    port = threads.run_on_scheduler(lambda dask_scheduler: dask_scheduler.http_server.port)
    with Shuffler(threads, small, delivery=delivery) as shuffler:
        for epoch in shuffler.epochs(2):
            threads.gather(epoch.map(check_ids))
        [session] = json.loads(read(f"http://127.0.0.1:{port}/dshuffle.json"))
    received = dict.fromkeys(range(5), 0)
    for link in session["links"]:
        received[int(link["receiver"].removeprefix("rank "))] += link["nbytes"]
        assert link["seconds"] > 0
    assert tuple(received.values()) == shuffler.records[-1].wire_received_bytes
    senders = {link["sender"] for link in session["links"]}
    assert (
        senders == {"peer": {f"rank {rank}" for rank in range(5)}, "server": {"the server"}, "storage": set()}[delivery]
    )


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
def test_json_says_what_records_say(dashboard, tmp_path):
    client, url = dashboard
    data = create_dataset(str(tmp_path / "d.zarr"), {"x": np.zeros((600, 3))})
    with Shuffler(client, data) as first, Shuffler(client, data, delivery="storage") as second:
        for shuffler in (first, second):
            for epoch in shuffler.epochs(3):
                client.gather(epoch.map(len))
        sessions = {one["way"]: one for one in json.loads(read(f"{url}/dshuffle.json"))}
        assert sessions.keys() == {"global + peer", "global + storage"}
        for shuffler in (first, second):
            found = sessions[shuffler.choices.label]
            assert (found["n_samples"], found["row_nbytes"], found["epoch"]) == (600, 24, 2)
            assert [one["address"] for one in found["participants"]] == list(shuffler.addresses)
            for figures, record in zip(found["epochs"], shuffler.records, strict=True):
                assert figures["epoch"] == record.epoch
                assert figures["exchange_seconds"] == record.exchange_seconds
                assert tuple(figures["received_bytes"]) == record.wire_received_bytes
                assert figures["store_bytes"] == record.store_bytes
            # The last epoch's training is still going on for all that the scheduler knows.
            trained = [one["training_seconds"] for one in found["epochs"]]
            assert trained[-1] is None
            assert min(trained[:-1]) > 0
    assert json.loads(read(f"{url}/dshuffle.json")) == []
    assert "No session is open" in read(f"{url}/dshuffle")
    assert '<a href="dshuffle">dshuffle</a>' in read(f"{url}/status")  # in the menu


@pytest.mark.slow
def test_without_a_dashboard_there_is_json_and_no_page(threads, small):
    port = threads.run_on_scheduler(lambda dask_scheduler: dask_scheduler.http_server.port)
    with Shuffler(threads, small) as shuffler:
        next(shuffler.epochs(1))
        [session] = json.loads(read(f"http://127.0.0.1:{port}/dshuffle.json"))
        assert session["epoch"] == 0
        with pytest.raises(HTTPError, match="404"):
            read(f"http://127.0.0.1:{port}/dshuffle")


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
