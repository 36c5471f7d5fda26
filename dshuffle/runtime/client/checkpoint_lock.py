"""One open session at a time writes a checkpoint."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import platform
from collections.abc import Iterator

from dshuffle.errors import CheckpointError
from dshuffle.private_files import check_replaceable, open_own_folder, open_private_file
from dshuffle.runtime.client.checkpoints import may_pass
from dshuffle.store.places import is_local

logger = logging.getLogger(__name__)

UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}
"""Errors of file systems without locks."""


@contextlib.contextmanager
def checkpoint_lock(place: str, *, new: bool = True) -> Iterator[None]:
    """Keep other sessions from opening with the same checkpoint, if it is a file on this machine's file systems.

    The lock is on a file beside the checkpoint, which is removed in the end. It goes away with the process, however
    that ends. Objects in other stores have no locks.

    Parameters
    ----------
    place
        Canonical URL of the checkpoint.
    new
        Whether the folder is made if it does not exist.

    Raises
    ------
    CheckpointError
        If another open session has this checkpoint, or it cannot be written. Both are found before any training. Also
        if there is no folder, unless it is made.
    """
    if not is_local(place):
        yield
        return
    try:
        check_replaceable(place)
        if new:
            os.makedirs(os.path.dirname(place), 0o755, exist_ok=True)
        elif not os.path.isdir(os.path.dirname(place)):
            raise CheckpointError(
                f"there is no checkpoint at {place}. Correct the path, or start a new session that writes it"
            )
        file, folder = _locked(f"{place}.lock")
    except BlockingIOError as error:
        raise CheckpointError(
            f"the checkpoint {place} is in use by another open session ({error}). Close that session, or choose "
            "another place"
        ) from error
    except OSError as error:
        failure = f"the checkpoint {place} cannot be written: {error}"
        raise CheckpointError(failure, transient=may_pass(error)) from error
    process = os.getpid()
    try:
        yield
    finally:
        try:
            if os.getpid() == process and os.fstat(file).st_nlink:  # else this is a fork, or the user has removed it
                os.unlink(f"{os.path.basename(place)}.lock", dir_fd=folder)  # also if the folder was moved
        except OSError as error:  # its file system is away
            logger.warning("dshuffle: the file %s.lock cannot be removed: %s", place, error)
        os.close(file)  # last: whoever locks a file that is still in the folder goes on
        os.close(folder)


def _locked(path: str) -> tuple[int, int]:
    """Open and lock a file, which is made if it does not exist. It names this process.

    Returns
    -------
    file, folder : int
        Descriptors of both.

    Raises
    ------
    BlockingIOError
        If another one has locked it. The message names its process.
    OSError
        If it cannot be made.
    """
    with contextlib.ExitStack() as opened:
        folder = open_own_folder(os.path.dirname(path))
        opened.callback(os.close, folder)
        while True:
            file = open_private_file(os.path.basename(path), folder, os.O_RDWR | os.O_CREAT)
            with contextlib.ExitStack() as on_error:
                on_error.callback(os.close, file)
                _lock(file, path)
                if os.fstat(file).st_nlink:  # else its owner has just removed it
                    os.ftruncate(file, 0)
                    os.pwrite(file, f"process {os.getpid()} on {platform.node()}".encode(), 0)
                    on_error.pop_all()
                    opened.pop_all()
                    return file, folder


def _lock(file: int, path: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(os.pread(file, 1000, 0).decode(errors="replace")) from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        logger.warning("dshuffle: this file system has no locks, so nothing keeps sessions apart: %s (%s)", path, error)
