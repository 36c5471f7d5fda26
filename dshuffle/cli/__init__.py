"""The ``dshuffle`` command. The function of a command loads what does its work when it runs."""

from __future__ import annotations

import signal
from typing import NoReturn

import click

from dshuffle.cli import advise, compare, dataset, run
from dshuffle.process_exit import end_without_last_collections


@click.group("dshuffle", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dshuffle")
def main() -> None:
    """Shuffle datasets between Dask workers every epoch, and find the fastest strategy to do so.

    Set DSHUFFLE_DEBUG=1 to see tracebacks.
    """


for _command in (advise.advise, advise.doctor, advise.warmup, compare.compare, dataset.dataset, run.run):
    main.add_command(_command)


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
