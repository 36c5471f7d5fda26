"""Output that several commands share: lines of text, and what warns."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from dshuffle.errors import ShardingWarning
from dshuffle.units import NO_BREAK, kept_together

COLUMNS = 80
"""Length of a line of text."""


def say(text: str) -> None:
    """Print lines of text beside the result. None ends between a number and its unit."""
    click.echo(wrapped(text), err=True)


def wrapped(text: str, width: int = COLUMNS) -> str:
    """Lines of text of at most this width. None ends between a number and its unit."""
    return click.wrap_text(kept_together(text), width).replace(NO_BREAK, " ")


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print each distinct :class:`ShardingWarning` once, as one line; show all other warnings as usual."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ShardingWarning)
        yield
    for text in dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, ShardingWarning)):
        click.echo(f"warning: {text}", err=True)
    for one in caught:
        if not issubclass(one.category, ShardingWarning):
            warnings.showwarning(one.message, one.category, one.filename, one.lineno)


def say_if_replaced(folder: Path, option: str) -> None:
    """Say that a run will replace the report of an earlier one, if there is one."""
    if (folder / "report.html").exists():
        say(f"This run replaces the report in {folder}. {option} names another folder.")


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage().removeprefix("dshuffle: "))


@contextmanager
def logged_as_lines(logger: logging.Logger) -> Iterator[None]:
    """Print what a logger says."""
    level, handler = logger.level, _Lines()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = True
        logger.removeHandler(handler)
        logger.setLevel(level)
