"""Folders and files of this user alone, in which no other local user can plant, replace or block anything."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import BinaryIO, cast

KEY_NBYTES = 32
"""Length of the key of a user."""


def check_folder(path: str | os.PathLike[str]) -> None:
    """Refuse a folder that does not belong to this user, that others can enter, or that is a link."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a folder")
    _check(path, status, 0o077, "other users can enter it. Its mode must be 0700")


def open_private_file(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file of this user, which is made with the mode 0600 if ``flags`` say so. It is not truncated.

    Raises OSError if it is a symbolic link or another kind of file, belongs to another user, or others can write it.
    """
    # Without O_NONBLOCK, opening a pipe waits for its other end.
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        _check(path, status, stat.S_IWGRP | stat.S_IWOTH, "other users can write it. Change it to 0600")
    except BaseException:
        os.close(file)
        raise
    return file


def _check(path: str | os.PathLike[str], status: os.stat_result, others: int, because: str) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to the user {status.st_uid}, and not to {os.geteuid()}")
    if (mode := stat.S_IMODE(status.st_mode)) & others:
        raise PermissionError(f"{path} has the mode {mode:04o}, so {because}")


def read_own_file(path: str) -> bytes | None:
    """Read a file that no other user can have put there; None if there is none. Raises OSError otherwise."""
    try:
        file = open_private_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with os.fdopen(file, "rb") as opened:
        return opened.read()


def lock_file(file: int, patience: float = 0.0) -> None:
    """Lock a file until it is closed. Raises BlockingIOError if another process has it for longer than ``patience``."""
    end = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.05)


def replace_file(path: str, data: bytes, mode: int = 0o600) -> None:
    """Replace a regular file at once, or not at all. Its folder is made if it does not exist."""
    folder = os.path.dirname(path)
    os.makedirs(folder, 0o755, exist_ok=True)
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):  # its target would stay as it is
        raise OSError(f"{path} is a symbolic link, or not a regular file. Give the path of the file itself")
    file, new = tempfile.mkstemp(prefix="dshuffle-", suffix=".partial", dir=folder)
    try:
        with open(file, "wb") as opened:
            opened.write(data)
            opened.flush()
            os.fchmod(file, mode)
            os.fsync(file)  # else the file may be empty after a power failure
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise


def cache_folder(*, temporary: bool = True) -> Path:
    """Return dshuffle's own folder among the caches of this user, which is made if it does not exist.

    It is in ``XDG_CACHE_HOME`` or ``~/.cache``. If that cannot be used, such as in a container, it is ``dshuffle-UID``
    in the folder for temporary files, unless ``temporary`` is false, for what the user's hosts must have in common.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # A relative place is ignored, as its specification says.
        return _made((caches if caches.is_absolute() else Path.home() / ".cache") / "dshuffle")
    except (OSError, RuntimeError):
        if not temporary:
            raise
        return _made(Path(tempfile.gettempdir(), f"dshuffle-{os.geteuid()}"))


def _made(path: Path) -> Path:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    check_folder(path)
    return path


def user_key(*, temporary: bool = True) -> bytes:
    """Return 32 random bytes that only this user has, on all hosts that share the user's cache folder.

    They are in the file ``key`` of :func:`cache_folder`, which is made if it does not exist. Raises OSError if there
    is no such folder, or the file is damaged.
    """
    path = cache_folder(temporary=temporary) / "key"
    if not path.exists():
        file, new = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(file, "wb") as opened:
            opened.write(secrets.token_bytes(KEY_NBYTES))
        # A link does not replace the key of a process that was faster.
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
        os.unlink(new)
    key = read_own_file(str(path)) or b""
    if len(key) != KEY_NBYTES:
        raise OSError(f"the file {path} does not have {KEY_NBYTES} bytes. Remove it")
    return key


def unnamed_file(folder: str, nbytes: int) -> BinaryIO:
    """Open a file without a name, of which nothing is left behind, with all of its disk space reserved."""
    file = cast(BinaryIO, tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115  # the caller closes it
    reserve(file, nbytes, folder)
    return file


def reserve(file: BinaryIO, nbytes: int, folder: str) -> None:
    """Reserve the disk space of a file in a folder, or close it. The error says how much is free."""
    try:
        if nbytes:
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        file.close()
        free = shutil.disk_usage(folder).free
        raise OSError(f"cannot hold {nbytes} bytes ({error}); {free} bytes are free there") from error
