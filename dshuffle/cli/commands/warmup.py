"""Arguments of ``dshuffle warmup``."""

from __future__ import annotations

from typing import Any

import click

from dshuffle.cli.commands import work_of


@click.command()
def warmup(**options: Any) -> None:
    """Compile all kernels, so that no later process has to.

    The code is stored beside the installed modules, or in the folder that the environment variable NUMBA_CACHE_DIR
    names. Run this once when you build an image, or once in a home directory that all nodes share.
    """
    work_of("warmup").warmup(**options)
