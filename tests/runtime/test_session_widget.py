"""The live view of a session in a notebook, with a stand-in for IPython."""

import re
import sys
import threading
import time
import types

import numpy as np
import pytest

from dshuffle import InvalidParameter, Shuffler, create_dataset, watch
from dshuffle.runtime.client.session_widget import session_html
from dshuffle.runtime.scheduler.snapshot import EpochFigures, LinkFigures, Participant, SessionSnapshot


@pytest.fixture
def shown(monkeypatch):
    """What a notebook would show, one version after the other."""
    found = []

    class Handle:
        def update(self, html):
            found.append(html)

    def display(html, display_id):
        assert display_id
        found.append(html)
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(HTML=str, display=display))
    return found


def test_everything_that_is_known_of_a_session_is_shown():
    epoch = EpochFigures(
        epoch=3,
        delivery="peer",
        exchange_seconds=0.5,
        waited_seconds=0.25,
        training_seconds=0.75,
        sent_bytes=(10, 20),
        received_bytes=(20, 10),
        server_sent_bytes=0,
        store_bytes=0,
    )
    links = [
        LinkFigures(receiver=f"rank {to}", sender=by, nbytes=5000, seconds=0.5)
        for to, by in ((0, "the server"), (0, "rank 10"), (0, "rank 2"), (10, "rank 0"))
    ]
    session = SessionSnapshot(
        session_id="id",
        way="global <&> peer",
        n_samples=1000,
        row_nbytes=8,
        epoch=3,
        phase="exchanging",
        waiting_for="rank 1 <lost>",
        participants=(
            Participant(name="rank 0", address="tcp://a", state="ready", held=1500),
            Participant(name="the server", address="tcp://c", state="ready"),
        ),
        epochs=(epoch,),
        links=tuple(links),
    )
    html = session_html(session)
    assert "<b>global &lt;&amp;&gt; peer</b>" in html
    assert "rank 1 &lt;lost&gt;" in html
    assert "<td>tcp://a</td><td>ready</td><td>1,500</td>" in html
    assert "training 750 ms, waiting 250 ms, exchange 500 ms (peer)" in html
    assert [float(width) for width in re.findall(r"width:([\d.]+)em", html)] == [9.0, 3.0]  # three to one
    # Ranks by number, the server last; a pair that exchanged nothing has no figures.
    head = "".join(f"<th>{name}</th>" for name in ("received by, from", "rank 0", "rank 2", "rank 10", "the server"))
    assert head in html
    assert "<td>rank 0</td><td></td><td>5.00 kB (10.0 kB/s)</td>" in html
    assert html.count("<table") == html.count("</table>")


@pytest.mark.slow
def test_a_session_is_watched_until_it_is_closed(threads, tmp_path, shown, eventually):
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": np.zeros((600, 3))})
    with pytest.raises(InvalidParameter, match=r"seconds=0 .*>= 0\.1"):
        watch(None, seconds=0)
    with Shuffler(threads, dataset) as shuffler:
        widget = watch(shuffler, seconds=0.1)
        for epoch in shuffler.epochs(3):
            threads.gather(epoch.map(len))
        eventually(lambda: "epoch</th><td>2, idle" in shown[-1])
        assert f"<td>{600 // shuffler.n_workers}</td>" in shown[-1]
        assert "received by, from" in shown[-1]
        assert repr(widget).startswith("<SessionWidget watches <Shuffler ")
    eventually(lambda: "Closed shuffler" in shown[-1])
    eventually(lambda: repr(widget).startswith("<SessionWidget stopped "))
    before = len(shown)
    widget.stop()
    assert len(shown) == before
    with Shuffler(threads, dataset) as shuffler:
        stopped = watch(shuffler, seconds=30)
        stopped.stop()  # at once
        assert "epoch</th><td>-1, idle" in shown[-1] or "epoch</th><td>0" in shown[-1]


def test_a_widget_stops_although_the_scheduler_does_not_answer(threads, small, shown, monkeypatch):
    asked, answered = threading.Event(), threading.Event()

    def snapshot(_):
        asked.set()
        answered.wait(20)
        return "late"

    with Shuffler(threads, small) as shuffler:
        widget = watch(shuffler, seconds=0.1)
        monkeypatch.setattr("dshuffle.runtime.client.session_widget._html", snapshot)
        assert asked.wait(10)
        monkeypatch.setattr("dshuffle.runtime.client.session_widget.STOP_WITHIN", 0.2)
        began = time.monotonic()
        widget.stop()
        assert time.monotonic() - began < 5
        assert "late" not in shown
        answered.set()
        widget.stop()
    assert shown[-1] == "late"
