"""A folder for a dataset without a URL."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref

import dask

from dshuffle.errors import DatasetError


class TemporaryFolder:
    """A folder that is removed with this object, or when the process ends.

    Raises
    ------
    DatasetError
        If it cannot be made.
    """

    def __init__(self) -> None:
        place = dask.config.get("temporary-directory", None) or tempfile.gettempdir()
        try:
            self._folder = tempfile.mkdtemp(prefix="dshuffle-", dir=place)
        except OSError as error:
            raise DatasetError(f"a temporary folder cannot be made in {place}: {error}") from error
        weakref.finalize(self, remove_if_mine, self._folder, os.getpid())

    def path(self, name: str) -> str:
        """Path of something in the folder."""
        return os.path.join(self._folder, name)


def remove_if_mine(folder: str, process: int) -> None:
    """Remove a folder of a process, unless this is another process that was forked from it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
