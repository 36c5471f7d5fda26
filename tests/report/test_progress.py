"""Progress without a terminal: a line for each step, and further lines while a step takes long."""

from __future__ import annotations

from dshuffle.report import progress
from dshuffle.report.progress import progress_bar


def test_a_step_that_takes_long_is_said_again_with_its_count(capsys, monkeypatch, eventually):
    monkeypatch.setattr(progress, "EVERY", 0.01)
    printed = []

    def reminded():
        printed.extend(capsys.readouterr().err.splitlines())
        return any(line.startswith("2/3 second (") for line in printed)

    with progress_bar() as advance:
        advance(0, 3, "first")
        advance(1, 3, "second")
        advance(2, 3, "second")
        eventually(reminded)
        advance(2, 3, "third")
        advance(3, 3, "third")
    printed += capsys.readouterr().err.splitlines()
    assert [line for line in printed if "(" not in line] == ["0/3 first", "1/3 second", "2/3 third", "3/3 third"]


def test_short_steps_are_said_once_and_the_last_count_of_each(capsys):
    with progress_bar() as advance:
        for done in range(1, 76):
            advance(done, 75, "rows read")
        advance(1, 2, "blocks written")
        advance(2, 2, "marked")
    assert capsys.readouterr().err.splitlines() == [
        "1/75 rows read",
        "75/75 rows read",
        "1/2 blocks written",
        "2/2 marked",
    ]
