"""``dshuffle warmup``: compile all kernels into the cache on disk."""

from __future__ import annotations

import os
import time

import click

from dshuffle.kernels import compile_kernels
from dshuffle.report.progress import progress_bar
from dshuffle.units import human_seconds


def warmup() -> None:
    """Compile all kernels, and print where they are stored."""
    started = time.perf_counter()
    with progress_bar() as advance:
        advance(0, 1, "compiling kernels")
        compile_kernels()
    where = os.environ.get("NUMBA_CACHE_DIR") or "beside the installed modules"
    click.echo(f"Kernels are compiled ({human_seconds(time.perf_counter() - started)}); the cache is {where}.")
