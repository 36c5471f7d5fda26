"""``dshuffle warmup``: compile all kernels into the cache on disk."""

from __future__ import annotations

import os
import time

import click

from dshuffle.compare import compile_kernels
from dshuffle.report.progress import progress_bar
from dshuffle.units import human_seconds


@click.command()
def warmup() -> None:
    """Compile all kernels, so that no later process has to.

    The code is stored beside the installed modules, or in the folder that the environment variable NUMBA_CACHE_DIR
    names. Run this once when you build an image, or once in a home directory that all nodes share.
    """
    started = time.perf_counter()
    with progress_bar() as advance:
        advance(0, 1, "compiling kernels")
        compile_kernels()
    where = os.environ.get("NUMBA_CACHE_DIR") or "beside the installed modules"
    click.echo(f"Kernels are compiled ({human_seconds(time.perf_counter() - started)}); the cache is {where}.")
