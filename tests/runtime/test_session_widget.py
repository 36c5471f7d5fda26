"""The live view of a session in a notebook, with a stand-in for IPython."""

import dataclasses
import itertools
import sys
import threading
import time
import types

import numpy as np
import pytest

from dshuffle import InvalidParameter, Shuffler, create_dataset, watch
from dshuffle.runtime.client import session_widget
from dshuffle.runtime.client.session_widget import TextView
from dshuffle.runtime.scheduler.snapshot import SessionSnapshot


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

    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(HTML=str, display=display))
    return found


@pytest.mark.slow
def test_a_session_is_watched_until_it_is_closed(threads, tmp_path, shown, eventually):
    dataset = create_dataset(str(tmp_path / "d.zarr"), {"x": np.zeros((600, 3))})
    with pytest.raises(InvalidParameter, match=r"seconds=0 .*>= 0\.1"):
        watch(None, seconds=0)
    with Shuffler(threads, dataset) as shuffler:
        widget = watch(shuffler, seconds=0.1)
        for epoch in shuffler.epochs(3):
            threads.gather(epoch.map(len))
        eventually(lambda: "now</th><td>epoch 2, idle" in shown[-1])
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
        assert "<td>before its first epoch, " in shown[-1]


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


def test_a_script_gets_lines_of_text(threads, small, capsys, eventually):
    with Shuffler(threads, small) as shuffler:
        widget = watch(shuffler, seconds=0.1)
        for epoch in shuffler.epochs(2):
            threads.gather(epoch.map(len))
        texts = []
        eventually(
            lambda: texts.append(capsys.readouterr().err) or "epoch 1, idle; epoch 0: training" in "".join(texts)
        )
        assert repr(widget).startswith("<SessionWidget watches <Shuffler ")
    eventually(lambda: texts.append(capsys.readouterr().err) or "<closed Shuffler" in "".join(texts))
    lines = "".join(texts).splitlines()
    assert lines[0].startswith("global + peer: before its first epoch, ")
    assert all(line != following for line, following in itertools.pairwise(lines))
    widget.stop()


def test_lines_about_one_phase_have_a_distance(capsys, monkeypatch):
    """The percentages of an exchange change at every look."""
    session = SessionSnapshot(
        session_id="id",
        way="peer",
        n_samples=10,
        row_nbytes=8,
        epoch=3,
        phase="exchanging",
        waiting_for="rank 1 has 0%",
        participants=(),
        epochs=(),
    )

    def look(**changes):
        nonlocal session
        session = dataclasses.replace(session, **changes)
        view.update(shuffler)
        return capsys.readouterr().err

    shuffler = types.SimpleNamespace(closed=False, _calls=types.SimpleNamespace(ask=lambda *_: session))
    view = TextView(shuffler)
    assert capsys.readouterr().err == "peer: epoch 3, exchanging, rank 1 has 0%\n"
    assert [look(waiting_for=f"rank 1 has {part}%") for part in range(10, 50, 10)] == [""] * 4
    assert look(phase="committing", waiting_for="rank 1") == "peer: epoch 3, committing, rank 1\n"
    assert look(epoch=4) == "peer: epoch 4, committing, rank 1\n"
    assert look(waiting_for="rank 2") == ""
    monkeypatch.setattr(session_widget, "LINE_EVERY", 0.0)
    assert look() == "peer: epoch 4, committing, rank 2\n"
    assert look() == ""
