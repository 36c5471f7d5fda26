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

import numba

from dshuffle.private_files import cache_folder, open_private_file

logger = logging.getLogger(__name__)

LONGEST_WAIT = 300.0
"""Seconds to wait for another process. After that a process compiles for itself."""

INTERVAL = 0.05
"""Seconds between attempts to lock. A system call that waits would have no limit of time."""

SILENT = 2.0
"""Seconds before the log says that kernels are compiled. Loading them from numba's cache takes less."""


@contextlib.contextmanager
def compile_once(kernels: str) -> Iterator[None]:
    """Let the first process of this user and host compile, and the others wait and then load from numba's cache.

    Compiling all kernels takes tens of seconds. Without this, every worker of a host would do it at the same time. A
    file in the user's cache folder is locked meanwhile. When the kernels are compiled, a byte is written to it, so that
    later processes do not wait for each other. If numba's cache was emptied since, or the folder cannot be used, each
    process compiles for itself.

    Parameters
    ----------
    kernels
        What is compiled. Different kernels have different locks.

    Examples
    --------
    >>> with compile_once("example"):
    ...     numba.njit(lambda x: x + 1)(1)
    2
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
    with cache_folder() as folder:
        file = open_private_file(_name(kernels), folder, os.O_RDWR | os.O_CREAT)
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, file)
        if os.fstat(file).st_size:
            return None
        _lock(file)
        opened.pop_all()
    return file


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
    depends_on = [kernels, platform.node(), folder, sys.version, numba.__version__, version("dshuffle")]
    digest = hashlib.blake2b("\n".join(depends_on).encode(), digest_size=8).hexdigest()
    return f"kernels-{digest}"
