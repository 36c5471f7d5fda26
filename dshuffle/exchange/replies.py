"""Replies to requests for rows, and how they travel between processes.

Rows travel in one of three forms: as arrays; short ones in one string of bytes; in memory that both processes map, of
which only the place travels. What arrives is checked here, before anybody uses it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
from distributed.protocol.serialize import to_serialize
from numpy.typing import NDArray

from dshuffle.errors import ExchangeError
from dshuffle.exchange.shared_memory import Place, mapped
from dshuffle.rows import ByteMatrix, Checksums

T = TypeVar("T")

WORD = 8
"""Bytes of a word."""

CHECKSUM_NBYTES = 4
"""Bytes of a row's checksum."""

SHORT_NBYTES = 2**18
"""Rows up to this length are sent as one string of bytes. Two arrays cost more to serialize, each as a frame."""


# Structs and not dataclasses: msgspec reads one in 0.7 us instead of 5 us, and a worker reads one for every message.


class RowsReply(msgspec.Struct, frozen=True, eq=False):
    """Rows that were requested.

    Parameters
    ----------
    rows, checksums
        ``(n, row bytes)`` and ``(n,)``.
    acknowledge
        Whether the sender of a message waits for its acknowledgement. None if the rows are not a message of a run.
    place
        Where another process of this host can map both; None if it cannot.
    present
        ``(n,)`` which of the rows mean anything. None if all do.
    link_seconds
        How long the rows took to leave an emulated link; 0 if no link is emulated.
    """

    rows: ByteMatrix
    checksums: Checksums
    acknowledge: bool | None = None
    place: Place | None = None
    present: NDArray[np.bool_] | None = None
    link_seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.rows.nbytes + self.checksums.nbytes + (0 if self.present is None else self.present.nbytes)


class Refusal(msgspec.Struct, frozen=True, tag_field="status", tag="refused", forbid_unknown_fields=True):
    """Why a sender does not send a message, and whether another request for it can succeed."""

    reason: str
    again: bool = False


class Later(msgspec.Struct, frozen=True, tag_field="status", tag="later", forbid_unknown_fields=True):
    """A sender cannot send a message yet. The receiver requests it again."""


Reply = RowsReply | Refusal | Later


class _RowFields(
    msgspec.Struct, frozen=True, rename={"present": "found"}, tag_field="status", tag="OK", forbid_unknown_fields=True
):
    """The fields of a :class:`RowsReply` between processes. Those of the other forms are missing."""

    rows: np.ndarray | None = None
    checksums: np.ndarray | None = None
    packed: bytes | None = None
    shape: tuple[int, int] = (0, 0)
    place: Place | None = None
    present: np.ndarray | None = None
    acknowledge: bool | None = None
    link_seconds: float = 0.0


def to_fields(reply: Reply) -> dict[str, Any]:
    """The fields of a reply, in the form in which its rows are sent fastest.

    Examples
    --------
    >>> to_fields(Refusal("the run has ended"))
    {'status': 'refused', 'reason': 'the run has ended', 'again': False}
    """
    if isinstance(reply, Refusal | Later):
        plain: dict[str, Any] = msgspec.to_builtins(reply)
        return plain
    fields: dict[str, Any] = {"status": "OK"}
    if reply.acknowledge is not None:
        fields["acknowledge"] = reply.acknowledge
    if reply.link_seconds:
        fields["link_seconds"] = reply.link_seconds
    rows, checksums = reply.rows, reply.checksums
    if reply.place is not None:
        fields["place"] = reply.place
    elif 0 < reply.nbytes <= SHORT_NBYTES and reply.present is None:
        padding = bytes(-checksums.nbytes % WORD)  # rows are read by words
        fields |= {"packed": b"".join((checksums.data, padding, rows.data)), "shape": rows.shape}
    else:  # Dask sends each as a frame, without pickling
        fields |= {"rows": to_serialize(rows), "checksums": to_serialize(checksums)}
        if reply.present is not None:
            fields["found"] = to_serialize(reply.present)
    return fields


def from_fields(fields: object, sender: str) -> Reply:
    """The reply of which :func:`to_fields` made fields.

    Parameters
    ----------
    fields
        What has arrived.
    sender
        From whom it comes, for the error.

    Raises
    ------
    ExchangeError
        If it is not such a reply.
    OSError
        If this process cannot map the rows.

    Examples
    --------
    >>> from_fields({"status": "refused", "reason": "the run has ended", "again": False}, "rank 0")
    Refusal(reason='the run has ended', again=False)
    """
    status = fields.get("status") if isinstance(fields, dict) else None
    if status == "OK":
        return rows_from_fields(fields, sender)
    if status == "refused":
        return _converted(fields, Refusal, sender)
    if status == "later":
        return _converted(fields, Later, sender)
    raise ExchangeError(f"{sender} does not run dshuffle (its reply was {fields!r:.200})")


def rows_from_fields(fields: object, sender: str) -> RowsReply:
    """The rows of which :func:`to_fields` made fields. The parameters are those of :func:`from_fields`.

    Raises
    ------
    ExchangeError
        If they are not rows, or other arrays than the kernels were compiled for. The sink checks their shapes.
    OSError
        If this process cannot map them.
    """
    read = _converted(fields, _RowFields, sender)
    if read.place is not None:
        rows, checksums = mapped(read.place)
    elif read.packed is not None:
        rows, checksums = _unpacked(read.packed, *read.shape)
    else:
        rows, checksums = _checked("rows", read.rows, np.uint8, 2), _checked("checksums", read.checksums, np.uint32, 1)
    present = None if read.present is None else _checked("found", read.present, np.bool_, 1)
    return RowsReply(rows, checksums, read.acknowledge, None, present, read.link_seconds)


def _converted(fields: object, kind: type[T], sender: str) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ExchangeError(f"{sender} sent a reply that cannot be read: {error}") from error


def _unpacked(packed: bytes, n_rows: int, row_nbytes: int) -> tuple[ByteMatrix, Checksums]:
    buffer = bytearray(packed)  # kernels are compiled for arrays that can be written
    first = n_rows * CHECKSUM_NBYTES + -n_rows * CHECKSUM_NBYTES % WORD
    if n_rows < 0 or row_nbytes < 0 or len(buffer) != first + n_rows * row_nbytes:
        raise ExchangeError(f"a message has rows of shape {(n_rows, row_nbytes)}, but {len(buffer)} bytes")
    checksums = np.frombuffer(buffer, np.uint32, n_rows)
    return np.frombuffer(buffer, np.uint8, n_rows * row_nbytes, first).reshape(n_rows, row_nbytes), checksums


def _checked(name: str, array: NDArray[Any] | None, dtype: type[np.generic], ndim: int) -> NDArray[Any]:
    if array is None:
        raise ExchangeError(f"a message has no {name}")
    if array.dtype != dtype or array.ndim != ndim or not array.flags.c_contiguous:
        raise ExchangeError(
            f"a message has {name} of dtype {array.dtype} in {array.ndim} dimensions; contiguous "
            f"{np.dtype(dtype)} in {ndim} was expected"
        )
    return array
