"""Progress: a live bar on a terminal and in a notebook, plain lines on standard error elsewhere."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dshuffle.units import human_seconds

Advance = Callable[[int, int, str], None]


FIRST, MOST = 3.0, 60.0
"""Without a terminal, seconds after which a line says that a step is still going on, and the most between two lines."""


@contextmanager
def progress_bar() -> Iterator[Advance]:
    """Yield ``advance(done, total, text)``; without a terminal or a notebook, it prints lines."""
    console = Console(stderr=True)
    if console.is_jupyter:
        yield _Notebook().advance
        return
    if not console.is_terminal:
        lines = _Lines(console)
        try:
            yield lines.advance
        finally:
            lines.close()
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)


class _Notebook:
    """Progress as a bar in the output of a cell. Rich's own bar would need ipywidgets."""

    def __init__(self) -> None:
        self._display = importlib.import_module("IPython.display")
        self._handle = self._display.display(self._display.HTML(""), display_id=True)
        self._started = time.monotonic()
        self._shown = ("", 0.0)

    def advance(self, done: int, total: int, text: str) -> None:
        now = time.monotonic()
        if done < total and text == self._shown[0] and now - self._shown[1] < 0.1:
            return
        self._shown = text, now
        seconds = human_seconds(now - self._started)
        bar = f'<progress value="{done}" max="{max(1, total)}"></progress> {done}/{total} {escape(text)} ({seconds})'
        self._handle.update(self._display.HTML(bar))


class _Lines:
    """Progress as plain lines: each new text at once, and then ever more rarely how long it takes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said = ("", 0.0)  # the text, and when it was first said
        self._counts = (0, 0)
        self._news = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._remind, name="dshuffle-progress", daemon=True)
        self._thread.start()

    def advance(self, done: int, total: int, text: str) -> None:
        self._counts = done, total
        if text != self._said[0]:
            self._said = text, time.monotonic()
            self._print(text)
            self._news.set()

    def close(self) -> None:
        self._closed = True
        self._news.set()
        self._thread.join()

    def _remind(self) -> None:
        seconds = FIRST
        while not self._closed:
            if self._news.wait(seconds):
                self._news.clear()
                seconds = FIRST
            elif self._said[0]:
                text, since = self._said
                self._print(f"{text} ({human_seconds(time.monotonic() - since)})")
                seconds = min(2 * seconds, MOST)

    def _print(self, text: str) -> None:
        done, total = self._counts
        self._console.print(f"{done}/{total} {text}", highlight=False, markup=False)
