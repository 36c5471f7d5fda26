"""Arrays outside a dataset that are read in ascending slabs and may be larger than memory."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import DatasetError, DShuffleError, InvalidParameter

# Streams are read in blocks of about this many bytes; larger blocks are not faster.
_BLOCK_NBYTES = 4 << 20


class RowSource(ABC):
    """An array that :func:`~dshuffle.store.create_dataset` reads in slabs of ascending rows.

    Parameters
    ----------
    origin
        File or URL, for messages and to avoid overwriting the source.
    shape
        Shape of the array, ``(n_samples, ...)``.
    dtype
        Item type, as read.

    Attributes
    ----------
    classes
        Names of the classes that the items number; empty if they do not.
    has_url
        Whether the origin is a file or URL. Otherwise it is a store object, and nobody knows where that keeps its data.
    """

    classes: tuple[str, ...] = ()
    has_url = True

    def __init__(self, origin: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.origin, self.shape, self.dtype = origin, shape, dtype

    @property
    def ndim(self) -> int:
        """Number of axes, including the sample axis."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    @abstractmethod
    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """Read the rows of a slice without a step. The array must not be written to."""


def block_rows(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return the number of rows in a block of a stream: about 4 MiB, at least one row."""
    return max(1, _BLOCK_NBYTES // max(1, dtype.itemsize * math.prod(shape[1:])))


class StreamSource(RowSource):
    """Rows of a stream that can only be read from its beginning, such as a file of Parquet.

    Reading ascending slabs reads the stream once. Reading an earlier slab opens the stream again with ``blocks``, which
    returns an iterator over arrays of consecutive rows. Its exceptions become errors that name the origin.
    """

    def __init__(
        self,
        origin: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        blocks: Callable[[], Iterator[NDArray[Any]]],
    ) -> None:
        super().__init__(origin, shape, dtype)
        self._open = blocks
        self._blocks: Iterator[NDArray[Any]] = iter(())
        self._none = self._rest = np.empty((0, *shape[1:]), dtype)
        # Index of the first row of the rest. It is beyond the end at first, so that the first slab opens the stream.
        self._at = len(self) + 1

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(len(self))
        if start < self._at:
            self._blocks, self._rest, self._at = self._open(), self._none, 0
        while self._at < start:
            self._take(start - self._at)
        if 0 < stop - start <= len(self._rest):  # no copy if it lies within a block
            return self._take(stop - start)
        slab = np.empty((stop - start, *self.shape[1:]), self.dtype)
        while self._at < stop:
            done = self._at - start
            piece = self._take(stop - self._at)
            slab[done : done + len(piece)] = piece
            del piece  # free the block before the next one is read
        return slab

    def _take(self, most: int) -> NDArray[Any]:
        """Return the next rows, at least one and at most ``most``."""
        if not self._fill():
            raise DatasetError(
                f"{self.origin} ended after {self._at} of {len(self)} rows; was it changed while being read?"
            )
        piece, self._rest = self._rest[:most], self._rest[most:] if len(self._rest) > most else self._none
        self._at += len(piece)
        # At the end, read on to where a stream closes its file and may verify a checksum.
        if self._at == len(self) and self._fill():
            raise DatasetError(f"{self.origin} has more than {len(self)} rows; was it changed while being read?")
        return piece

    def _fill(self) -> bool:
        """Read blocks until there are rows; False at the end of the stream."""
        try:
            while not len(self._rest):
                if (block := next(self._blocks, None)) is None:
                    return False
                self._rest = block
        except (DShuffleError, MemoryError):
            raise
        except Exception as exc:
            raise unreadable(self.origin, exc) from exc
        return True


class _Watched(RowSource):
    def __init__(self, source: RowSource, read: Callable[[int], None]) -> None:
        super().__init__(source.origin, source.shape, source.dtype)
        self.classes, self.has_url = source.classes, source.has_url
        self._source, self._read = source, read

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        slab = self._source[rows]
        self._read(len(slab))
        return slab


def watched(sources: Mapping[str, RowSource], progress: Callable[[int, int, str], None]) -> dict[str, RowSource]:
    """Wrap sources so that they call ``progress(rows read, total rows, text)``, counting the rows of all arrays."""
    total, done = sum(map(len, sources.values())), 0

    def reporter(name: str) -> Callable[[int], None]:
        def read(n_rows: int) -> None:
            nonlocal done
            done += n_rows
            progress(done, total, f"rows read: {name}")

        return read

    return {name: _Watched(source, reporter(name)) for name, source in sources.items()}


def files_below(folder: str, hidden: str, key: Callable[[str], Any], above: tuple[str, ...] = ()) -> list[str]:
    """The files at any depth, folder by folder, in the order of their names.

    Names that begin with a character of ``hidden`` are left out. Links to folders are followed, except those that lead
    back to a folder above.
    """
    if (real := os.path.realpath(folder)) in above:
        return []
    files: list[str] = []
    for name in sorted((name for name in os.listdir(folder) if name[0] not in hidden), key=key):
        path = os.path.join(folder, name)
        files += files_below(path, hidden, key, (*above, real)) if os.path.isdir(path) else [path]
    return files


def complete(label: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return the values of a column of a table, in which NaN and NaT mean a missing value as nulls do."""
    if values.dtype.kind in "fcmM" and np.isnan(values).any():
        raise missing(label, "NaT" if values.dtype.kind in "mM" else "NaN")
    return values


def missing(label: str, what: str) -> InvalidParameter:
    """Build the error for a column with missing values."""
    hint = "Fill the missing values, or leave the column out. Arrays that are not columns of a table may have NaN."
    return InvalidParameter.because(label, f"it contains {what}", hint)


def unreadable(origin: str, error: Exception) -> DatasetError:
    """Build the error for a file that another library cannot read, with the first line of that library's message."""
    words = str(error).strip().splitlines() or [""]
    return DatasetError(f"cannot read {origin}: {type(error).__name__}: {words[0]}")
