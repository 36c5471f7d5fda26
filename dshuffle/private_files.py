"""Folders and files of this user alone, in which no other local user can plant, replace or block anything."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

KEY_NBYTES = 32
"""Length of the key of a user."""


@contextlib.contextmanager
def private_folder(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open a folder of this user that nobody else can enter. Files in it are opened relative to its descriptor.

    Parameters
    ----------
    path
        The folder, which must exist. Folders above it may be symbolic links, and it may not.

    Yields
    ------
    int
        Its descriptor.

    Raises
    ------
    OSError
        If it is no folder, if another user owns it, or if other users can enter it.

    Examples
    --------
    >>> with tempfile.TemporaryDirectory() as path, private_folder(path) as folder:
    ...     os.listdir(folder)
    []
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            raise PermissionError(f"the folder {path} belongs to the user {status.st_uid}, and not to {os.geteuid()}")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(
                f"the folder {path} has the mode {stat.S_IMODE(status.st_mode):04o}, so other users can enter it. "
                "Its mode must be 0700"
            )
        yield folder
    finally:
        os.close(folder)


def open_own_folder(path: str | os.PathLike[str]) -> int:
    """Open a folder in which not everybody can replace files, and return its descriptor. It may be a link.

    Raises
    ------
    OSError
        If it is no folder, another user than root owns it, or everybody can replace files in it.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(folder)
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"the folder {path} belongs to the user {status.st_uid}, and not to {os.geteuid()}")
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            raise PermissionError(
                f"the folder {path} has the mode {stat.S_IMODE(status.st_mode):04o}, so all users can replace files in "
                "it. Change it with chmod o-w"
            )
    except BaseException:
        os.close(folder)
        raise
    return folder


def read_own_file(path: str) -> bytes | None:
    """Read a file that no other user can have put there; None if there is none. See :func:`open_private_file`.

    Raises
    ------
    OSError
        If another user can have put it there. Nothing was read.
    """
    check_replaceable(path)  # with an error that says more than that of the system
    try:
        folder = open_own_folder(os.path.dirname(path))
        try:
            file = open_private_file(os.path.basename(path), folder, os.O_RDONLY)
        finally:
            os.close(folder)
    except FileNotFoundError:
        return None
    with os.fdopen(file, "rb") as opened:
        return opened.read()


def open_private_file(name: str, folder: int, flags: int) -> int:
    """Open a regular file of this user, which is made with the mode 0600 if ``flags`` say so. It is not truncated.

    Parameters
    ----------
    name
        Its name.
    folder
        Descriptor of its folder.
    flags
        As for :func:`os.open`.

    Returns
    -------
    int
        Its descriptor.

    Raises
    ------
    OSError
        If it does not exist, is a symbolic link or another kind of file, belongs to another user, or others can write
        it.

    Examples
    --------
    >>> with tempfile.TemporaryDirectory() as path, private_folder(path) as folder:
    ...     file = open_private_file("lock", folder, os.O_RDWR | os.O_CREAT)
    ...     os.close(file)
    ...     os.mkfifo("pipe", dir_fd=folder)
    ...     open_private_file("pipe", folder, os.O_RDONLY)
    Traceback (most recent call last):
        ...
    OSError: pipe is not a regular file
    """
    # Without O_NONBLOCK, opening a pipe waits for its other end.
    file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{name} is not a regular file")
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{name} belongs to the user {status.st_uid}, and not to {os.geteuid()}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            mode = stat.S_IMODE(status.st_mode)
            raise PermissionError(f"{name} has the mode {mode:04o}, so other users can write it. Change it to 0600")
    except BaseException:
        os.close(file)
        raise
    return file


def check_replaceable(path: str) -> None:
    """Refuse to replace anything but a regular file. A link would be lost, and its target stay as it is.

    Raises
    ------
    OSError
        If there is a symbolic link, or another kind of file.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise OSError(f"{path} is a symbolic link to {os.readlink(path)}. Give the path of the file itself")
    if not stat.S_ISREG(mode):
        raise OSError(f"{path} is not a regular file")


def replace_file(path: str, data: bytes) -> None:
    """Replace a file at once, or not at all, by one with the mode 0600. Its folder is made if it does not exist.

    Raises
    ------
    OSError
        If it cannot be written, or there is anything but a regular file. What was there is still there.

    Examples
    --------
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     replace_file(f"{folder}/new/x", b"data")
    ...     oct(os.stat(f"{folder}/new/x").st_mode), os.listdir(f"{folder}/new")
    ('0o100600', ['x'])
    """
    folder = os.path.dirname(path)
    os.makedirs(folder, 0o755, exist_ok=True)
    check_replaceable(path)
    file, new = tempfile.mkstemp(prefix="dshuffle-", suffix=".partial", dir=folder)
    try:
        with open(file, "wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(file)  # else the file may be empty after a power failure
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise


@contextlib.contextmanager
def cache_folder(*, temporary: bool = True) -> Iterator[int]:
    """Open dshuffle's own folder among the caches of this user. It is made if it does not exist.

    It is ``dshuffle`` in ``XDG_CACHE_HOME`` or ``~/.cache``. If that cannot be used, for instance because nobody can
    write the home directory of a container, it is ``dshuffle-UID`` in the folder for temporary files, unless
    ``temporary`` is false, for what the user's hosts must have in common.

    Yields
    ------
    int
        Its descriptor.

    Raises
    ------
    OSError
        If both cannot be used. The message says why.
    """
    with contextlib.ExitStack() as opened:
        try:
            folder = opened.enter_context(_made(_caches() / "dshuffle"))
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
            if not temporary:
                raise
            try:
                folder = opened.enter_context(_made(Path(tempfile.gettempdir()) / f"dshuffle-{os.geteuid()}"))
            except OSError as temporary_error:
                raise OSError(f"{error}; {temporary_error}") from temporary_error
        yield folder


def user_key(*, temporary: bool = True) -> bytes:
    """Random bytes that only this user has, on all hosts that share the user's cache folder.

    They are in the file ``key`` of :func:`cache_folder`, which is made if it does not exist.

    Returns
    -------
    bytes
        32 bytes.

    Raises
    ------
    OSError
        If there is no such folder, or the file is damaged.
    """
    with cache_folder(temporary=temporary) as folder:
        with contextlib.suppress(FileNotFoundError):
            return _key(folder)
        new = f"key-{secrets.token_hex(8)}"
        with os.fdopen(open_private_file(new, folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(secrets.token_bytes(KEY_NBYTES))
        try:
            # A link does not replace the key of a process that was faster.
            with contextlib.suppress(FileExistsError):
                os.link(new, "key", src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            os.unlink(new, dir_fd=folder)
        return _key(folder)


def _key(folder: int) -> bytes:
    with os.fdopen(open_private_file("key", folder, os.O_RDONLY), "rb") as file:
        key = file.read(KEY_NBYTES + 1)
    if len(key) != KEY_NBYTES:
        raise OSError(f"the file key in dshuffle's cache folder has not {KEY_NBYTES} bytes. Remove it")
    return key


def _caches() -> Path:
    """Folder of all caches of this user. A relative ``XDG_CACHE_HOME`` is ignored, as its specification says."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return folder if folder.is_absolute() else Path.home() / ".cache"


@contextlib.contextmanager
def _made(path: Path) -> Iterator[int]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    with private_folder(path) as folder:
        yield folder
