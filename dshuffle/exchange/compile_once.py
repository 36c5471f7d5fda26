"""Compile kernels once on each host, however many processes need them at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from dshuffle.private_files import cache_folder, open_private_file

logger = logging.getLogger(__name__)

LONGEST_WAIT = 300.0
"""Seconds to wait for another process. After that a process compiles for itself."""

INTERVAL = 0.05
"""Seconds between attempts to lock. A system call that waits would have no limit of time."""

PREFIX = "kernels-"
"""Beginning of the names of the files."""

UNUSED = 7 * 86400.0
"""Seconds after which a file is removed whose kernels no process has needed: another version or host, for instance."""

SILENT = 2.0
"""Seconds before the log says that kernels are compiled. Loading them from numba's cache takes less."""


@contextlib.contextmanager
def compile_once(kernels: str) -> Iterator[None]:
    """Let the first process of this user and host compile, and the others wait and then load from numba's cache.

    Compiling all kernels takes tens of seconds. Without this, every worker of a host would do it at the same time. A
    file in the user's cache folder is locked meanwhile. When the kernels are compiled, a byte is written to it, so that
    later processes do not wait for each other. If numba's cache was emptied since, or the folder cannot be used, each
    process compiles for itself. The process that compiles also removes files that were not used for a week.

    Parameters
    ----------
    kernels
        What is compiled. Different kernels have different locks.

    Examples
    --------
    >>> with compile_once("example"):
    ...     print("compiles")
    compiles
    """
    try:
        file = _locked(kernels)
    except OSError as error:
        logger.warning("Every process compiles the dshuffle kernels for itself: %s", error)
        file = None
    if file is None:
        yield
        return
    notice = threading.Timer(SILENT, logger.warning, ("Compiling kernels, once on this host: %s.", kernels))
    notice.start()
    try:
        yield
        with contextlib.suppress(OSError):  # a full disk: the next process takes its turn, and loads the kernels
            os.pwrite(file, b"1", 0)
    finally:
        notice.cancel()
        os.close(file)  # which unlocks it


def _locked(kernels: str) -> int | None:
    """Open and lock the file of these kernels; None if they are in numba's cache: then the file is not empty.

    Raises
    ------
    OSError
        If this user has no folder for it, or another process has locked it for too long.
    """
    name = _name(kernels)
    with cache_folder() as folder:
        while True:
            with contextlib.ExitStack() as opened:
                file = open_private_file(name, folder, os.O_RDWR | os.O_CREAT)
                opened.callback(os.close, file)
                if os.fstat(file).st_size:
                    os.utime(file)  # it is in use
                    return None
                _lock(file)
                if _is_in(folder, name, file):  # else another process has removed it since it was opened
                    _remove_unused(folder)
                    opened.pop_all()
                    return file


def _is_in(folder: int, name: str, file: int) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(file))
    except FileNotFoundError:
        return False


def _remove_unused(folder: int) -> None:
    """Remove the files that no process has used for a week, unless a process compiles for that long."""
    for name in os.listdir(folder):
        if name.startswith(PREFIX):
            with contextlib.suppress(OSError):  # it was removed, is locked, or belongs to another user
                _remove_if_unused(folder, name)


def _remove_if_unused(folder: int, name: str) -> None:
    file = open_private_file(name, folder, os.O_RDWR)
    try:
        if time.time() - os.fstat(file).st_mtime > UNUSED:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Only who has the lock removes the file, so it cannot be replaced between the check and the removal.
            if _is_in(folder, name, file):
                os.unlink(name, dir_fd=folder)
    finally:
        os.close(file)


def _lock(file: int) -> None:
    """Lock a file until it is closed. Raises TimeoutError if another process has it for too long."""
    end = time.monotonic() + LONGEST_WAIT
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(f"another process has not finished in {LONGEST_WAIT:g} s") from None
        time.sleep(INTERVAL)


def _name(kernels: str) -> str:
    """Name of the file of kernels: another one for each host, cache of numba, and version of everything."""
    folder = os.environ.get("NUMBA_CACHE_DIR") or str(Path(__file__).parent)
    depends_on = [kernels, platform.node(), folder, sys.version, version("numba"), version("dshuffle")]
    digest = hashlib.blake2b("\n".join(depends_on).encode(), digest_size=8).hexdigest()
    return PREFIX + digest
