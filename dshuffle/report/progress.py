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


EVERY, RARELY, FIRST_MINUTE = 5.0, 30.0, 60.0
"""Seconds between two lines without a terminal: in the first minute of a step, and after it."""


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
    """Progress as plain lines: each new text at once, its count every some seconds, and the last count."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._text, self._since = "", 0.0  # and when it was first printed
        self._counts = self._printed_counts = (0, 0)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._remind, name="dshuffle-progress", daemon=True)
        self._thread.start()

    def advance(self, done: int, total: int, text: str) -> None:
        with self._lock:
            if text != self._text:
                if total != self._counts[1]:
                    self._print_last()  # of the step before, which counted something else
                self._text, self._since = text, time.monotonic()
                self._counts = done, total
                self._print(text)
            self._counts = done, total

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._print_last()

    def _remind(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(EVERY / 10):
            with self._lock:
                now = time.monotonic()
                seconds = now - self._since
                pause = EVERY if seconds < FIRST_MINUTE else RARELY
                if self._text and now - max(last, self._since) >= pause:
                    last = now
                    self._print(f"{self._text} ({human_seconds(seconds)})")

    def _print_last(self) -> None:
        """Print the count of a step at its end, if it has changed since its last line."""
        if self._text and self._counts != self._printed_counts:
            self._print(self._text)

    def _print(self, text: str) -> None:
        done, total = self._printed_counts = self._counts
        self._console.print(f"{done}/{total} {text}", highlight=False, markup=False, soft_wrap=True)
