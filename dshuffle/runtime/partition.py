"""The samples of a worker in an epoch, which tasks get, and their rows in memory or in a file."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter, StaleEpoch
from dshuffle.exchange.cache_partition import RowFile
from dshuffle.notebook import html_summary
from dshuffle.planning.cost import as_number
from dshuffle.planning.exchange_epochs import Weights
from dshuffle.rows import ByteMatrix, RowLayout
from dshuffle.units import human_bytes, human_count

if TYPE_CHECKING:
    from dshuffle.integrations.torch import PartitionBatches


T = TypeVar("T", bound=np.generic)

READ_AHEAD = 8 * 2**20
"""Bytes of rows on a disk that are read ahead of the batches."""


class PartitionRows:
    """A worker's rows, of which each array is a column.

    Parameters
    ----------
    file
        The file of the rows, if they are on a disk.
    owner
        Name of the partition, for the error after its task has ended.
    """

    def __init__(self, layout: RowLayout, rows: ByteMatrix, file: RowFile | None, owner: str) -> None:
        self.layout = layout
        self._rows: ByteMatrix | None = rows
        self._records: NDArray[np.void] | None = layout.records(rows)
        self._file = file
        self._owner = owner

    def valid(self) -> ByteMatrix:
        """The rows, if the task has not ended."""
        if self._rows is None:
            raise StaleEpoch(
                f"{self._owner} was used after its task had ended; copy the arrays that you need before the task "
                "returns"
            )
        return self._rows

    def close(self) -> None:
        """Let go of the rows, because the task has ended."""
        self._rows = self._records = self._file = None

    def dtype(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Dtype and per-sample shape of an array."""
        column, encoding = self._column(name), self.layout.encoding(name)
        return column.dtype if encoding is None else np.dtype(encoding.dtype), column.shape[1:]

    def take(self, slots: NDArray[np.int64], names: Iterable[str]) -> dict[str, NDArray[Any]]:
        """Copy rows: name -> array of shape ``(k, *per-sample shape)``."""
        columns = {name: self._column(name) for name in names}
        if self._file is None:
            return {name: self._decoded(name, column[slots]) for name, column in columns.items()}
        stored = self._read(self._file, slots, list(columns))  # names may be an iterator, which has ended here
        return {name: self._decoded(name, values) for name, values in stored.items()}

    def matrix(self, name: str, slots: NDArray[np.int64]) -> tuple[NDArray[Any], int]:
        """An array of numbers as columns of a read-only matrix with all rows, and the first of these columns.

        Numbers that are encoded, or not in the machine's byte order, are decoded into a copy. Only its rows ``slots``
        have values.
        """
        rows, (dtype, _) = self.valid(), self.dtype(name)
        if self.layout.encoding(name) is not None or not dtype.isnative:
            values = self.take(slots, [name])[name].reshape(len(slots), -1)
            decoded = np.empty((len(rows), values.shape[1]), dtype.newbyteorder("="))
            decoded[slots] = values  # in the slots of the other arrays
            return read_only(decoded), 0
        return self.layout.matrix(read_only(rows), name)

    @property
    def read_ahead(self) -> int:
        """Number of rows to read ahead of what is taken; 0 if they are in memory."""
        return 0 if self._file is None else max(1, READ_AHEAD // max(1, self.layout.nbytes))

    def will_need(self, slots: NDArray[np.int64]) -> None:
        """Begin to read rows that will be taken soon."""
        if self._file is not None:
            self._file.will_need(slots)

    def _read(self, file: RowFile, slots: NDArray[np.int64], names: Sequence[str]) -> dict[str, NDArray[Any]]:
        most = self.read_ahead
        rows = self.layout.empty(min(most, len(slots)))
        if len(slots) <= most:
            file.read(slots, rows)
            # The column of a dataset with one array is contiguous already.
            return {name: np.ascontiguousarray(self.layout.column(rows, name)) for name in names}
        columns = {name: self.layout.column(rows, name) for name in names}
        arrays = {name: np.empty((len(slots), *column.shape[1:]), column.dtype) for name, column in columns.items()}
        for first in range(0, len(slots), most):
            block = slots[first : first + most]
            file.will_need(block)
            file.read(block, rows[: len(block)])
            for name, column in columns.items():
                arrays[name][first : first + most] = column[: len(block)]
        return arrays

    def _decoded(self, name: str, stored: NDArray[Any]) -> NDArray[Any]:
        encoding = self.layout.encoding(name)
        return stored if encoding is None else encoding.decode(stored, name)

    def _column(self, name: str) -> NDArray[Any]:
        self.valid()
        assert self._records is not None
        if name not in self.layout.names:
            raise KeyError(f"no array {name!r} in this dataset; it has {sorted(self.layout.names)}")
        return self._records[name]


def read_only(array: NDArray[T]) -> NDArray[T]:
    """A view that cannot be written, and whose base cannot be written either: other tasks use the same memory."""
    readable: Any = array
    return np.asarray(memoryview(readable).toreadonly())


class Partition:
    """The samples that one worker trains on in one epoch, in training order.

    A partition is valid only within the task that received it. The arrays that it returns are copies and stay valid.

    Parameters
    ----------
    layout, rows
        Row layout and the worker's rows.
    slots
        ``(n,)`` row of each sample, in training order.
    sample_ids
        ``(n,)`` int64 sample ids, in training order.
    rank, epoch
        Rank of the worker, and the epoch.
    shares
        Smallest and largest number of samples on any worker in this epoch. By default every worker has ``n``.
    broadcast
        Ascending ids of the samples in this partition that every worker has. Empty by default.
    weights
        Relative share of each rank; empty if shares are equal.
    unequal
        Whether shares may become unequal in another epoch.
    note
        Called with the number of samples that were trained on so far.
    note_waiting
        Called with seconds in which the task has waited for other ranks.
    file
        The file of the rows, if they are on a disk.

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
        weights: Weights = (),
        unequal: bool = False,
        note: Callable[[int], None] = lambda _: None,
        note_waiting: Callable[[float], None] = lambda _: None,
        file: RowFile | None = None,
    ) -> None:
        self._rows = PartitionRows(layout, rows, file, f"the partition of rank {rank}, epoch {epoch}")
        self._slots = read_only(slots)
        self._sample_ids = read_only(sample_ids)
        self._rank = rank
        self._epoch = epoch
        self._shares = shares or (len(slots), len(slots))
        self._broadcast = read_only(sample_ids[:0] if broadcast is None else broadcast)
        self._weights = weights
        self._unequal = unequal or bool(weights)
        self._note = note
        self._note_waiting = note_waiting

    def __len__(self) -> int:
        return len(self._slots)

    def __repr__(self) -> str:
        return f"<Partition rank={self._rank} epoch={self._epoch} samples={len(self)} arrays={list(self.names)}>"

    def _repr_html_(self) -> str:
        nbytes = human_bytes(len(self) * self._rows.layout.nbytes)
        facts = {"rank": self._rank, "epoch": self._epoch, "samples": human_count(len(self)), "size": nbytes}
        return html_summary("Partition", facts, ("array",), [(name,) for name in self.names])

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
        return self._rows.layout.names

    @property
    def sample_ids(self) -> NDArray[np.int64]:
        """``(n,)`` int64 sample ids, in training order (read-only)."""
        return self._sample_ids

    @property
    def broadcast_ids(self) -> NDArray[np.int64]:
        """Ascending int64 ids of the samples that every worker trains on in each epoch (read-only); usually empty.

        They are also part of :attr:`sample_ids`. Each of the other samples belongs to one worker per epoch.
        """
        return self._broadcast

    @property
    def shares(self) -> tuple[int, int]:
        """Smallest and largest number of samples on any worker in this epoch; the same pair on every worker."""
        return self._shares

    @property
    def weights(self) -> Weights:
        """Relative share of each rank, in thousandths of the largest one; empty if shares are equal."""
        return self._weights

    @property
    def unequal(self) -> bool:
        """Whether shares are unequal on purpose, or may become so in another epoch, as measured ones do."""
        return self._unequal

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Copy of one array for all samples, in training order: ``(n, *per-sample shape)``."""
        return self.take(slice(None), [name])[name]

    def rows(self, name: str) -> tuple[NDArray[Any], int, NDArray[np.int64]]:
        """One array without a copy, for kernels that index the rows themselves.

        Parameters
        ----------
        name
            Name of a numeric array.

        Returns
        -------
        array, first, slots
            The flattened values of the i-th sample in training order start at column ``first`` of row ``slots[i]`` of
            the 2-D ``array``. Both arrays are read-only and valid until the task returns. Stored numbers that are
            encoded (scale, offset, missing values), or in another byte order than the machine's, are decoded into a
            copy.

        Raises
        ------
        KeyError
            If the dataset does not have this array.

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
        array, first = self._rows.matrix(name, self._slots)
        return array, first, self._slots

    def dtype(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Dtype and per-sample shape of an array."""
        return self._rows.dtype(name)

    def as_stored(self) -> Partition:
        """The same samples in the dataset's order instead of training order, as a baseline without shuffling.

        Examples
        --------
        >>> layout = RowLayout.of({"x": (np.dtype("f4"), ())})
        >>> rows = layout.empty(3)
        >>> layout.column(rows, "x")[:] = [0, 1, 2]
        >>> stored = Partition(layout, rows, np.array([2, 0]), np.array([70, 50]), rank=0, epoch=3).as_stored()
        >>> stored.sample_ids, stored["x"]
        (array([50, 70]), array([0., 2.], dtype=float32))
        """

        def note(n_samples: int) -> None:
            if 0 < n_samples < len(self):
                raise InvalidParameter.of("n_samples", n_samples, f"{len(self)}: this is not the training order")
            self._note(n_samples)

        order = np.argsort(self._sample_ids, kind="stable")
        stored = Partition(
            self._rows.layout,
            self._rows.valid(),
            self._slots[order],
            self._sample_ids[order],
            rank=self._rank,
            epoch=self._epoch,
            shares=self._shares,
            broadcast=self._broadcast,
            weights=self._weights,
            unequal=self._unequal,
            note=note,
            note_waiting=self._note_waiting,
        )
        stored._rows = self._rows  # both end with the task
        return stored

    def mark_trained(self, n_samples: int | None = None) -> None:
        """Note how far training has come, for :meth:`dshuffle.Shuffler.state_dict`.

        Parameters
        ----------
        n_samples
            Number of samples that were trained on in this epoch, from the first one in training order; by default all.

        Raises
        ------
        InvalidParameter
            If it is not an integer in [0, n].
        StaleEpoch
            If the task has ended.
        """
        self._rows.valid()
        n_samples = len(self) if n_samples is None else as_integer("n_samples", n_samples, 0)
        if n_samples > len(self):
            raise InvalidParameter.of("n_samples", n_samples, f"at most {len(self)}, the size of the partition")
        self._note(n_samples)

    def note_waiting(self, seconds: float) -> None:
        """Note that this task has waited for other ranks, so that this time does not count as training of this rank.

        The trainers and :meth:`dshuffle.runtime.Group.mean` do this. A task that averages by other means should say how
        long that took: otherwise all ranks seem to be as slow as the slowest one, and ``shares="measured"`` keeps equal
        shares.

        Parameters
        ----------
        seconds
            How long, at least 0.

        Raises
        ------
        InvalidParameter
            If it is not a number of at least 0.
        """
        self._note_waiting(as_number("seconds", seconds, 0.0))

    def batches(
        self, batch_size: int, *, drop_last: bool = False, mark: bool = False
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Iterate over batches in training order. Only one batch is copied at a time.

        Parameters
        ----------
        batch_size
            Number of samples per batch.
        drop_last
            Whether to drop the last batch if it is smaller.
        mark
            Whether to note how far training has come, as :meth:`mark_trained` does. A batch counts as trained on when
            the next one is asked for. Do not set it to evaluate a model.

        Yields
        ------
        dict
            Each array's rows of the batch: ``(batch_size, *per-sample shape)``.

        Raises
        ------
        InvalidParameter
            If ``batch_size`` is not an integer of at least 1, or ``drop_last`` would drop the only batch.

        Notes
        -----
        The arrays of a batch are gathered once, directly from the exchange's buffers. The caller owns them and may keep
        or change them. Libraries that accept NumPy arrays or DLPack can use them without another copy:
        ``torch.from_numpy(batch["x"])``, ``jax.dlpack.from_dlpack(batch["x"])``.
        """
        batch_size = as_integer("batch_size", batch_size, 1)
        if drop_last and batch_size > len(self):
            hint = "With drop_last=True there would be no batch."
            raise InvalidParameter.of("batch_size", batch_size, f"in [1, {len(self)}], the size of the partition", hint)
        return self._batches(batch_size, drop_last, mark)

    def to_torch(
        self, batch_size: int, *, mode: str = "drop", arrays: Sequence[str] | None = None, device: Any = None
    ) -> PartitionBatches:
        """Batches of tensors as a ``torch.utils.data.IterableDataset``, with the same number of batches on every rank.

        Parameters
        ----------
        batch_size
            Number of samples per batch; at most the size of the smallest partition.
        mode
            How to get the same number of batches on every rank. ``"drop"``: as many full batches as the smallest
            partition has. ``"pad"``: as many full batches as the largest partition needs; smaller partitions repeat
            samples. ``"uneven"``: the same number of batches as ``"pad"``, each sample once, in batches whose sizes
            differ by one sample. ``len()`` is the number of batches.
        arrays
            Names of arrays: batches are tuples in this order. By default batches are dicts of all arrays.
        device
            Device of the tensors, such as ``"cuda"``: the next batch is copied there while one is trained on. By
            default tensors share memory with the arrays that :meth:`batches` returns.

        Returns
        -------
        dshuffle.integrations.torch.PartitionBatches
            The dataset, with ``set_epoch``, ``state_dict`` and ``load_state_dict``.

        Raises
        ------
        ImportError
            If PyTorch is not installed (extra ``torch``).
        InvalidParameter
            If the batch size is larger than the smallest partition, the mode is unknown, PyTorch does not support the
            dtype of an array, or there is no such device.
        KeyError
            If the dataset does not have one of the arrays.
        """
        adapter = importlib.import_module("dshuffle.integrations.torch")  # an optional extra, loaded on demand
        options = {"mode": mode, "arrays": arrays, "device": device}
        batches: PartitionBatches = adapter.PartitionBatches(self, batch_size, **options)
        return batches

    def take(
        self, positions: NDArray[np.integer] | slice, names: Iterable[str] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Copy the samples at the given positions of the training order.

        Parameters
        ----------
        positions
            ``(k,)`` integers in [0, n), or a slice.
        names
            Names of the arrays; by default all.

        Returns
        -------
        dict
            Name -> array of shape ``(k, *per-sample shape)``.

        Raises
        ------
        KeyError
            If the dataset does not have one of the arrays.
        """
        return self._rows.take(self._slots[positions], self.names if names is None else names)

    def _batches(self, batch_size: int, drop_last: bool, mark: bool) -> Iterator[dict[str, NDArray[Any]]]:
        end = len(self) - len(self) % batch_size if drop_last else len(self)
        if mark:
            self.mark_trained(0)  # the task may run again
        window = max(2 * batch_size, self._rows.read_ahead)
        asked = 0
        for first in range(0, end, batch_size):
            if self._rows.read_ahead and asked < min(first + batch_size + window // 2, end):
                asked, unread = first + batch_size + window, asked
                self._rows.will_need(self._slots[unread:asked])
            yield self.take(slice(first, first + batch_size))
            if mark:
                self.mark_trained(min(first + batch_size, len(self)))
        if mark:  # what was dropped is not trained on in this epoch
            self.mark_trained()

    def close(self) -> None:
        """Invalidate the partition, and let go of its rows; called when its task has ended."""
        self._rows.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Partition cannot be sent to another process; return arrays instead")
