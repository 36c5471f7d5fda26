"""Errors of the library in the words of the command line: the option in place of the parameter."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import click
from click.core import ParameterSource

from dshuffle.errors import DShuffleError, InvalidParameter

COMMAND = "dshuffle.command"
"""Key of the command that runs, in click's metadata of the context."""

OPTIONS = {
    "files": "from",
    "fit": "train",
    "folder": "from-folder",
    "memory_budget": "memory",
    "n_samples": "samples",
    "n_workers": "workers",
    "names": "array",
    "per_row": "entries-per-row",
    "per_user": "ratings-per-user",
    "prices.egress": "egress-price",
    "prices.requests": "request-price",
    "prices.worker_egress": "worker-egress-price",
    "size": "image-size",
}
"""Parameters whose option has another name. All others have their own name, with hyphens."""

_SUBJECT = re.compile(r"(?P<name>[a-z_.]+)(?==| is not allowed| is needed)")

_ADVICE = re.compile(
    r"\b(?P<words>Give|Leave|Set|Use|larger|smaller|higher|lower) (?P<name>[a-z]+(?:_[a-z]+)+)\b(?![='\"/]|\.\w)"
)
"""A parameter in a hint, after words that only stand before parameters. Other words may be names of the user."""

_OVERWRITE = " with overwrite=True"
"""How an error ends that advises this."""


class NotingGroup(click.Group):
    """Command group that notes which command runs, so that an error can name its options."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, and note it."""
        name, command, rest = super().resolve_command(ctx, args)
        ctx.meta[COMMAND] = command
        return name, command, rest


def first_option(ctx: click.Context, names: Iterable[str]) -> str | None:
    """Return the first of several options that is on the command line.

    Parameters
    ----------
    names
        Names of their parameters.
    """
    for name in names:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            return next(parameter.opts[0] for parameter in ctx.command.params if parameter.name == name)
    return None


def one_line(error: DShuffleError, ctx: click.Context) -> click.ClickException:
    """The error as one line that names the option, if the command that runs has one for the parameter.

    Examples
    --------
    >>> from dshuffle.errors import InvalidParameter
    >>> context = click.Context(click.Command("shuffle", params=[click.Option(["--memory"])]))
    >>> context.meta[COMMAND] = context.command
    >>> one_line(InvalidParameter.of("memory_budget", "much", "a number of bytes"), context).message
    "--memory='much' is not allowed; it must be a number of bytes"
    """
    text, command = str(error), ctx.meta.get(COMMAND)
    if command is not None:
        hint = error.hint if isinstance(error, InvalidParameter) else ""
        text = text.removesuffix(hint)
        if (match := _SUBJECT.match(text)) and (option := _option(command, match["name"])):
            text = option + text[match.end() :]
        text += _ADVICE.sub(lambda match: f"{match['words']} {_option(command, match['name']) or match['name']}", hint)
    if text.endswith(_OVERWRITE):
        # It is an option of the commands that write datasets, and any command may say that one has to be written again.
        text = text.removesuffix(_OVERWRITE) + " with --overwrite"
    return click.ClickException(text)


def _option(command: Any, name: str) -> str:
    option = "--" + OPTIONS.get(name, name).replace("_", "-")
    return option if any(option in parameter.opts for parameter in command.params) else ""
