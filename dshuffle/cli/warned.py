"""Warnings as users of commands read them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import click

from dshuffle.errors import ShardingWarning


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print our own warnings as lines for the user, each once, and let all others go their way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ShardingWarning)
        yield
    told: set[str] = set()
    for warning in caught:
        if not issubclass(warning.category, ShardingWarning):
            warnings.showwarning(warning.message, warning.category, warning.filename, warning.lineno)
        elif str(warning.message) not in told:
            told.add(str(warning.message))
            click.echo(f"warning: {warning.message}", err=True)
