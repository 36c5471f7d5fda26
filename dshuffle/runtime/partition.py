"""A worker's samples of one epoch, as training tasks see them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter, StaleEpoch
from dshuffle.rows import ByteMatrix, RowLayout

if TYPE_CHECKING:
    from dshuffle.integrations.torch import PartitionBatches


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
    rank, epoch
        Whose samples they are, and when.
    shares
        Samples of the workers with the fewest and the most in this epoch; by default all have ``n``.
    broadcast
        Ascending samples, among these, that every worker has; by default none.

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
        shares: tuple[int, int] | None = None,
        broadcast: NDArray[np.int64] | None = None,
    ) -> None:
        self._layout = layout
        self._rows: ByteMatrix | None = rows
        self._records: NDArray[np.void] | None = layout.records(rows)
        self._slots = slots
        self._sample_ids = sample_ids
        self._rank = rank
        self._epoch = epoch
        self._shares = shares or (len(slots), len(slots))
        self._broadcast = sample_ids[:0] if broadcast is None else broadcast

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

    @property
    def broadcast_ids(self) -> NDArray[np.int64]:
        """Ascending int64 samples that every worker trains on in each epoch (read-only); mostly none.

        They stand among :attr:`sample_ids` like all others. All else is with one worker in an epoch.
        """
        view = self._broadcast.view()
        view.flags.writeable = False
        return view

    @property
    def shares(self) -> tuple[int, int]:
        """Samples of the workers with the fewest and the most in this epoch; the same on every worker."""
        return self._shares

    def __getitem__(self, name: str) -> NDArray[Any]:
        """One array of all samples, in training order: ``(n, *per-sample shape)``, a copy."""
        return self._column(name)[self._slots]

    def rows(self, name: str) -> tuple[NDArray[Any], int, NDArray[np.int64]]:
        """One array without any copy, for kernels that look their samples up themselves.

        Parameters
        ----------
        name
            An array of numbers.

        Returns
        -------
        array, first, slots
            The i-th sample in training order has its values, flat, in row ``slots[i]`` of the 2-D ``array``, from
            column ``first`` on. Read-only, and valid until the task returns.

        Raises
        ------
        KeyError
            If there is no such array.

        Examples
        --------
        >>> layout = RowLayout.of({"x": (np.dtype("f4"), (2,)), "y": (np.dtype("f4"), ())})
        >>> rows = layout.empty(2)
        >>> layout.column(rows, "y")[:] = [5, 6]
        >>> array, first, slots = Partition(
        ...     layout, rows, np.array([1, 0]), np.array([70, 50]), rank=0, epoch=3
        ... ).rows("y")
        >>> array[slots, first]
        array([6., 5.], dtype=float32)
        """
        self._column(name)  # says what is wrong
        assert self._rows is not None
        array, first = self._layout.matrix(self._rows, name)
        array.flags.writeable = False
        return array, first, self._slots

    def dtype(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Dtype and per-sample shape of an array."""
        column = self._column(name)
        return column.dtype, column.shape[1:]

    def as_stored(self) -> Partition:
        """The same samples in the dataset's order instead of the epoch's: for comparisons with no shuffling at all.

        Examples
        --------
        >>> layout = RowLayout.of({"x": (np.dtype("f4"), ())})
        >>> rows = layout.empty(3)
        >>> layout.column(rows, "x")[:] = [0, 1, 2]
        >>> stored = Partition(layout, rows, np.array([2, 0]), np.array([70, 50]), rank=0, epoch=3).as_stored()
        >>> stored.sample_ids, stored["x"]
        (array([50, 70]), array([0., 2.], dtype=float32))
        """
        self._column(self.names[0])  # it is still valid
        assert self._rows is not None
        order = np.argsort(self._sample_ids, kind="stable")
        return Partition(
            self._layout,
            self._rows,
            self._slots[order],
            self._sample_ids[order],
            rank=self._rank,
            epoch=self._epoch,
            shares=self._shares,
            broadcast=self._broadcast,
        )

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
            If ``batch_size`` is not an integer of at least 1, or ``drop_last`` would leave out everything.

        Notes
        -----
        A batch's arrays are gathered once, straight out of the exchange's buffers, and are yours: they may be kept and
        changed. Whatever takes NumPy arrays or DLPack uses them without another copy: ``torch.from_numpy(batch["x"])``,
        ``jax.dlpack.from_dlpack(batch["x"])``.
        """
        batch_size = as_integer("batch_size", batch_size, 1)
        if drop_last and batch_size > len(self):
            hint = "With drop_last there would be no batch."
            raise InvalidParameter.of("batch_size", batch_size, f"in [1, {len(self)}], the partition's samples", hint)
        return self._batches(batch_size, drop_last)

    def to_torch(self, batch_size: int, *, mode: str = "drop", arrays: Sequence[str] | None = None) -> PartitionBatches:
        """Batches of tensors, equally many on every rank, as a ``torch.utils.data.IterableDataset``.

        Parameters
        ----------
        batch_size
            Samples a batch; at most as many as the smallest partition has.
        mode
            ``"drop"``: full batches, as many as the smallest partition has; ``"pad"``: full batches, as many as the
            largest partition needs, filled up with samples that are trained on twice; ``"uneven"``: as many, but every
            sample once, in batches that differ by one sample. ``len()`` is the number of batches.
        arrays
            Names, for batches that are tuples in this order; by default they are dicts of all arrays.

        Returns
        -------
        dshuffle.integrations.torch.PartitionBatches
            With ``set_epoch``, ``state_dict`` and ``load_state_dict``. Tensors share memory with the arrays that
            :meth:`batches` gives.

        Raises
        ------
        ImportError
            If PyTorch is not installed (extra ``torch``).
        InvalidParameter
            If the batch size is larger than the smallest partition, the mode is unknown, or an array has a
            dtype that PyTorch lacks.
        KeyError
            If there is no such array.
        """
        adapter = importlib.import_module("dshuffle.integrations.torch")  # an optional extra, loaded when asked for
        batches: PartitionBatches = adapter.PartitionBatches(self, batch_size, mode=mode, arrays=arrays)
        return batches

    def take(
        self, positions: NDArray[np.integer] | slice, names: Sequence[str] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Samples at some positions of the training order.

        Parameters
        ----------
        positions
            ``(k,)`` integers in [0, n), or a slice.
        names
            The arrays; by default all.

        Returns
        -------
        dict
            Name -> ``(k, *per-sample shape)``, a copy.

        Raises
        ------
        KeyError
            If there is no such array.
        """
        slots = self._slots[positions]
        return {name: self._column(name)[slots] for name in (self.names if names is None else names)}

    def _batches(self, batch_size: int, drop_last: bool) -> Iterator[dict[str, NDArray[Any]]]:
        end = len(self) - len(self) % batch_size if drop_last else len(self)
        for first in range(0, end, batch_size):
            yield self.take(slice(first, first + batch_size))

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
        self._records = self._rows = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Partition lives on its worker and cannot be sent; return arrays instead")
