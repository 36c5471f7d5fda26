"""A worker's samples of one epoch, as training tasks see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import StaleEpoch
from dshuffle.planning.values import as_integer
from dshuffle.rows import ByteMatrix, RowLayout


class Partition:
    """The samples that one worker trains on in one epoch, in this epoch's order.

    It is valid within the task that received it; what it returns are copies and stay valid.

    Parameters
    ----------
    layout, rows
        Row layout and the worker's rows.
    slots
        ``(n,)`` row of every sample, in training order.
    sample_ids
        ``(n,)`` int64 samples, in training order.

    Examples
    --------
    >>> layout = RowLayout.of({"x": (np.dtype("f4"), (2,))})
    >>> rows = layout.empty(3)
    >>> layout.column(rows, "x")[:] = [[0, 1], [2, 3], [4, 5]]
    >>> partition = Partition(layout, rows, np.array([2, 0]), np.array([70, 50]), rank=0, epoch=3)
    >>> partition["x"]
    array([[4., 5.],
           [0., 1.]], dtype=float32)
    >>> [batch["x"].shape for batch in partition.batches(1)]
    [(1, 2), (1, 2)]
    """

    def __init__(
        self,
        layout: RowLayout,
        rows: ByteMatrix,
        slots: NDArray[np.int64],
        sample_ids: NDArray[np.int64],
        *,
        rank: int,
        epoch: int,
    ) -> None:
        self._layout = layout
        self._records: NDArray[np.void] | None = layout.records(rows)
        self._slots = slots
        self._sample_ids = sample_ids
        self._rank = rank
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._slots)

    def __repr__(self) -> str:
        return f"<Partition rank={self._rank} epoch={self._epoch} samples={len(self)} arrays={list(self.names)}>"

    @property
    def rank(self) -> int:
        """Rank of the worker."""
        return self._rank

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""
        return self._epoch

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return self._layout.names

    @property
    def sample_ids(self) -> NDArray[np.int64]:
        """``(n,)`` int64 samples, in training order (read-only)."""
        view = self._sample_ids.view()
        view.flags.writeable = False
        return view

    def __getitem__(self, name: str) -> NDArray[Any]:
        """One array of all samples, in training order: ``(n, *per-sample shape)``, a copy."""
        return self._column(name)[self._slots]

    def batches(self, batch_size: int, *, drop_last: bool = False) -> Iterator[dict[str, NDArray[Any]]]:
        """Batches in training order; only one batch is copied at a time.

        Parameters
        ----------
        batch_size
            Samples a batch.
        drop_last
            Leave out a last batch that is smaller.

        Yields
        ------
        dict
            Each array's rows of the batch: ``(batch_size, *per-sample shape)``.

        Raises
        ------
        InvalidParameter
            If ``batch_size`` is not an integer of at least 1.
        """
        return self._batches(as_integer("batch_size", batch_size, 1), drop_last)

    def _batches(self, batch_size: int, drop_last: bool) -> Iterator[dict[str, NDArray[Any]]]:
        end = len(self) - len(self) % batch_size if drop_last else len(self)
        for first in range(0, end, batch_size):
            slots = self._slots[first : first + batch_size]
            yield {name: self._column(name)[slots] for name in self.names}

    def _column(self, name: str) -> NDArray[Any]:
        if self._records is None:
            raise StaleEpoch(
                f"the partition of rank {self._rank}, epoch {self._epoch} was used after its task had ended; "
                "copy what you need out of it"
            )
        if name not in self.names:
            raise KeyError(f"no array {name!r} in this dataset; it has {sorted(self.names)}")
        return self._records[name]

    def close(self) -> None:
        """End the partition's validity (called when its task has ended)."""
        self._records = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Partition lives on its worker and cannot be sent; return arrays instead")
