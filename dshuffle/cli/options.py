"""What commands share: options, errors of the library in the words of the command line, and lines of text.

A command loads the modules that do its work when it runs, so that ``--help`` is fast. So the names that planning
registers are repeated here for the help, and a test compares them.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from dshuffle.errors import DShuffleError, InvalidParameter, ShardingWarning
from dshuffle.units import NO_BREAK, kept_together

ASSIGNMENTS = "local, partial:Q (Q in [0, 1]), global, aligned, chunks or chunks:ROWS (an integer >= 1)"
DELIVERIES = "peer, server, storage, clique, ubershuffle, coded, leftover or auto"


TABLE: dict[str, dict[str, Any]] = {
    "assignment": {"multiple": True, "help": f"{ASSIGNMENTS}. May be repeated."},
    "delivery": {"multiple": True, "help": f"{DELIVERIES}. May be repeated."},
    "choice": {
        "multiple": True,
        "metavar": "NAME=VALUE",
        "help": "Another choice of every strategy: caching, relay, sharding, balance, every, between or seed. relay "
        "and every may be repeated, to compare their values.",
    },
    "cache-fraction": {"type": float, "help": "Fraction of the dataset that each worker holds.  [default: its share]"},
    "samples": {"type": click.IntRange(1), "help": "Number of samples."},
    "row-bytes": {
        "type": click.IntRange(1),
        "default": 1024,
        "show_default": True,
        "help": "Bytes per sample, if DATASET is omitted.",
    },
    "features": {"default": "x", "show_default": True, "help": "Name of the 2-D array of features."},
    "target": {"default": "y", "show_default": True, "help": "Name of the 1-D array of targets."},
    "chunk-rows": {"type": click.IntRange(1), "help": "Samples per chunk.  [default: chunks of about 4 MiB]"},
    "overwrite": {"is_flag": True, "help": "Replace an existing dataset at URL."},
    "scheduler": {"metavar": "ADDRESS", "help": "Address of a running Dask scheduler, whose workers are used."},
    "workers": {"type": click.IntRange(1), "show_default": True, "help": "Number of workers that train."},
    "json": {"is_flag": True, "help": "Print JSON instead of text."},
}
"""What the shared options are: their type, metavar, default and help."""

Decorated = Callable[..., Any]


def shared(*names: str, **changes: Any) -> Callable[[Decorated], Decorated]:
    """Add options of the table to a command. ``changes`` go before what the table says of the one that is named."""

    def add(function: Decorated) -> Decorated:
        for name in reversed(names):
            parameter = ["as_json"] if name == "json" else []  # "json" is a module
            function = click.option(f"--{name}", *parameter, **{**TABLE[name], **changes})(function)
        return function

    return add


OPTIONS = {
    "assignments": "assignment",
    "files": "from",
    "fit": "train",
    "folder": "from-folder",
    "memory_budget": "memory",
    "n_samples": "samples",
    "n_workers": "workers",
    "names": "array",
    "size": "image-size",
}
"""Parameters of the library whose option has another name. All others have their own name, with hyphens."""

_SUBJECT = re.compile(r"(?P<name>[a-z_.]+)(?==| is not allowed| is needed)")

_OVERWRITE = " with overwrite=True"
"""How an error ends that advises this."""


class Command(click.Command):
    """A command that prints each :class:`DShuffleError` as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except DShuffleError as error:
            if os.environ.get("DSHUFFLE_DEBUG") == "1":
                raise
            raise one_line(error, self) from error


def one_line(error: DShuffleError, command: click.Command) -> click.ClickException:
    """The error as one line that names the option, if the command has one for the parameter."""
    text, hint = str(error), error.hint if isinstance(error, InvalidParameter) else ""
    if match := _SUBJECT.match(text):
        name = match["name"]
        option = "--" + OPTIONS.get(name, name).replace("_", "-")
        if any(option in parameter.opts for parameter in command.params):
            text = option + text.removesuffix(hint)[match.end() :] + re.sub(rf"\b{name}\b", option, hint)
    if text.endswith(_OVERWRITE):
        # It is an option of the commands that write datasets, and any command may say that one has to be written again.
        text = text.removesuffix(_OVERWRITE) + " with --overwrite"
    return click.ClickException(text)


def first_given(ctx: click.Context, *names: str) -> str | None:
    """The first of these parameters that is on the command line, as its option."""
    for parameter in ctx.command.params:
        if parameter.name in names and ctx.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            return parameter.opts[0]
    return None


def say(text: str) -> None:
    """Print lines of text beside the result. None ends between a number and its unit."""
    click.echo(click.wrap_text(kept_together(text), 80).replace(NO_BREAK, " "), err=True)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print each warning as one line, and each distinct :class:`ShardingWarning` once."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: click.echo(f"warning: {message}", err=True)
        warnings.simplefilter("once", ShardingWarning)
        yield


def say_if_replaced(folder: Path, option: str) -> None:
    """Say that a run will replace the report of an earlier one, if there is one."""
    if (folder / "report.html").exists():
        say(f"This run replaces the report in {folder}. {option} names another folder.")
