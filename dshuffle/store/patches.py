"""Patches: samples that are boxes of a row, such as regions of a map or tiles of an image."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.store.stored_array import ArrayInfo

Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class PatchedDim:
    """A dimension that is cut into patches.

    Parameters
    ----------
    name, length
        The dimension.
    size, stride
        Length of a patch, and distance between the beginnings of two patches.
    """

    name: str
    length: int
    size: int
    stride: int

    def __post_init__(self) -> None:
        if self.size > self.length:
            raise InvalidParameter.of(self.name, self.size, f"at most {self.length}, the length of this dimension")

    @property
    def begins(self) -> NDArray[np.int64]:
        """Where the patches begin that lie within the dimension."""
        return np.arange(0, self.length - self.size + 1, self.stride)


@dataclass(frozen=True, slots=True)
class Patches:
    """How rows are cut into patches. Patch p of row r is item ``r * n_patches + p``.

    Parameters
    ----------
    dims
        The dimensions that are cut. Patches are numbered as if they were the items of an array with these dimensions.
    """

    dims: tuple[PatchedDim, ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int], stride: int | Mapping[str, int] | None, lengths: Mapping[str, int]) -> Self:
        """Check sizes and strides for the dimensions of a dataset.

        Raises
        ------
        InvalidParameter
            If a dimension does not exist, or a size or a stride is not allowed.
        """
        if not lengths:
            hint = "Give their arrays dimension_names, or write the dataset from xarray."
            raise InvalidParameter.because("patches", "the dimensions of samples have no names", hint)
        allowed = f"the length of a patch along one of the dimensions {', '.join(sorted(lengths))}"
        if not sizes:
            raise InvalidParameter.of("patches", "()", allowed)
        if unknown := next((name for name in sizes if name not in lengths), None):
            raise InvalidParameter.of(unknown, sizes[unknown], f"left out, or {allowed}")
        strides = stride if isinstance(stride, Mapping) else {} if stride is None else dict.fromkeys(sizes, stride)
        if unknown := next((name for name in strides if name not in sizes), None):
            raise InvalidParameter.of("stride", unknown, f"one of the dimensions {', '.join(sizes)}")
        dims = []
        for name, value in sizes.items():
            size = as_integer(name, value, 1)
            step = as_integer(f"stride[{name!r}]", strides.get(name, size), 1)
            dims.append(PatchedDim(name, lengths[name], size, step))
        return cls(tuple(dims))

    @property
    def n_patches(self) -> int:
        """Number of patches of a row."""
        return math.prod(len(dim.begins) for dim in self.dims)

    @property
    def overlap(self) -> bool:
        """Whether patches of a row have items in common."""
        return any(dim.stride < dim.size and len(dim.begins) > 1 for dim in self.dims)

    def info(self, row: ArrayInfo, names: Sequence[str | None]) -> ArrayInfo:
        """An array whose samples are patches, from the array whose samples are rows with these dimensions."""
        sizes = {dim.name: dim.size for dim in self.dims}
        shape = tuple(sizes.get(name or "", length) for name, length in zip(names, row.shape, strict=True))
        shard = None if row.shard_rows is None else row.shard_rows * self.n_patches
        return dataclasses.replace(row, shape=shape, chunk_rows=row.chunk_rows * self.n_patches, shard_rows=shard)

    def cut(self, names: Sequence[str | None], shape: tuple[int, ...], chunks: tuple[int, ...]) -> Cut:
        """How the rows of an array are cut that have these dimensions, this shape and these chunks."""
        return _cut(self, tuple(names), shape, chunks)

    def identity(self, whole: str) -> str:
        """Identity of the dataset of patches, from that of the dataset that is cut."""
        dims = [(dim.name, dim.size, dim.stride) for dim in self.dims]
        return hashlib.sha256(f"{whole}patches{dims}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """The patches of one array's rows.

    Parameters
    ----------
    shape, sizes
        Shapes of a row and of a patch.
    origins
        ``(n_patches, len(shape))`` int64, the first item of each patch.
    chunks
        Shape of a chunk along the same axes.

    Examples
    --------
    >>> cut = Cut((2, 4), (2, 2), np.array([[0, 0], [0, 2]]), (2, 4))
    >>> cut.runs(4, (slice(0, 2), slice(0, 4)))  # two runs of two items of 4 bytes, 16 bytes apart
    (array([ 0, 16]), 8, array([0, 8]))
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    origins: NDArray[np.int64]
    chunks: tuple[int, ...]
    _boxes: NDArray[np.int64] = field(init=False)
    _box_of: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        chunks, shape = np.array(self.chunks, np.int64), np.array(self.shape, np.int64)
        first = self.origins // chunks * chunks
        last = np.minimum(-(-(self.origins + np.array(self.sizes, np.int64)) // chunks) * chunks, shape)
        boxes, box_of = np.unique(np.hstack([first, last]), axis=0, return_inverse=True)
        object.__setattr__(self, "_boxes", boxes)
        object.__setattr__(self, "_box_of", box_of.reshape(-1))

    @property
    def n_patches(self) -> int:
        """Number of patches of a row."""
        return len(self.origins)

    @property
    def n_items(self) -> int:
        """Number of items in a patch."""
        return math.prod(self.sizes)

    @property
    def whole(self) -> Box:
        """The box that is a whole row."""
        return tuple(slice(0, length) for length in self.shape)

    def boxes(self, items: NDArray[np.int64]) -> Iterator[tuple[Box, NDArray[np.int64]]]:
        """Boxes of whole chunks, and which of the items have their patches in them."""
        box_of = self._box_of[items % self.n_patches]
        order = np.argsort(box_of, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(box_of[order])) + 1):
            first, last = self._boxes[box_of[group[0]]].reshape(2, -1).tolist()
            yield tuple(map(slice, first, last)), group

    def runs(self, itemsize: int, box: Box) -> tuple[NDArray[np.int64], int, NDArray[np.int64]]:
        """Where the bytes of patches are in a box of a row.

        Returns
        -------
        offsets, nbytes
            Distance of each run of contiguous bytes from the first byte of a patch, and length of the runs.
        begins
            ``(n_patches,)`` first byte of each patch. It means nothing for patches that are not in the box.
        """
        lengths = tuple(side.stop - side.start for side in box)
        offsets, nbytes, strides = _runs(self.sizes, lengths, itemsize)
        origin = np.array([side.start for side in box], np.int64)
        return offsets, nbytes, (self.origins - origin) @ np.array(strides, np.int64)


@functools.lru_cache(maxsize=64)
def _cut(patches: Patches, names: tuple[str | None, ...], shape: tuple[int, ...], chunks: tuple[int, ...]) -> Cut:
    dims = {dim.name: dim for dim in patches.dims}
    grid = dict(zip(dims, np.meshgrid(*(dim.begins for dim in patches.dims), indexing="ij"), strict=True))
    origins = np.zeros((patches.n_patches, len(shape)), np.int64)
    for axis, name in enumerate(names):
        if name in grid:
            origins[:, axis] = grid[name].ravel()
    sizes = tuple(dims[name].size if name in dims else length for name, length in zip(names, shape, strict=True))
    return Cut(shape, sizes, origins, chunks)


def box_items(box: Box) -> int:
    """Number of items in a box."""
    return math.prod(side.stop - side.start for side in box)


@functools.lru_cache(maxsize=256)
def _runs(
    sizes: tuple[int, ...], lengths: tuple[int, ...], itemsize: int
) -> tuple[NDArray[np.int64], int, tuple[int, ...]]:
    strides = [itemsize] * len(lengths)
    for axis in range(len(lengths) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * lengths[axis + 1]
    inner = len(sizes)  # axes from here on are whole, so they belong to one run
    while inner and sizes[inner - 1] == lengths[inner - 1]:
        inner -= 1
    inner = max(0, inner - 1)
    nbytes = itemsize * math.prod(sizes[inner:])
    offsets = np.zeros(1, np.int64)
    for size, stride in zip(sizes[:inner], strides[:inner], strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
    return offsets, nbytes, tuple(strides)
