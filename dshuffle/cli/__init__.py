"""The ``dshuffle`` command. The module of a command loads what does its work when it runs."""

from __future__ import annotations

import difflib
import importlib
import signal
from typing import NoReturn

import click

from dshuffle.process_exit import end_without_last_collections

COMMANDS = {
    "advise": "Recommend a strategy for a measured or described cluster.",
    "compare": "Train with several strategies and report the fastest.",
    "dataset": "Create, describe, shuffle and verify datasets.",
    "doctor": "Check a cluster: versions, clocks, limits, disks, and the dataset.",
    "run": "Run a pipeline from a Python file.",
    "warmup": "Compile all kernels, for an image or a shared home directory.",
}


class LazyGroup(click.Group):
    """Command group that imports a command when it is used or its help is shown."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names of the commands without importing them."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of the command and return the command."""
        if cmd_name not in COMMANDS:
            if alike := difflib.get_close_matches(cmd_name, COMMANDS, 1):
                ctx.fail(f"No such command {cmd_name!r}. Did you mean {alike[0]!r}?")
            return None
        module = "doctor" if cmd_name == "warmup" else cmd_name
        command = getattr(importlib.import_module(f"dshuffle.cli.{module}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with the help texts in :data:`COMMANDS`, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group("dshuffle", cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dshuffle")
def main() -> None:
    """Shuffle datasets between Dask workers every epoch, and find the fastest strategy to do so.

    Set DSHUFFLE_DEBUG=1 to see tracebacks.
    """


def script() -> None:
    """Run the command in a process that ends with it. Tests call :func:`main` in a process that goes on."""
    end_without_last_collections()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
    main()


def _end(number: int, frame: object) -> NoReturn:
    """End as after Ctrl-C when a batch system sends SIGTERM, so that temporary files are removed."""
    signal.signal(number, signal.SIG_IGN)  # a second one must not end the tidying
    raise SystemExit(128 + number)
