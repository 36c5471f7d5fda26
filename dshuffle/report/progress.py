"""Progress on standard error: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Advance = Callable[[int, int, str], None]


@contextmanager
def progress_bar() -> Iterator[Advance]:
    """Yield ``advance(done, total, text)``; without a terminal, it prints one line for each new text."""
    console = Console(stderr=True)
    if not console.is_terminal:
        said = ""

        def say(done: int, total: int, text: str) -> None:
            nonlocal said
            if text != said:
                console.print(f"{done}/{total} {text}", highlight=False, markup=False)
                said = text

        yield say
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
