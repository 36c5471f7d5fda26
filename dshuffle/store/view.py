"""What the samples of a dataset are: the rows of its stored arrays, windows or patches of rows, or some of these.

Windows are samples made of several consecutive rows, such as steps of time. Patches are boxes of a row, such as regions
of a map or tiles of an image. Samples are numbered before the selection. With patches, every row has ``n_patches`` of
these numbers: its items.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_indices, as_integer, as_ratio
from dshuffle.errors import InvalidParameter
from dshuffle.store.stored_array import ArrayInfo, StoredArray

Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class PatchedDim:
    """A dimension that is cut into patches.

    Parameters
    ----------
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
        """Check sizes and strides for the dimensions of a dataset."""
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


Offsets = int | Sequence[int]


@dataclass(frozen=True, slots=True)
class Windows:
    """Which rows of each array form a sample. The row that the offsets count from is the sample's anchor.

    Parameters
    ----------
    offsets
        ``(name, offset or offsets)`` of each array, in the order of their names. An array with a single offset keeps
        the shape of its samples. Others get an axis in front.
    """

    offsets: tuple[tuple[str, int | tuple[int, ...]], ...]

    @classmethod
    def of(cls, offsets: Offsets | Mapping[str, Offsets], names: Iterable[str]) -> Self:
        """Check offsets for all arrays, or for some by name. The others keep the row of the anchor."""
        array_names = sorted(names)
        if not isinstance(offsets, Mapping):
            offsets = dict.fromkeys(array_names, tuple(offsets) if isinstance(offsets, Iterable) else offsets)
        if unknown := [name for name in offsets if name not in array_names]:
            raise InvalidParameter.of("offsets", unknown[0], f"one of the arrays {', '.join(array_names)}")
        return cls(tuple((name, _checked(name, offsets.get(name, 0))) for name in array_names))

    def of_array(self, name: str) -> tuple[int, ...]:
        """Offsets of the rows of an array."""
        own_offsets = dict(self.offsets)[name]
        return (own_offsets,) if isinstance(own_offsets, int) else own_offsets

    def info(self, name: str, row: ArrayInfo) -> ArrayInfo:
        """An array whose samples are windows, from the array whose samples are rows."""
        own_offsets = dict(self.offsets)[name]
        return row if isinstance(own_offsets, int) else dataclasses.replace(row, shape=(len(own_offsets), *row.shape))

    @property
    def before(self) -> int:
        """Rows before the first anchor."""
        return -min({0, *self._distances})

    def n_anchors(self, n_rows: int) -> int:
        """Number of rows whose windows lie within the arrays."""
        n_anchors = n_rows - self.before - max({0, *self._distances})
        if n_anchors < 1:
            hint = "Use smaller offsets."
            raise InvalidParameter.because("offsets", f"no window fits into {n_rows} rows", hint)
        return n_anchors

    def disjoint(self, anchors: NDArray[np.int64], other_anchors: NDArray[np.int64], n_rows: int) -> NDArray[np.bool_]:
        """Whether the windows of anchors share no row with those of other anchors: ``(len(anchors),)``."""
        used, shared = np.zeros(n_rows, np.bool_), np.zeros(len(anchors), np.bool_)
        for offset in self._distances:
            used[other_anchors + offset] = True
        for offset in self._distances:
            shared |= used[anchors + offset]
        return ~shared

    def identity(self, stored: str) -> str:
        """Identity of the dataset of windows, from that of the stored dataset."""
        return hashlib.sha256(f"{stored}{self.offsets}".encode()).hexdigest()[:32]

    @property
    def _distances(self) -> set[int]:
        return {offset for name, _ in self.offsets for offset in self.of_array(name)}


