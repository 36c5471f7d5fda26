"""The folder of a report, which is made before a long run and not after it."""

from __future__ import annotations

import tempfile
from pathlib import Path


def make_folder(folder: str | Path) -> None:
    """Make the folder of a report, and the folders above it. One that exists must allow new files.

    Raises
    ------
    OSError
        If it cannot be made, or files cannot be written to it.

    Examples
    --------
    >>> with tempfile.TemporaryDirectory() as here:
    ...     make_folder(f"{here}/reports/first")
    ...     Path(here, "reports", "first").is_dir()
    True
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
