"""The index of a partition that stays on a local disk: what its rows are, signed with the key of the user."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from dshuffle.exchange.cache_partition import Index
from dshuffle.planning import WorkerHistory
from dshuffle.private_files import KEY_NBYTES, open_private_file, private_folder, user_key
from dshuffle.rows import Checksums

logger = logging.getLogger(__name__)

FORMAT = 3
"""Version of the format of an index. Others are ignored."""

INDEX = "index"
"""Name of the file of the index: a line with the keyed digest of the next one, a line of JSON with the label and the
keyed digest of the arrays, then the arrays one after the other, little-endian.

It is not a NumPy file. ``numpy.load`` calls ``ast.literal_eval``, which may fail where several threads parse Python
code at the same time (python/cpython#106905; Python 3.11 before 3.11.8, and 3.12 before 3.12.2).
"""

_INT64, _UINT32, _NBYTES_PER_ROW = "<i8", "<u4", 20
_LONGEST_HEADER = 2**24


@dataclass(frozen=True, slots=True)
class KeptLabel:
    """What a kept partition is of.

    Parameters
    ----------
    dataset
        Identity of the dataset.
    shuffle
        Digest of what decides who trains on what, except the workers.
    session
        The session that fills it.
    row_nbytes, n_slots
        Shape of the file of rows.
    history, rank, epoch
        Workers of the session, rank, and epoch (-1 until there are rows).
    """

    dataset: str
    shuffle: str
    session: str
    row_nbytes: int
    n_slots: int
    history: WorkerHistory
    rank: int
    epoch: int = -1

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The label of which :func:`dataclasses.asdict` made a dictionary."""
        return cls(**{**fields, "history": WorkerHistory.from_dict(fields["history"])})


def write_index(path: str, label: KeptLabel, key: bytes, index: Index, checksums: Checksums) -> None:
    """Replace the index in the folder of a partition.

    Parameters
    ----------
    path
        The folder.
    label
        What the partition is of.
    key
        Key of the user.
    index
        The samples and their slots.
    checksums
        Checksums of their rows.

    Raises
    ------
    OSError
        If it cannot be written. The index before is still there.
    """
    new = os.path.join(path, "index.new")
    parts = [np.ascontiguousarray(part, _INT64).data for part in (index.sample_ids, index.slots)]
    parts.append(np.ascontiguousarray(checksums, _UINT32).data)
    header = {
        "format": FORMAT,
        "n_rows": len(checksums),
        "digest": _digest(key, parts),
        **dataclasses.asdict(label),
    }
    line = json.dumps(header).encode() + b"\n"
    with open(new, "wb") as file:
        file.writelines([_digest(key, [line]).encode(), b"\n", line, *parts])
    os.replace(new, os.path.join(path, INDEX))


def read_label(path: str, key: bytes) -> KeptLabel:
    """Read what the partition in a folder is of. Raises what ``UNREADABLE`` lists if it is damaged."""
    with open_own(path, INDEX) as file:
        return _header(file, key)[0]


def read_index(path: str) -> tuple[KeptLabel, Index, Checksums]:
    """Read the index of a folder: the label, the samples and their slots, and the checksums of their rows."""
    key = user_key()
    with open_own(path, INDEX) as file:
        label, n_rows, digest = _header(file, key)
        data = file.read()
    if not hmac.compare_digest(_digest(key, [data]), digest):
        raise ValueError("its index has changed on the disk")
    ids: NDArray[np.int64] = np.frombuffer(data, _INT64, n_rows)
    slots: NDArray[np.int64] = np.frombuffer(data, _INT64, n_rows, ids.nbytes)
    checksums: Checksums = np.frombuffer(data, _UINT32, n_rows, ids.nbytes + slots.nbytes)
    return label, Index(ids, slots), checksums


def _header(file: BinaryIO, key: bytes) -> tuple[KeptLabel, int, str]:
    """Read the label, the number of rows, and the digest of the arrays that follow."""
    signature, line = file.readline(_LONGEST_HEADER).strip(), file.readline(_LONGEST_HEADER)
    if not hmac.compare_digest(_digest(key, [line]).encode(), signature):
        raise ValueError("it was not written with the key of this user, or by another release of dshuffle")
    header = dict(json.loads(line))
    if header.pop("format") != FORMAT:
        raise ValueError("another release of dshuffle wrote it")
    numbers = [header[name] for name in ("n_rows", "row_nbytes", "n_slots", "rank", "epoch")]
    names = [header[name] for name in ("digest", "dataset", "shuffle", "session")]
    if any(type(item) is not int for item in numbers) or not all(isinstance(item, str) for item in names):
        raise TypeError("its index has fields of other types")
    n_rows, digest = header.pop("n_rows"), header.pop("digest")
    if os.fstat(file.fileno()).st_size != file.tell() + n_rows * _NBYTES_PER_ROW:
        raise ValueError("its index has another length")
    return KeptLabel.from_dict(header), n_rows, digest


def _digest(key: bytes, parts: Iterable[bytes | memoryview]) -> str:
    """Digest that only a process with the key can compute."""
    state = hashlib.blake2b(key=key, digest_size=16)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def own_key() -> bytes:
    """The key of this user, or another one, so that nobody reads the partition later."""
    try:
        return user_key()
    except OSError as error:
        logger.warning("dshuffle: no later session can read the partitions that this one keeps: %s", error)
        return os.urandom(KEY_NBYTES)


def open_own(path: str, name: str) -> BinaryIO:
    """Open a file in the folder of a partition. Raises OSError unless both are this user's alone."""
    with private_folder(path) as folder:
        return os.fdopen(open_private_file(name, folder, os.O_RDWR), "r+b")
