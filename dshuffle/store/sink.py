"""Where the rows of one array go when they are read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.rows import ByteMatrix
from dshuffle.store.patches import Box, Cut
from dshuffle.store.scatter import scatter_patches, scatter_rows
from dshuffle.store.stored_array import StoredArray


@dataclass(frozen=True, slots=True)
class Sink:
    """Target of one array's rows in one call: the bytes from ``offset`` in the rows of a contiguous byte matrix.

    With ``window``, a row of the matrix gets the stored rows at these distances from a sample, one after the other.
    With ``cut``, it gets patches of them. Stored rows and patches are both called items here.
    """

    source: StoredArray
    matrix: ByteMatrix
    offset: int
    window: tuple[int, ...] = (0,)
    cut: Cut | None = None

    @property
    def n_patches(self) -> int:
        """Number of items in a stored row."""
        return 1 if self.cut is None else self.cut.n_patches

    @property
    def band_items(self) -> int:
        """Number of items in a band."""
        return self.source.info.chunk_rows * self.n_patches

    @property
    def item_nbytes(self) -> int:
        """Bytes of an item."""
        return self.source.row_nbytes if self.cut is None else self.source.dtype.itemsize * self.cut.n_items

    def places(self, ids: NDArray[np.int64], slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Items in ascending order, and the byte of the matrix at which each begins; ``ids`` are ascending."""
        places = slots * self.matrix.shape[1] + self.offset
        if self.window == (0,):
            return ids, places
        ids = (ids[:, None] + np.array(self.window) * self.n_patches).reshape(-1)
        places = (places[:, None] + np.arange(len(self.window)) * self.item_nbytes).reshape(-1)
        order = np.argsort(ids)
        return ids[order], places[order]

    def fill(
        self,
        block: NDArray[np.uint8],
        ids: NDArray[np.int64],
        start: int,
        places: NDArray[np.int64],
        box: Box | None = None,
    ) -> None:
        """Copy items out of a block of rows, or of a box of these rows. The block begins with item ``start``."""
        target = self.matrix.reshape(-1)
        if self.cut is None:
            scatter_rows(block, ids, start, target, places)
            return
        offsets, nbytes, begins = self.cut.runs(self.source.dtype.itemsize, box or self.cut.whole)
        scatter_patches(block, ids, start, target, places, begins, offsets, nbytes)