def _checked(name: str, offsets: Offsets) -> int | tuple[int, ...]:
    label = f"offsets[{name!r}]"
    if not isinstance(offsets, Iterable) or getattr(offsets, "ndim", 1) == 0:
        return as_integer(label, offsets)
    own_offsets = tuple(as_integer(label, offset) for offset in offsets)
    if not own_offsets or len(set(own_offsets)) < len(own_offsets):
        raise InvalidParameter.of(label, offsets, "an integer, or distinct integers")
    return own_offsets


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Some samples of a stored dataset, in ascending order.

    Parameters
    ----------
    n_stored
        Number of samples of the stored dataset.
    bits
        One bit for each of them, packed: ``(ceil(n_stored / 8),)`` uint8.
    """

    n_stored: int
    bits: NDArray[np.uint8]

    @classmethod
    def of(cls, n_stored: int, ids: NDArray[np.int64]) -> Self:
        """The selection of distinct samples."""
        mask = np.zeros(n_stored, np.bool_)
        mask[ids] = True
        return cls(n_stored, np.packbits(mask))

    @property
    def ids(self) -> NDArray[np.int64]:
        """Ascending ids of the samples in the stored dataset."""
        return np.flatnonzero(np.unpackbits(self.bits, count=self.n_stored))

    def identity(self, stored: str) -> str:
        """Identity of the part, from that of the stored dataset."""
        return hashlib.sha256(stored.encode() + self.bits.tobytes()).hexdigest()[:32]


def wanted_samples(samples: ArrayLike, n_samples: int) -> NDArray[np.int64]:
    """Check a mask or ids, and return ascending ids."""
    array = np.asarray(samples)
    if array.dtype == np.bool_:
        if array.shape != (n_samples,):
            raise InvalidParameter.of("samples.shape", array.shape, f"({n_samples},) for a mask")
        ids = np.flatnonzero(array)
    else:
        ids = np.unique(as_indices("samples", array, n_samples, "samples"))
        if len(ids) < array.size:
            raise InvalidParameter.because("samples", "some ids are repeated", "Select each sample once.")
    if not len(ids):
        raise InvalidParameter.because("samples", "it selects nothing", "Select at least one sample.")
    return ids


def split_samples(
    n_samples: int, fraction: float, groups: NDArray[np.int64] | None, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide samples at random into two parts.

    Parameters
    ----------
    groups
        ``(n_samples,)`` numbers. Samples with the same number stay together. None to draw single samples.
    """
    ratio = as_ratio("fraction", fraction, Fraction(0))
    rng = np.random.default_rng(as_integer("seed", seed, 0))
    if groups is None:
        order, sizes = rng.permutation(n_samples), np.ones(n_samples, np.int64)
    else:
        _, groups, counts = np.unique(groups, return_inverse=True, return_counts=True)
        order = rng.permutation(len(counts))
        sizes = counts[order]
    # Groups in random order go to the first part as long as at least half of each fits.
    first_part = np.cumsum(sizes) - sizes / 2 <= float(ratio * n_samples)
    chosen = order[first_part]
    mask = np.zeros(n_samples, np.bool_)
    if groups is None:
        mask[chosen] = True
    else:
        mask = np.isin(groups, chosen)
    return _both_parts(mask, fraction)


