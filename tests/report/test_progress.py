"""Progress without a terminal: a line for each step, its end, and further lines while a step takes long."""

from __future__ import annotations

import pytest

from dshuffle.report import progress
from dshuffle.report.progress import progress_bar


@pytest.mark.parametrize(("seconds", "more"), [(60.0, []), (0.0, ["2/3 second", "3/4 second"])])
def test_steps_are_said_once_and_again_if_they_take_long(capsys, monkeypatch, seconds, more):
    monkeypatch.setattr(progress, "EVERY", seconds)
    with progress_bar() as advance:
        advance(0, 3, "first")
        for done, total in ((1, 3), (2, 3), (3, 4)):
            advance(done, total, "second")
        advance(2, 3, "third")
        advance(3, 3, "third")
    assert capsys.readouterr().err.splitlines() == ["0/3 first", "1/3 second", *more, "2/3 third", "3/3 third"]
