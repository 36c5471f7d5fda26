"""Progress without a terminal: a line for each step, and further lines while a step takes long."""

from __future__ import annotations

import sys
import time
import types

from dshuffle.report import progress
from dshuffle.report.progress import progress_bar


def test_a_step_that_takes_long_is_said_again_and_ever_more_rarely(capsys, monkeypatch):
    monkeypatch.setattr(progress, "FIRST", 0.02)
    with progress_bar() as advance:
        advance(0, 3, "first")
        advance(1, 3, "second")
        time.sleep(0.4)
        advance(2, 3, "third")
    lines = capsys.readouterr().err.splitlines()
    assert [lines[0], lines[1], lines[-1]] == ["0/3 first", "1/3 second", "2/3 third"]
    again = lines[2:-1]
    assert all(line.startswith("1/3 second (") for line in again)
    assert 1 <= len(again) <= 5  # after 0.02, 0.06, 0.14 and 0.3 s on a quiet machine


def test_short_steps_are_said_once(capsys):
    with progress_bar() as advance:
        advance(0, 2, "first")
        advance(1, 2, "first")
        advance(2, 2, "second")
    assert capsys.readouterr().err.splitlines() == ["0/2 first", "2/2 second"]


def test_a_notebook_gets_a_bar(monkeypatch):
    """With a stand-in for IPython, in whose notebooks rich's console knows that it is in one."""
    shown = []

    class Handle:
        def update(self, html):
            shown.append(html)

    stand_in = types.SimpleNamespace(HTML=str, display=lambda html, display_id: Handle())
    monkeypatch.setitem(sys.modules, "IPython.display", stand_in)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with progress_bar() as advance:
        for done in range(100):
            advance(done, 100, "<first>")
        advance(100, 100, "<first>")
    assert 2 <= len(shown) < 50
    assert shown[-1].startswith('<progress value="100" max="100"></progress> 100/100 &lt;first&gt; (')
