"""Arrays that are read in ascending slabs and may be larger than memory."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import DatasetError, DShuffleError, InvalidParameter

# Streams are read in blocks of about this many bytes; larger blocks are not faster.
_BLOCK_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class RowSource:
    """An array that :func:`~dshuffle.store.create_dataset` reads in slabs of ascending rows.

    Parameters
    ----------
    origin
        File or URL, for messages and to avoid overwriting the source.
    shape
        Shape of the array, ``(n_samples, ...)``.
    read
        Function that reads the rows of a slice without a step.
    classes
        Names of the classes that the items number; empty if they do not.
    has_url
        Whether the origin is a file or URL. Otherwise it is a store object, and nobody knows where that keeps its data.
    """

    origin: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[slice], NDArray[Any]]
    classes: tuple[str, ...] = ()
    has_url: bool = True

    @property
    def ndim(self) -> int:
        """Number of axes, including the sample axis."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """Read the rows of a slice without a step. The array must not be written to."""
        return self.read(rows)


def block_rows(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """Return the number of rows in a block of a stream: about 4 MiB, at least one row."""
    return max(1, _BLOCK_NBYTES // max(1, dtype.itemsize * math.prod(shape[1:])))


def stream(
    origin: str, shape: tuple[int, ...], dtype: np.dtype[Any], blocks: Callable[[], Iterator[NDArray[Any]]]
) -> RowSource:
    """Rows of a stream that can only be read from its beginning, such as a file of Parquet.

    Reading ascending slabs reads the stream once. Reading an earlier slab opens the stream again with ``blocks``, which
    returns an iterator over arrays of consecutive rows. Its exceptions become errors that name the origin.
    """
    n_rows, none = shape[0] if shape else 0, np.empty((0, *shape[1:]), dtype)
    opened: Iterator[NDArray[Any]] = iter(())
    # Rows that have been read, and the index of the first of them: the first slab opens the stream.
    rest, at = none, n_rows + 1

    def fill() -> bool:
        """Read blocks until there are rows; False at the end of the stream."""
        nonlocal rest
        try:
            while not len(rest):
                if (block := next(opened, None)) is None:
                    return False
                rest = block
        except (DShuffleError, MemoryError):
            raise
        except Exception as exc:
            raise unreadable(origin, exc) from exc
        return True

    def read(rows: slice) -> NDArray[Any]:
        nonlocal opened, rest, at
        start, stop, _ = rows.indices(n_rows)
        if start < at:
            opened, rest, at = blocks(), none, 0
        pieces = [none]
        while at < max(start, stop):
            if not fill():
                raise DatasetError(f"{origin} ended after {at} of {n_rows} rows; was it changed while being read?")
            size = min(len(rest), (stop if at >= start else start) - at)
            if at >= start:
                pieces.append(rest[:size])
            rest, at = rest[size:], at + size
            # At the end, read on to where a stream closes its file and may verify a checksum.
            if at == n_rows and fill():
                raise DatasetError(f"{origin} has more than {n_rows} rows; was it changed while being read?")
        return pieces[1] if len(pieces) == 2 else np.concatenate(pieces)

    return RowSource(origin, shape, dtype, read)


def watched(sources: Mapping[str, RowSource], progress: Callable[[int, int, str], None]) -> dict[str, RowSource]:
    """Wrap sources so that they call ``progress(rows read, total rows, text)``, counting the rows of all arrays."""
    total, done = sum(map(len, sources.values())), 0

    def read(name: str, rows: slice) -> NDArray[Any]:
        nonlocal done
        slab = sources[name][rows]
        done += len(slab)
        progress(done, total, f"rows read: {name}")
        return slab

    return {name: dataclasses.replace(source, read=partial(read, name)) for name, source in sources.items()}


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
