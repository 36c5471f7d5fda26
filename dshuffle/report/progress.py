"""Progress: a live bar on a terminal, plain lines on standard error elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Advance = Callable[[int, int, str], None]

EVERY = 5.0
"""Least number of seconds between two lines of one step without a terminal."""


@contextmanager
def progress_bar() -> Iterator[Advance]:
    """Yield ``advance(done, total, text)``; without a terminal, such as in a notebook, it prints lines.

    A line tells of a new text, of the end, or that a step takes long.
    """
    console, said, at = Console(stderr=True), ("", 0), 0.0

    def in_lines(done: int, total: int, text: str) -> None:
        nonlocal said, at
        is_late = time.monotonic() >= at + EVERY
        if (text, done) != said and (text != said[0] or done == total or is_late):
            said, at = (text, done), time.monotonic()
            console.print(f"{done}/{total} {text}", highlight=False, markup=False, soft_wrap=True)

    if not console.is_terminal:
        yield in_lines
        return
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)
