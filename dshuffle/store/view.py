"""What the samples of a dataset are: the rows of its stored arrays, windows or patches of rows, or some of these.

Windows are samples made of several consecutive rows, such as steps of time. Patches are boxes of a row, such as regions
of a map or tiles of an image. Samples are numbered before the selection. Every row has ``n_patches`` of these numbers:
its items. Patch p of row r is item ``r * n_patches + p``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_indices, as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.store.metadata import digest_of
from dshuffle.store.reader import ArrayInfo, StoredArray

Box = tuple[slice, ...]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]
Offsets = int | Sequence[int]

ORDER = "Make windows of the whole dataset first, then patches, and parts of them afterwards."


class PatchedDim(NamedTuple):
    """A dimension that is cut into patches of a size, whose beginnings have a distance of ``stride``."""

    name: str
    length: int
    size: int
    stride: int

    @property
    def begins(self) -> Ids:
        """Where the patches begin that lie within the dimension."""
        return np.arange(0, self.length - self.size + 1, self.stride)


@dataclass(frozen=True, eq=False)
class View:
    """The samples of a dataset, as rows of its stored arrays.

    ``offsets`` are the distances of the rows of a sample from its anchor: ``(name, offset or offsets)`` of each array,
    in the order of their names. An array with a single offset keeps the shape of its samples. Patches are numbered as
    if they were the items of an array with the dimensions ``patched``. ``bits`` selects samples, a packed bit for each.
    """

    n_rows: int
    offsets: tuple[tuple[str, int | tuple[int, ...]], ...] = ()
    patched: tuple[PatchedDim, ...] = ()
    bits: NDArray[np.uint8] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the ids, which are 64 times as long as the bits.
        return View, (self.n_rows, self.offsets, self.patched, self.bits)

    def windows(self, offsets: Offsets | Mapping[str, Offsets], names: Iterable[str]) -> View:
        """Samples of several rows, for all arrays or for some by name. The others keep the row of the anchor."""
        names = sorted(names)
        if not isinstance(offsets, Mapping):
            offsets = dict.fromkeys(names, offsets)
        if unknown := offsets.keys() - names:
            raise InvalidParameter.of("offsets", min(unknown), f"one of the arrays {', '.join(names)}")
        view = View(self.n_rows, tuple((name, _offsets(name, offsets.get(name, 0))) for name in names))
        if not self.is_whole or view.n_whole < 1:
            reason = f"no window fits into {self.n_rows} rows" if self.is_whole else f"this is a view already. {ORDER}"
            raise InvalidParameter.because("offsets", reason)
        return view

    def patches(self, sizes: Mapping[str, int], stride: int | None, lengths: Mapping[str, int]) -> View:
        """Boxes of these samples, along dimensions of these lengths."""
        if self.patched or self.bits is not None:
            raise InvalidParameter.because("patches", f"this is a part of a dataset, or has patches already. {ORDER}")
        if (unknown := sizes.keys() - lengths.keys()) or not sizes:
            names = (
                f"the dimensions {', '.join(sorted(lengths))}" if lengths else "dimensions, which have no names here"
            )
            hint = "" if lengths else "Write the arrays with xarray, or with dimension_names."
            raise InvalidParameter.of("patches", sorted(unknown), f"lengths along {names}", hint)
        dims = []
        for name, value in sizes.items():
            size, length = as_integer(name, value, 1), lengths[name]
            step = size if stride is None else as_integer("stride", stride, 1)
            if size > length:
                raise InvalidParameter.of(name, size, f"at most {length}, the length of this dimension")
            dims.append(PatchedDim(name, length, size, step))
        return View(self.n_rows, self.offsets, tuple(dims))

    def select(self, samples: ArrayLike) -> View:
        """Some of the samples: a mask, or distinct ids."""
        array = np.asarray(samples)
        if array.dtype == np.bool_:
            if array.shape != (self.n_samples,):
                raise InvalidParameter.of("samples.shape", array.shape, f"({self.n_samples},) for a mask")
            ids = np.flatnonzero(array)
        else:
            ids = np.unique(as_indices("samples", array, self.n_samples, "samples"))
            if len(ids) < array.size:
                raise InvalidParameter.because("samples", "some ids are repeated", "Select each sample once.")
        if not len(ids):
            raise InvalidParameter.because("samples", "it selects nothing", "Select at least one sample.")
        mask = np.zeros(self.n_whole, np.bool_)
        mask[ids if self.ids is None else self.ids[ids]] = True
        return View(self.n_rows, self.offsets, self.patched, np.packbits(mask))

    @functools.cached_property
    def ids(self) -> Ids | None:
        """Ascending numbers of the samples before the selection; None for all."""
        return None if self.bits is None else np.flatnonzero(np.unpackbits(self.bits, count=self.n_whole))

    @property
    def is_whole(self) -> bool:
        """Whether the samples are all stored rows."""
        return not self.offsets and not self.patched and self.bits is None

    @functools.cached_property
    def n_patches(self) -> int:
        """Number of samples that a row is divided into."""
        return math.prod(len(dim.begins) for dim in self.patched)

    @property
    def n_items(self) -> int:
        """Number of items of all rows."""
        return self.n_rows * self.n_patches

    @property
    def n_whole(self) -> int:
        """Number of samples before the selection."""
        return (self.n_rows - max(self._distances) + min(self._distances)) * self.n_patches

    @property
    def n_samples(self) -> int:
        """Number of samples."""
        return self.n_whole if self.ids is None else len(self.ids)

    def identity(self, stored: str) -> str:
        """Identity of the samples, from that of the stored dataset."""
        if self.offsets:
            stored = digest_of(f"{stored}{self.offsets}".encode())
        if self.patched:
            dims = [(dim.name, dim.size, dim.stride) for dim in self.patched]
            stored = digest_of(f"{stored}patches{dims}".encode())
        return stored if self.bits is None else digest_of(stored.encode() + self.bits.tobytes())

    def window(self, name: str) -> tuple[int, ...]:
        """Distances of the rows of an array from the anchor of a sample."""
        own = dict(self.offsets).get(name, 0)
        return (own,) if isinstance(own, int) else own

    @property
    def overlapping(self) -> str:
        """What overlaps, so that single samples cannot be divided; empty if nothing does."""
        if self.offsets:
            return "windows"
        return "patches" if any(dim.stride < dim.size and len(dim.begins) > 1 for dim in self.patched) else ""

    def info(self, name: str, source: StoredArray) -> ArrayInfo:
        """Dtype, shape and chunks of an array, as one of samples."""
        info, own = source.info, dict(self.offsets).get(name, 0)
        shape = self.cut(source).sizes if isinstance(own, int) else (len(own), *self.cut(source).sizes)
        shard_rows = info.shard_rows and info.shard_rows * self.n_patches
        return dataclasses.replace(
            info, shape=shape, chunk_rows=info.chunk_rows * self.n_patches, shard_rows=shard_rows
        )

    def cut(self, source: StoredArray) -> Cut:
        """How the rows of an array are divided."""
        return cut_of(self.patched, source.dims, source.info.shape, source.chunks_across)

    def items(self, samples: Ids) -> Ids:
        """Items of samples, or of the anchors of their windows."""
        return (samples if self.ids is None else self.ids[samples]) + self.before

    def apart(self, samples: Ids, other_samples: Ids) -> Mask:
        """Whether the windows of samples share no row with those of other samples: ``(len(samples),)``."""
        if not self.offsets:
            return np.ones(len(samples), np.bool_)
        anchors, other_anchors = (self.items(ids) // self.n_patches for ids in (samples, other_samples))
        used, shared = np.zeros(self.n_rows, np.bool_), np.zeros(len(anchors), np.bool_)
        distances = {distance for name, _ in self.offsets for distance in self.window(name)}
        for distance in distances:
            used[other_anchors + distance] = True
        for distance in distances:
            shared |= used[anchors + distance]
        return ~shared

    @property
    def before(self) -> int:
        """Items of the rows before the first anchor."""
        return -min(self._distances) * self.n_patches

    @functools.cached_property
    def _distances(self) -> set[int]:
        return {0}.union(*(self.window(name) for name, _ in self.offsets))


def _offsets(name: str, offsets: Offsets) -> int | tuple[int, ...]:
    label = f"offsets[{name!r}]"
    if not isinstance(offsets, Iterable) or getattr(offsets, "ndim", 1) == 0:
        return as_integer(label, offsets)
    own = tuple(as_integer(label, offset) for offset in offsets)
    if not own or len(set(own)) < len(own):
        raise InvalidParameter.of(label, offsets, "an integer, or distinct integers")
    return own


class Cut:
    """The patches of the rows of one array, of the shape ``sizes``; a row that is not divided is one patch."""

    def __init__(
        self,
        patched: tuple[PatchedDim, ...],
        names: tuple[str | None, ...],
        shape: tuple[int, ...],
        chunks: tuple[int, ...],
    ) -> None:
        dims = {dim.name: dim for dim in patched}
        self.sizes = tuple(dims[name].size if name in dims else n for name, n in zip(names, shape, strict=True))
        self.n_items, self.n_patches = math.prod(self.sizes), math.prod(len(dim.begins) for dim in patched)
        # The first item of each patch: (n_patches, len(shape)).
        self._origins = np.zeros((self.n_patches, len(shape)), np.int64)
        grid = dict(zip(dims, np.meshgrid(*(dim.begins for dim in patched), indexing="ij"), strict=True))
        for axis, name in enumerate(names):
            if name in grid:
                self._origins[:, axis] = grid[name].ravel()
        whole, step = np.array(shape, np.int64), np.array(chunks, np.int64)
        first = self._origins // step * step
        last = np.minimum(-(-(self._origins + np.array(self.sizes, np.int64)) // step) * step, whole)
        self._boxes, box_of = np.unique(np.hstack([first, last]), axis=0, return_inverse=True)
        self._box_of = box_of.reshape(-1)
        self._whole = tuple(slice(0, length) for length in shape)

    def boxes(self, items: Ids) -> Iterator[tuple[Box, Ids]]:
        """Boxes of whole chunks, and which of the items have their patches in them."""
        box_of = self._box_of[items % self.n_patches]
        order = np.argsort(box_of, kind="stable")
        for group in np.split(order, np.flatnonzero(np.diff(box_of[order])) + 1):
            first, last = self._boxes[box_of[group[0]]].reshape(2, -1).tolist()
            yield tuple(map(slice, first, last)), group

    def runs(self, itemsize: int, box: Box | None = None) -> tuple[Ids, Ids, int]:
        """Where the bytes of patches are in a box of a row, or in the whole row: ``begins, offsets, nbytes``.

        Each patch in the box begins at its ``begins``, and consists of ``nbytes`` at each of the offsets from there.
        """
        box = self._whole if box is None else box
        lengths = [side.stop - side.start for side in box]
        strides = [itemsize * math.prod(lengths[axis + 1 :]) for axis in range(len(lengths))]
        inner = len(lengths)  # axes from here on are whole, so they belong to one run
        while inner and self.sizes[inner - 1] == lengths[inner - 1]:
            inner -= 1
        inner = max(0, inner - 1)
        offsets = np.zeros(1, np.int64)
        for size, stride in zip(self.sizes[:inner], strides[:inner], strict=True):
            offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
        origin = np.array([side.start for side in box], np.int64)
        begins = (self._origins - origin) @ np.array(strides, np.int64)
        return begins, offsets, itemsize * math.prod(self.sizes[inner:])


cut_of = functools.lru_cache(maxsize=64)(Cut)


def part_of_groups(groups: NDArray[Any], ratio: Fraction, rng: np.random.Generator) -> Mask:
    """A random part of this size; samples with the same number in ``groups`` stay together."""
    _, numbers, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    order = rng.permutation(len(sizes))
    # Groups in random order go to the part as long as at least half of each fits.
    chosen = np.zeros(len(sizes), np.bool_)
    chosen[order] = np.cumsum(sizes[order]) - sizes[order] / 2 <= float(ratio * len(groups))
    return chosen[numbers]


def part_of_strata(labels: NDArray[Any], ratio: Fraction, rng: np.random.Generator) -> Mask:
    """A random part of this size, with the same fraction of the samples of every label."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    # The part gets evenly spread samples of this order. The random offset makes all samples equally likely.
    places = np.arange(len(labels) + 1) * float(ratio) + rng.random()
    mask = np.zeros(len(labels), np.bool_)
    mask[order] = np.diff(np.floor(places)) > 0
    return mask


def earlier_part(times: NDArray[Any], ratio: Fraction) -> Mask:
    """The earlier samples, about this part. Samples of the same time stay together."""
    size = max(1, round(ratio * len(times)))
    last = np.partition(times, size - 1)[size - 1]
    earlier, up_to_last = times < last, times <= last
    nearer: Mask = min(up_to_last, earlier, key=lambda part: abs(np.count_nonzero(part) - size))
    return nearer
