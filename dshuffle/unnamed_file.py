"""Room on a local disk: reserved for a file, or for a file without a name, of which nothing is left behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import BinaryIO, cast


def unnamed_file(folder: str, nbytes: int) -> BinaryIO:
    """Open a file without a name, with all of its disk space reserved.

    Raises
    ------
    OSError
        If the folder cannot be used, or the disk does not have enough room. The message says how much is free.

    Examples
    --------
    >>> with tempfile.TemporaryDirectory() as folder, unnamed_file(folder, 100) as file:
    ...     os.fstat(file.fileno()).st_size, os.listdir(folder)
    (100, [])
    """
    if not os.path.isdir(folder):
        raise FileNotFoundError("there is no such folder")
    file = cast(BinaryIO, tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115  # the caller closes it
    reserve(file, nbytes, folder)
    return file


def reserve(file: BinaryIO, nbytes: int, folder: str) -> None:
    """Reserve the disk space of a file in a folder, or close it.

    Raises
    ------
    OSError
        If the disk does not have enough room. The message says how much is free.
    """
    try:
        if nbytes:
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        file.close()
        free = shutil.disk_usage(folder).free
        raise OSError(f"cannot hold {nbytes} bytes ({error}); {free} bytes are free there") from error
