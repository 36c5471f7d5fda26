"""NumPy files as sources: ``.npy`` is memory-mapped for each slab, members of ``.npz`` are read as streams."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dshuffle.errors import DatasetError, DShuffleError, InvalidParameter
from dshuffle.store.sources.source import RowSource, StreamSource, block_rows, unreadable

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def npy_arrays(path: str) -> dict[str, RowSource]:
    """Open the array of a ``.npy`` file, named after the file."""
    return {Path(path).stem: _Npy(path)}


class _Npy(RowSource):
    def __init__(self, path: str) -> None:
        whole = _mapped(path)
        super().__init__(path, whole.shape, whole.dtype)

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        # Copy the rows and map each slab separately: mapped pages count as process memory while the mapping exists.
        return np.array(_mapped(self.origin)[rows], order="C")


def _mapped(path: str) -> NDArray[Any]:
    try:
        return npy.open_memmap(path, mode="r")
    except ValueError as exc:
        if "Python objects" in str(exc):
            raise DatasetError(f"{path} contains Python objects, which cannot be read. Save numbers") from exc
        raise unreadable(path, exc) from exc
    except Exception as exc:
        raise unreadable(path, exc) from exc


def npz_arrays(path: str) -> dict[str, RowSource]:
    """Open the members of a ``.npz`` file, compressed or not."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {info.filename.removesuffix(".npy"): _member(path, archive, info) for info in archive.infolist()}
    except DShuffleError:
        raise
    except Exception as exc:
        raise unreadable(path, exc) from exc


def _member(path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> RowSource:
    name = info.filename
    with archive.open(info) as stream:
        shape, fortran_order, dtype = _header(path, stream)
    if fortran_order and len(shape) > 1:
        raise InvalidParameter.because(
            f"{path}: array {name.removesuffix('.npy')!r}",
            "it is in Fortran order, but a .npz member is read row by row",
            "Save numpy.ascontiguousarray(...), or a .npy file.",
        )

    def blocks() -> Iterator[NDArray[Any]]:
        with zipfile.ZipFile(path) as archive, archive.open(name) as stream:
            _header(path, stream)
            n_rows, rows = shape[0], block_rows(shape, dtype)
            for start in range(0, n_rows, rows):
                yield _read(stream, (min(rows, n_rows - start), *shape[1:]), dtype)
            if stream.read(1):
                raise ValueError("the array is longer than its header says")

    return StreamSource(path, shape, dtype, blocks)


def _header(path: str, stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(stream)
    if version not in _HEADERS:
        raise DatasetError(f"{path} has an array in format {version}; only (1, 0) and (2, 0) are supported")
    return _HEADERS[version](stream)


def _read(stream: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    nbytes = dtype.itemsize * math.prod(shape)
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise EOFError("the array is truncated")
    return np.frombuffer(data, dtype).reshape(shape)
