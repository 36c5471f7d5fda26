"""Compile kernels once on each host, however many processes need them at the same time."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import locket
import numba

logger = logging.getLogger(__name__)

LONGEST_WAIT = 300.0
"""Seconds to wait for another process. After that a process compiles for itself."""

SILENT = 2.0
"""Seconds before the log says that kernels are compiled. Loading them from numba's cache takes less."""


@contextlib.contextmanager
def compile_once(kernels: str) -> Iterator[None]:
    """Let the first process of this user and host compile, and the others wait and then load from numba's cache.

    Compiling all kernels takes tens of seconds. Without this, every worker of a host would do it at the same time. An
    empty file in the folder for temporary files says that it has been done, so that later processes do not wait for
    each other. If the cache was emptied since, or the folder cannot be written, each process compiles for itself.

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
    done = _marker(kernels)
    if done.exists():
        yield
        return
    lock = locket.lock_file(f"{done}.lock", timeout=LONGEST_WAIT)
    try:
        lock.acquire()
    except (OSError, locket.LockError) as error:
        logger.warning("Every process compiles the dshuffle kernels for itself: %s", error)
        yield
        return
    notice = threading.Timer(SILENT, logger.warning, ("Compiling kernels, once on this host: %s.", kernels))
    notice.start()
    try:
        yield
        with contextlib.suppress(OSError):
            done.touch()
    finally:
        notice.cancel()
        lock.release()


def _marker(kernels: str) -> Path:
    """The file that says that these kernels are in this user's cache, for these versions of everything."""
    folder = os.environ.get("NUMBA_CACHE_DIR") or str(Path(__file__).parent)
    user = str(os.getuid()) if hasattr(os, "getuid") else ""
    depends_on = [kernels, user, folder, sys.version, numba.__version__, version("dshuffle")]
    digest = hashlib.blake2b("\n".join(depends_on).encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"dshuffle-kernels-{digest}"
