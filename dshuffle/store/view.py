"""What the samples of a dataset are: the rows of its stored arrays, windows or patches of rows, or some of these.

Samples are numbered before the selection. With patches, every row has ``n_patches`` of these numbers: its items.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.store.patches import Cut, Patches
from dshuffle.store.selection import Selection, wanted_samples
from dshuffle.store.stored_array import ArrayInfo, StoredArray
from dshuffle.store.windows import Windows


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
        """Some of the samples: a mask, or distinct ids.

        Raises
        ------
        InvalidParameter
            If it is neither, or selects nothing.
        """
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
