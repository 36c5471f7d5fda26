"""Runs scripts of ``pipelines/`` and ``storage/``: in a process of their own, or in this one."""

from __future__ import annotations

import contextlib
import io
import logging
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]


def run_alone(script, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / script, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def run(script, *arguments):
    """The same in this process, whose worker processes are forked and not started anew."""
    code, out, err = 0, io.StringIO(), io.StringIO()
    logger = logging.getLogger("dshuffle")
    level = logger.level
    with (
        mock.patch("sys.argv", [script, *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")  # as in a process of its own
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as left:
            code = left.code or 0
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        finally:
            logger.setLevel(level)  # a script may have hushed it
    return subprocess.CompletedProcess([], code, out.getvalue(), err.getvalue())
