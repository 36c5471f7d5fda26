"""The checkpoint of an open session: no other session writes it, until this one is closed."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
from collections.abc import Iterator, Mapping
from typing import Any

from dshuffle.errors import CheckpointError
from dshuffle.private_files import check_folder, check_replaceable, lock_file, open_private_file
from dshuffle.runtime.client.checkpoints import (
    PATIENCE,
    check_no_checkpoint,
    checkpoint_place,
    may_pass,
    write_checkpoint,
)
from dshuffle.store import Dataset
from dshuffle.store.places import is_local

logger = logging.getLogger(__name__)

UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}
"""Errors of file systems without locks."""


class CheckpointFile:
    """A checkpoint that this session has for itself.

    Parameters
    ----------
    url
        The file or object, as the user names it.
    new
        Whether the folder is made if it does not exist.
    """

    def __init__(self, url: str | os.PathLike[str], dataset: Dataset, *, new: bool = True) -> None:
        self.url = url
        self._dataset = dataset
        self._was_written = False
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(checkpoint_lock(checkpoint_place(url), new=new))

    def check_empty(self) -> None:
        """Refuse to overwrite the state of another session."""
        check_no_checkpoint(self.url, self._dataset)

    def write(self, state: Mapping[str, Any]) -> None:
        """Write a state. The first one must succeed at once; later ones are tried again for some seconds."""
        patience = PATIENCE if self._was_written else 0.0
        write_checkpoint(self.url, state, self._dataset, patience=patience, was_written=self._was_written)
        self._was_written = True

    def release(self) -> None:
        """Leave the checkpoint to other sessions. Idempotent."""
        self._lock.close()


@contextlib.contextmanager
def checkpoint_lock(place: str, *, new: bool = True) -> Iterator[None]:
    """Keep other sessions from opening with the same checkpoint, if it is a file. Objects in stores have no locks.

    The lock is on a file beside the checkpoint, which is removed in the end. It goes away with the process, however
    that ends.
    """
    if not is_local(place):
        yield
        return
    folder, path = os.path.dirname(place), f"{place}.lock"
    try:
        check_replaceable(place)
        if new:
            os.makedirs(folder, 0o755, exist_ok=True)
        elif not os.path.isdir(folder):
            raise CheckpointError(
                f"there is no checkpoint at {place}. Correct the path, or start a new session that writes it"
            )
        check_folder(folder, shared=True)
        file = _locked(path)
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
                os.unlink(path)
        except OSError as error:  # its file system is away
            logger.warning("dshuffle: the file %s cannot be removed: %s", path, error)
        os.close(file)  # last: whoever locks a file that is still in the folder goes on


def _locked(path: str) -> int:
    """Open and lock a file, which is made if it does not exist, and write there who has it.

    Raises BlockingIOError with what another process has written there, or OSError if the file cannot be made.
    """
    while True:
        file = open_private_file(path, os.O_RDWR | os.O_CREAT)
        with contextlib.ExitStack() as on_error:
            on_error.callback(os.close, file)
            try:
                lock_file(file)
            except BlockingIOError:
                raise BlockingIOError(os.pread(file, 1000, 0).decode(errors="replace")) from None
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                logger.warning(
                    "dshuffle: this file system has no locks, so nothing keeps sessions apart: %s (%s)", path, error
                )
            if os.fstat(file).st_nlink:  # else its owner has just removed it
                os.ftruncate(file, 0)
                os.pwrite(file, f"process {os.getpid()} on {platform.node()}".encode(), 0)
                on_error.pop_all()
                return file
