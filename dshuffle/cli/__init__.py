"""The ``dshuffle`` command.

``commands/`` has the arguments and the help of each command, which load with the command's name. The work of a command
is in a module beside this file, which loads when the command runs. So no ``--help`` loads Dask or numba.
"""

from __future__ import annotations

import difflib
import importlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from dshuffle.cli.option_names import NotingGroup, one_line
from dshuffle.errors import DShuffleError
from dshuffle.process_exit import end_without_last_collections

COMMANDS = {
    "advise": "Recommend a way of shuffling for a measured or described cluster.",
    "compare": "Train with several ways of shuffling and report the fastest.",
    "dataset": "Create, describe, shuffle, shard and verify datasets.",
    "doctor": "Check a cluster: versions, clocks, limits, disks, and the dataset.",
    "plan": "Count the packets of each delivery, without a cluster.",
    "run": "Run a pipeline from a Python file.",
    "warmup": "Compile all kernels, for an image or a shared home directory.",
}

MOVED = {"shard": "dataset shard", "simulate": "advise"}
"""Commands of earlier revisions, and what took their place."""


class LazyGroup(NotingGroup):
    """Command group that imports commands lazily and prints each error as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names of the commands without importing them."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of the command and return the command."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"dshuffle.cli.commands.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the command that took the place of an old one, or that a misspelled one resembles."""
        if args[0] in MOVED:
            raise click.UsageError(f"'dshuffle {args[0]}' is now 'dshuffle {MOVED[args[0]]}'.")
        if args[0] not in COMMANDS and (alike := difflib.get_close_matches(args[0], COMMANDS, 1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {alike[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with the help texts in :data:`COMMANDS`, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and turn each :class:`DShuffleError` into a one-line message."""
        try:
            with _ended_by_sigterm():
                return super().invoke(ctx)
        except DShuffleError as error:
            if os.environ.get("DSHUFFLE_DEBUG") == "1":
                raise
            raise one_line(error, ctx) from error


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End as after Ctrl-C when a batch system sends SIGTERM, so that temporary files are removed."""

    def end(number: int, frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # a second one must not end the tidying
        raise SystemExit(128 + number)

    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dshuffle")
def main() -> None:
    """Shuffle datasets between Dask workers every epoch, and find the fastest way to do so.

    Set DSHUFFLE_DEBUG=1 to see tracebacks.
    """


def script() -> None:
    """Run the command in a process that ends with it. Tests call :func:`main` in a process that goes on."""
    end_without_last_collections()
    main()
