"""The ``dshuffle`` command. What a command needs is loaded when it runs: ``--help`` must not load Dask."""

from __future__ import annotations

import importlib
import os
from typing import Any

import click

from dshuffle.errors import DShuffleError

COMMANDS = {
    "advise": ("dshuffle.cli.advise", "Measure a cluster and say which way of shuffling suits it."),
    "compare": (
        "dshuffle.cli.compare",
        "Train under several ways of shuffling and say which is the fastest.",
    ),
    "dataset": ("dshuffle.cli.dataset", "Create, describe and verify datasets."),
    "plan": ("dshuffle.cli.plan", "Count the packets that each delivery needs, without a cluster."),
    "shard": (
        "dshuffle.cli.shard",
        "Decide offline which worker starts with which samples: by class or by neighbourhood.",
    ),
    "simulate": ("dshuffle.cli.simulate", "Predict every way of shuffling on a cluster that you do not have."),
}


class LazyGroup(click.Group):
    """A group whose commands live in modules of their own, and whose errors are one line each."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, without loading anything."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load the command's module."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the short texts above, without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in sorted(COMMANDS.items())])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what dshuffle raises on purpose is a line for the user, not a traceback."""
        try:
            return super().invoke(ctx)
        except DShuffleError as error:
            if os.environ.get("DSHUFFLE_DEBUG") == "1":
                raise
            raise click.ClickException(str(error)) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dshuffle")
def main() -> None:
    """Shuffle datasets between Dask workers every epoch, and find the fastest way of doing so.

    DSHUFFLE_DEBUG=1 shows tracebacks.
    """
