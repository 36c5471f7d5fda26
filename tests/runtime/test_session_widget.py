"""The live view of a session in a notebook, with a stand-in for IPython."""

import itertools
import sys
import threading
import time
import types

import numpy as np
import pytest

from dshuffle import InvalidParameter, Shuffler, create_dataset, watch


@pytest.fixture
def shown(monkeypatch):
    """What a notebook would show, one version after the other."""
    found = []

    class Handle:
        def update(self, html):
            found.append(html)

    def display(display_id):
        assert display_id
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
        assert "exchange" in shown[-1]
        assert repr(widget).startswith("<SessionWidget watches <Shuffler ")
    eventually(lambda: "closed Shuffler" in shown[-1])
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

    def late(_):
        asked.set()
        answered.wait(20)
        return "late"

    with Shuffler(threads, small) as shuffler:
        widget = watch(shuffler, seconds=0.1)
        monkeypatch.setattr("dshuffle.runtime.client.shuffler._asked", late)
        assert asked.wait(10)
        monkeypatch.setattr("dshuffle.runtime.client.shuffler.STOP_WITHIN", 0.2)
        began = time.monotonic()
        widget.stop()
        assert time.monotonic() - began < 5
        assert "late" not in str(shown)
        answered.set()
        widget.stop()
    assert "late" in shown[-1]


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
