"""Which rows of stored arrays are the samples of a dataset: all of them, windows of rows, or a selection of either."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.store.selection import Selection, split_samples, wanted_samples
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
    selection
        Some of the windows, or of the rows; None for all.
    """

    n_rows: int
    windows: Windows | None = None
    selection: Selection | None = None
    _ids: NDArray[np.int64] | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", None if self.selection is None else self.selection.ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return View, (self.n_rows, self.windows, self.selection)  # without the ids, which are 64 times as long

    @property
    def is_whole(self) -> bool:
        """Whether the samples are all stored rows."""
        return self.windows is None and self.selection is None

    @property
    def n_whole(self) -> int:
        """Number of samples before the selection."""
        return self.n_rows if self.windows is None else self.windows.n_anchors(self.n_rows)

    @property
    def n_samples(self) -> int:
        """Number of samples."""
        return self.n_whole if self._ids is None else len(self._ids)

    def identity(self, stored: str) -> str:
        """Identity of the samples, from that of the stored dataset."""
        whole = stored if self.windows is None else self.windows.identity(stored)
        return whole if self.selection is None else self.selection.identity(whole)

    def window(self, name: str) -> tuple[int, ...]:
        """Distances of the rows of an array from the anchor of a sample."""
        return (0,) if self.windows is None else self.windows.of_array(name)

    def anchors(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Stored rows of samples, or of the anchors of their windows."""
        rows = samples if self._ids is None else self._ids[samples]
        return rows if self.windows is None else rows + self.windows.before

    def within(self, first: int, last: int) -> NDArray[np.int64]:
        """The samples whose stored rows, or anchors, are from ``first`` to ``last`` (exclusive)."""
        before = 0 if self.windows is None else self.windows.before
        first, last = (min(max(0, row - before), self.n_whole) for row in (first, last))
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
        return View(self.n_rows, self.windows, Selection.of(self.n_whole, ids if self._ids is None else self._ids[ids]))

    def split(self, fraction: float, groups: NDArray[np.int64] | None, seed: int) -> tuple[View, View]:
        """Divide the samples at random; see :func:`.split_samples`. Windows of both parts have no row in common.

        Raises
        ------
        InvalidParameter
            If a part would be empty.
        """
        first, second = split_samples(self.n_samples, fraction, groups, seed)
        if self.windows is not None:
            apart = self.windows.disjoint(self.anchors(second), self.anchors(first), self.n_rows)
            if not apart.any():
                hint = "Keep larger groups together, or use smaller windows."
                raise InvalidParameter.because("by", "every window of the second part overlaps with the first", hint)
            second = second[apart]
        return self.select(first), self.select(second)
