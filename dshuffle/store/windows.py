"""Windows: samples made of several consecutive rows, such as steps of time."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.store.stored_array import ArrayInfo

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
        """Check offsets for all arrays, or for some by name. The others keep the row of the anchor.

        Raises
        ------
        InvalidParameter
            If an array does not exist, or offsets are not distinct integers.
        """
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
        """Number of rows whose windows lie within the arrays.

        Raises
        ------
        InvalidParameter
            If there are none.
        """
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
