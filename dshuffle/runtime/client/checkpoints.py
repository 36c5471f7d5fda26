"""Checkpoints: states of sessions in files and objects."""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
import posixpath
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from dshuffle.errors import CheckpointError, DatasetError, InvalidParameter
from dshuffle.private_files import read_own_file
from dshuffle.store import Dataset
from dshuffle.store.places import canonical_url, is_local, read_object, write_object

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds for which an open session tries to write its checkpoint."""

PAUSES = 0.1, 2.0
"""First and longest pause in seconds between two attempts."""

BUCKETS = {"s3", "gs", "gcs", "az", "abfs"}
"""Schemes whose URLs name a bucket in place of a host."""

LASTING = {
    errno.EACCES,
    errno.EINVAL,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
"""Errors of a file system that do not go away by themselves, at a place that has not been used so far."""


def write_checkpoint(
    url: str | os.PathLike[str],
    state: Mapping[str, Any],
    dataset: Dataset,
    *,
    patience: float = 0.0,
    was_written: bool = False,
) -> None:
    """Write a state to a file or an object, which replaces an earlier one at once or not at all.

    A line of JSON is followed by the bytes of the attached value. The options of the dataset's store are used if the
    URL has the same scheme and host, or is another bucket.
    """
    place = checkpoint_place(url)
    value = b"" if state["attached"] is None else base64.b64decode(state["attached"])
    head = {"state": {**state, "attached": None}, "attached_nbytes": len(value)}
    data = json.dumps({"checksum": _checksum(head, value), **head}).encode() + b"\n" + value

    def write() -> None:
        if was_written and is_local(place) and not os.path.isdir(folder := os.path.dirname(place)):
            raise FileNotFoundError(errno.ENOENT, "its folder is away", folder)
        write_object(place, data, _options(url, dataset))

    kept = ". If there was one before, it is still there"
    _insist(write, f"the checkpoint {url} cannot be written", kept, patience, was_used=was_written)


def read_checkpoint(url: str | os.PathLike[str], dataset: Dataset) -> dict[str, Any]:
    """Read the state that :func:`write_checkpoint` wrote for a session on this dataset."""
    state = find_checkpoint(url, dataset)
    if state is None:
        raise CheckpointError(
            f"there is no checkpoint at {url}. Correct the path, or start a new session that writes it"
        )
    return state


def find_checkpoint(
    url: str | os.PathLike[str], dataset: Dataset, *, patience: float = 0.0, was_written: bool = False
) -> dict[str, Any] | None:
    """Read a checkpoint; None if there is none."""

    def read() -> bytes | None:
        place = checkpoint_place(url)
        # An attached value is unpickled, which runs code.
        data = read_own_file(place) if is_local(place) else read_object(place, _options(url, dataset))
        if data is None and was_written:
            raise FileNotFoundError(errno.ENOENT, "it was there before, and is missing now")
        return data

    data = _insist(read, f"the checkpoint {url} cannot be read", "", patience, was_used=was_written)
    if data is None:
        return None
    try:
        line, _, value = data.partition(b"\n")
        if not line.startswith(b'{"checksum":'):  # a state that the user has written
            own = json.loads(data)
            own = own.get("state", own)  # as earlier releases wrote it
            if "format" not in own:
                raise KeyError("format")
            return dict(own)
        head = json.loads(line)
        checksum, state = head.pop("checksum"), head["state"]
        intact = checksum == _checksum(head, value) and len(value) == head["attached_nbytes"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint {url} is damaged or truncated ({error})") from error
    if not intact:
        raise CheckpointError(f"the checkpoint {url} is damaged: its checksum is wrong")
    return {**state, "attached": base64.b64encode(value).decode() if value else None}


def check_no_checkpoint(url: str | os.PathLike[str], dataset: Dataset) -> None:
    """Refuse to overwrite a checkpoint."""
    state = find_checkpoint(url, dataset)
    if state is not None:
        raise CheckpointError(
            f"there is a checkpoint at {url}, of epoch {state.get('epoch')}. Go on with it (Shuffler.resume or "
            "dshuffle.run_with_retries), choose another place, or remove it"
        )


def checkpoint_place(url: str | os.PathLike[str]) -> str:
    """The canonical URL of a checkpoint."""
    try:
        place = canonical_url(url)
    except InvalidParameter:
        place = ""
    scheme, _, rest = place.rpartition("://")
    if not posixpath.basename(rest) or (scheme and not posixpath.dirname(rest)):
        raise InvalidParameter.of("checkpoint", url, 'a file or an object in a folder, such as "s3://bucket/run.json"')
    return place


def may_pass(error: OSError | DatasetError) -> bool:
    """Whether an error of a store may go away by itself."""
    if isinstance(error, DatasetError):
        return error.transient
    return error.errno is not None and error.errno not in LASTING


def _insist(ask: Callable[[], T], failure: str, kept: str, patience: float, *, was_used: bool) -> T:
    end, pause = time.monotonic() + patience, PAUSES[0]
    while True:
        try:
            return ask()
        except (OSError, DatasetError) as error:
            transient = was_used or may_pass(error)
            if not transient or time.monotonic() + pause > end:
                raise CheckpointError(f"{failure} ({error}){kept}", transient=transient) from error
            if pause == PAUSES[0]:
                logger.warning("dshuffle: %s (%s). It is tried again for %g s", failure, error, patience)
        time.sleep(pause)
        pause = min(2 * pause, PAUSES[1])


def _checksum(head: Mapping[str, Any], value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(json.dumps(head, sort_keys=True).encode()))


def _options(url: str | os.PathLike[str], dataset: Dataset) -> Mapping[str, Any] | None:
    # They may be credentials, which no other host should see.
    checkpoint, store = urlsplit(checkpoint_place(url)), urlsplit(dataset.url)
    alike = checkpoint.scheme == store.scheme and (checkpoint.netloc == store.netloc or checkpoint.scheme in BUCKETS)
    return dataset.storage_options if alike and checkpoint.scheme else None
