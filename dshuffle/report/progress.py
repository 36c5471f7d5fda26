"""Progress: a live bar on a terminal, plain lines on standard error elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dshuffle.units import human_seconds

Advance = Callable[[int, int, str], None]


EVERY = 5.0
"""Seconds between two lines without a terminal, or a tenth of a step that takes long."""


@contextmanager
def progress_bar() -> Iterator[Advance]:
    """Yield ``advance(done, total, text)``; without a terminal, such as in a notebook, it prints lines."""
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = _Lines(console)
        try:
            yield lines.advance
        finally:
            lines.close()
        return
    text = TextColumn("{task.description}", markup=False)
    with Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)


class _Lines:
    """Progress as plain lines: each new text at once, its count every some seconds, and the last count."""

    def __init__(self, console: Console) -> None:
        self._console, self._lock, self._closed = console, threading.Lock(), threading.Event()
        self._text, self._since, self._counts, self._printed = "", 0.0, (0, 0), (0, 0)
        self._thread = threading.Thread(target=self._remind, name="dshuffle-progress", daemon=True)
        self._thread.start()

    def advance(self, done: int, total: int, text: str) -> None:
        with self._lock:
            if text != self._text:
                if total != self._counts[1]:
                    self._print_last()  # of the step before, which counted something else
                self._text, self._since, self._counts = text, time.monotonic(), (done, total)
                self._print()
            self._counts = done, total

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._print_last()

    def _remind(self) -> None:
        last = 0.0
        while not self._closed.wait(EVERY / 10):
            with self._lock:
                now = time.monotonic()
                if self._text and now - max(last, self._since) >= max(EVERY, (now - self._since) / 10):
                    last = now
                    self._print(f" ({human_seconds(now - self._since)})")

    def _print_last(self) -> None:
        """Print the count of a step at its end, if it has changed since its last line."""
        if self._counts != self._printed:
            self._print()

    def _print(self, more: str = "") -> None:
        done, total = self._printed = self._counts
        self._console.print(f"{done}/{total} {self._text}{more}", highlight=False, markup=False, soft_wrap=True)
