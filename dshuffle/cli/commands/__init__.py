"""Arguments and help of the commands. A command loads the module that does its work when it runs."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import click

ERASE_LINE = "\r\x1b[K"


def work_of(command: str) -> ModuleType:
    """Import the module that does the work of a command. A terminal shows a line meanwhile: it can take seconds."""
    shows = sys.stderr.isatty()
    if shows:
        click.echo("dshuffle is being loaded ...", nl=False, err=True)
    try:
        return importlib.import_module(f"dshuffle.cli.{command}")
    finally:
        if shows:
            click.echo(ERASE_LINE, nl=False, err=True)
