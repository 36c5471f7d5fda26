"""The rows of a partition, in memory or in a file, for as long as its task runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import StaleEpoch
from dshuffle.exchange.row_file import RowFile
from dshuffle.rows import ByteMatrix, RowLayout

T = TypeVar("T", bound=np.generic)

READ_AHEAD = 8 * 2**20
"""Bytes of rows on a disk that are read ahead of the batches."""


class PartitionRows:
    """A worker's rows, of which each array is a column.

    Parameters
    ----------
    layout, rows
        Row layout and rows.
    file
        The file of the rows, if they are on a disk.
    owner
        Name of the partition, for the error after its task has ended.
    """

    def __init__(self, layout: RowLayout, rows: ByteMatrix, file: RowFile | None, owner: str) -> None:
        self.layout = layout
        self._rows: ByteMatrix | None = rows
        self._records: NDArray[np.void] | None = layout.records(rows)
        self._file = file
        self._owner = owner

    def valid(self) -> ByteMatrix:
        """The rows, if the task has not ended.

        Raises
        ------
        StaleEpoch
            If it has.
        """
        if self._rows is None:
            raise StaleEpoch(
                f"{self._owner} was used after its task had ended; copy the arrays that you need before the task "
                "returns"
            )
        return self._rows

    def close(self) -> None:
        """Let go of the rows, because the task has ended."""
        self._rows = self._records = self._file = None

    def dtype(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Dtype and per-sample shape of an array."""
        column, encoding = self._column(name), self.layout.encoding(name)
        return column.dtype if encoding is None else np.dtype(encoding.dtype), column.shape[1:]

    def take(self, slots: NDArray[np.int64], names: Iterable[str]) -> dict[str, NDArray[Any]]:
        """Copy rows: name -> array of shape ``(k, *per-sample shape)``."""
        columns = {name: self._column(name) for name in names}
        if self._file is None:
            return {name: self._decoded(name, column[slots]) for name, column in columns.items()}
        stored = self._read(self._file, slots, list(columns))  # names may be an iterator, which has ended here
        return {name: self._decoded(name, values) for name, values in stored.items()}

    def matrix(self, name: str, slots: NDArray[np.int64]) -> tuple[NDArray[Any], int]:
        """An array of numbers as columns of a read-only matrix with all rows, and the first of these columns.

        Numbers that are encoded, or not in the machine's byte order, are decoded into a copy. Only its rows ``slots``
        have values.
        """
        rows, (dtype, _) = self.valid(), self.dtype(name)
        if self.layout.encoding(name) is not None or not dtype.isnative:
            values = self.take(slots, [name])[name].reshape(len(slots), -1)
            decoded = np.empty((len(rows), values.shape[1]), dtype.newbyteorder("="))
            decoded[slots] = values  # in the slots of the other arrays
            return read_only(decoded), 0
        return self.layout.matrix(read_only(rows), name)

    @property
    def read_ahead(self) -> int:
        """Number of rows to read ahead of what is taken; 0 if they are in memory."""
        return 0 if self._file is None else max(1, READ_AHEAD // max(1, self.layout.nbytes))

    def will_need(self, slots: NDArray[np.int64]) -> None:
        """Begin to read rows that will be taken soon."""
        if self._file is not None:
            self._file.will_need(slots)

    def _read(self, file: RowFile, slots: NDArray[np.int64], names: Sequence[str]) -> dict[str, NDArray[Any]]:
        most = self.read_ahead
        rows = self.layout.empty(min(most, len(slots)))
        if len(slots) <= most:
            file.read(slots, rows)
            # The column of a dataset with one array is contiguous already.
            return {name: np.ascontiguousarray(self.layout.column(rows, name)) for name in names}
        columns = {name: self.layout.column(rows, name) for name in names}
        arrays = {name: np.empty((len(slots), *column.shape[1:]), column.dtype) for name, column in columns.items()}
        for first in range(0, len(slots), most):
            block = slots[first : first + most]
            file.will_need(block)
            file.read(block, rows[: len(block)])
            for name, column in columns.items():
                arrays[name][first : first + most] = column[: len(block)]
        return arrays

    def _decoded(self, name: str, stored: NDArray[Any]) -> NDArray[Any]:
        encoding = self.layout.encoding(name)
        return stored if encoding is None else encoding.decode(stored, name)

    def _column(self, name: str) -> NDArray[Any]:
        self.valid()
        assert self._records is not None
        if name not in self.layout.names:
            raise KeyError(f"no array {name!r} in this dataset; it has {sorted(self.layout.names)}")
        return self._records[name]


def read_only(array: NDArray[T]) -> NDArray[T]:
    """A view that cannot be written, and whose base cannot be written either: other tasks use the same memory."""
    readable: Any = array
    return np.asarray(memoryview(readable).toreadonly())