def split_strata(labels: NDArray[Any], fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide samples at random, so that the first part has the same fraction of the samples of every label.

    Parameters
    ----------
    labels
        ``(n_samples,)`` label of each sample.
    """
    ratio = as_ratio("fraction", fraction, Fraction(0))
    rng = np.random.default_rng(as_integer("seed", seed, 0))
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    # The first part gets evenly spread samples of this order. The random offset makes all samples equally likely.
    places = np.arange(len(labels) + 1) * float(ratio) + rng.random()
    mask = np.zeros(len(labels), np.bool_)
    mask[order] = np.diff(np.floor(places)) > 0
    return _both_parts(mask, fraction)


def split_at_time(times: NDArray[Any], fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide samples into earlier and later ones. Samples of the same time stay together.

    Parameters
    ----------
    times
        ``(n_samples,)`` times, or numbers that grow with time.
    """
    ratio = as_ratio("fraction", fraction, Fraction(0))
    size = max(1, round(ratio * len(times)))
    last = np.partition(times, size - 1)[size - 1]
    earlier, up_to_last = times < last, times <= last
    nearer = abs(np.count_nonzero(up_to_last) - size) <= abs(np.count_nonzero(earlier) - size)
    return _both_parts(up_to_last if nearer else earlier, fraction)


def _both_parts(first: NDArray[np.bool_], fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ids, other_ids = np.flatnonzero(first), np.flatnonzero(~first)
    if not len(ids) or not len(other_ids):
        raise InvalidParameter.of("fraction", fraction, "a fraction that leaves samples in both parts")
    return ids, other_ids


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The samples of a dataset, as rows of its stored arrays.

    Parameters
    ----------
    n_rows
        Length of the stored arrays.
    windows
        The rows of a sample around its anchor; None if each row is a sample.
    patches
        The parts of rows that are samples; None if they are not divided.
    selection
        Some of these samples; None for all.
    """

    n_rows: int
    windows: Windows | None = None
    patches: Patches | None = None
    selection: Selection | None = None
    _ids: NDArray[np.int64] | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", None if self.selection is None else self.selection.ids)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the ids, which are 64 times as long as the selection.
        return View, (self.n_rows, self.windows, self.patches, self.selection)

    @property
    def is_whole(self) -> bool:
        """Whether the samples are all stored rows."""
        return self.windows is None and self.patches is None and self.selection is None

    @property
    def n_patches(self) -> int:
        """Number of samples that a row is divided into."""
        return 1 if self.patches is None else self.patches.n_patches

    @property
    def n_items(self) -> int:
        """Number of items of all rows."""
        return self.n_rows * self.n_patches

    @property
    def n_whole(self) -> int:
        """Number of samples before the selection."""
        n_anchors = self.n_rows if self.windows is None else self.windows.n_anchors(self.n_rows)
        return n_anchors * self.n_patches

    @property
    def n_samples(self) -> int:
        """Number of samples."""
        return self.n_whole if self._ids is None else len(self._ids)

    def identity(self, stored: str) -> str:
        """Identity of the samples, from that of the stored dataset."""
        whole = stored if self.windows is None else self.windows.identity(stored)
        whole = whole if self.patches is None else self.patches.identity(whole)
        return whole if self.selection is None else self.selection.identity(whole)

    def window(self, name: str) -> tuple[int, ...]:
        """Distances of the rows of an array from the anchor of a sample."""
        return (0,) if self.windows is None else self.windows.of_array(name)

    @property
    def overlapping(self) -> str:
        """What overlaps, so that single samples cannot be divided; empty if nothing does."""
        if self.windows is not None:
            return "windows"
        return "patches" if self.patches is not None and self.patches.overlap else ""

    def info(self, name: str, source: StoredArray) -> ArrayInfo:
        """Dtype, shape and chunks of an array, as one of samples."""
        info = source.info if self.patches is None else self.patches.info(source.info, source.dims)
        return info if self.windows is None else self.windows.info(name, info)

    def cut(self, source: StoredArray) -> Cut | None:
        """How the rows of an array are divided; None if they are not."""
        if self.patches is None:
            return None
        return self.patches.cut(source.dims, source.info.shape, source.chunks_across)

    def items(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Items of samples, or of the anchors of their windows."""
        items = samples if self._ids is None else self._ids[samples]
        return items + self._before

    def within(self, first: int, last: int) -> NDArray[np.int64]:
        """The samples whose items, or those of their anchors, are from ``first`` to ``last`` (exclusive)."""
        first, last = (min(max(0, item - self._before), self.n_whole) for item in (first, last))
        if self._ids is not None:
            first, last = np.searchsorted(self._ids, [first, last]).tolist()
        return np.arange(first, last)

    def select(self, samples: ArrayLike) -> View:
        """Some of the samples: a mask, or distinct ids."""
        ids = wanted_samples(samples, self.n_samples)
        selection = Selection.of(self.n_whole, ids if self._ids is None else self._ids[ids])
        return View(self.n_rows, self.windows, self.patches, selection)

    def apart(self, samples: NDArray[np.int64], other_samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the windows of samples share no row with those of other samples: ``(len(samples),)``."""
        if self.windows is None:
            return np.ones(len(samples), np.bool_)
        anchors, other_anchors = (self.items(ids) // self.n_patches for ids in (samples, other_samples))
        return self.windows.disjoint(anchors, other_anchors, self.n_rows)

    @property
    def _before(self) -> int:
        """Items of the rows before the first anchor."""
        return 0 if self.windows is None else self.windows.before * self.n_patches
