"""The samples of a worker in an epoch, which tasks get, and the lock that keeps an epoch until its tasks have ended."""

from __future__ import annotations

import asyncio
import functools
import importlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter, StaleEpoch
from dshuffle.exchange.cache_partition import RowFile
from dshuffle.planning.cost import as_number
from dshuffle.planning.exchange_epochs import Weights
from dshuffle.planning.remainder import SampleDigest
from dshuffle.planning.types import Samples
from dshuffle.rows import ByteMatrix, RowLayout
from dshuffle.runtime.messages import TrainingTime

if TYPE_CHECKING:
    from dshuffle.integrations.torch import PartitionBatches


T = TypeVar("T", bound=np.generic)

READ_AHEAD = 8 * 2**20
"""Bytes of rows on a disk that are read ahead of the batches."""


class PartitionRows:
    """A worker's rows, and their file if they are on a disk, until the task has ended that ``owner`` is for."""

    def __init__(self, rows: ByteMatrix, file: RowFile | None, owner: str) -> None:
        self.rows: ByteMatrix | None = rows
        self.file, self._owner = file, owner

    def valid(self) -> ByteMatrix:
        """The rows, if the task has not ended."""
        if self.rows is None:
            raise StaleEpoch(
                f"{self._owner} was used after its task had ended; copy the arrays that you need before the task "
                "returns"
            )
        return self.rows


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
    note, note_waiting
        Called with the number of samples that were trained on so far, and with seconds of waiting for other ranks.
    file
        The file of the rows, if they are on a disk.

    Attributes
    ----------
    rank, epoch
        Rank of the worker, and the epoch, from 0.
    names
        Names of the arrays.
    sample_ids
        ``(n,)`` int64 sample ids, in training order (read-only).
    broadcast_ids
        Ascending int64 ids of the samples that every worker trains on in each epoch (read-only); usually empty. They
        are also part of ``sample_ids``. Each of the other samples belongs to one worker per epoch.
    shares
        Smallest and largest number of samples on any worker in this epoch; the same pair on every worker.
    weights
        Relative share of each rank, in thousandths of the largest one; empty if shares are equal.
    unequal
        Whether shares are unequal on purpose, or may become so in another epoch, as measured ones do.

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
        slots: Samples,
        sample_ids: Samples,
        *,
        rank: int,
        epoch: int,
        shares: tuple[int, int] | None = None,
        broadcast: Samples | None = None,
        weights: Weights = (),
        unequal: bool = False,
        note: Callable[[int], None] = lambda _: None,
        note_waiting: Callable[[float], None] = lambda _: None,
        file: RowFile | None = None,
    ) -> None:
        self.rank = rank
        self.epoch = epoch
        self.names = layout.names
        self.sample_ids = read_only(sample_ids)
        self.broadcast_ids = read_only(sample_ids[:0] if broadcast is None else broadcast)
        self.shares = shares or (len(slots), len(slots))
        self.weights = weights
        self.unequal = unequal or bool(weights)
        self._layout = layout
        self._rows = PartitionRows(rows, file, f"the partition of rank {rank}, epoch {epoch}")
        self._read_ahead = 0 if file is None else max(1, READ_AHEAD // max(1, layout.nbytes))
        self._slots = read_only(slots)
        self._note = note
        self._note_waiting = note_waiting

    def __len__(self) -> int:
        return len(self._slots)

    def __repr__(self) -> str:
        return f"<Partition rank={self.rank} epoch={self.epoch} samples={len(self)} arrays={list(self.names)}>"

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Copy of one array for all samples, in training order: ``(n, *per-sample shape)``."""
        return self.take(slice(None), [name])[name]

    def rows(self, name: str) -> tuple[NDArray[Any], int, Samples]:
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
        rows, slots, (dtype, _) = self._rows.valid(), self._slots, self.dtype(name)
        if self._layout.encoding(name) is None and dtype.isnative:
            return *self._layout.matrix(read_only(rows), name), slots
        values = self[name].reshape(len(slots), -1)
        decoded = np.empty((len(rows), values.shape[1]), dtype.newbyteorder("="))
        decoded[slots] = values  # in the slots of the other arrays
        return read_only(decoded), 0, slots

    def dtype(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Dtype and per-sample shape of an array."""
        column, encoding = self._column(self._rows.valid()[:0], name), self._layout.encoding(name)
        return column.dtype if encoding is None else np.dtype(encoding.dtype), column.shape[1:]

    def _column(self, rows: ByteMatrix, name: str) -> NDArray[Any]:
        if name not in self.names:
            raise KeyError(f"no array {name!r} in this dataset; it has {sorted(self.names)}")
        return self._layout.column(rows, name)

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
        self._rows.valid()
        order, note = np.argsort(self.sample_ids, kind="stable"), self._note
        stored = object.__new__(Partition)
        vars(stored).update(vars(self))  # with the same rows: both end with the task
        stored._slots, stored.sample_ids = read_only(self._slots[order]), read_only(self.sample_ids[order])
        # Some samples in another order are not the first ones in training order.
        stored._note = lambda n_samples: note(n_samples if n_samples == len(self) else 0)
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
        batches: PartitionBatches = adapter.PartitionBatches(self, batch_size, mode=mode, arrays=arrays, device=device)
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
        rows, file, most = self._rows.valid(), self._rows.file, self._read_ahead
        slots, names = self._slots[positions], self.names if names is None else names
        if file is None:
            stored = {name: self._column(rows, name)[slots] for name in names}
        else:
            rows = self._layout.empty(min(most, len(slots)))
            columns = {name: self._column(rows, name) for name in names}
            stored = {name: np.empty((len(slots), *column.shape[1:]), column.dtype) for name, column in columns.items()}
            for first in range(0, len(slots), most):
                block = slots[first : first + most]
                if len(slots) > most:
                    file.will_need(block)
                file.read(block, rows[: len(block)])
                for name, column in columns.items():
                    stored[name][first : first + most] = column[: len(block)]
        for name, values in stored.items():
            if (encoding := self._layout.encoding(name)) is not None:
                stored[name] = encoding.decode(values, name)
        return stored

    def _batches(self, batch_size: int, drop_last: bool, mark: bool) -> Iterator[dict[str, NDArray[Any]]]:
        end = len(self) - len(self) % batch_size if drop_last else len(self)
        if mark:
            self.mark_trained(0)  # the task may run again
        window, file, asked = max(2 * batch_size, self._read_ahead), self._rows.file, 0
        for first in range(0, end, batch_size):
            if file is not None and asked < min(first + batch_size + window // 2, end):
                asked, unread = first + batch_size + window, asked
                file.will_need(self._slots[unread:asked])
            yield self.take(slice(first, first + batch_size))
            if mark:
                self.mark_trained(min(first + batch_size, len(self)))
        if mark:  # what was dropped is not trained on in this epoch
            self.mark_trained()

    def close(self) -> None:
        """Invalidate the partition, and let go of its rows; called when its task has ended."""
        self._rows.rows = self._rows.file = None
        self._note = lambda n_samples: None  # what notes it knows the rows

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Partition cannot be sent to another process; return arrays instead")


class View(NamedTuple):
    """An epoch as tasks see it: its samples in training order, and what makes a partition of them for a task."""

    epoch: int
    sample_ids: Samples
    make: Callable[..., Partition]


class EpochLock:
    """Access of tasks to a worker's partition of the current epoch. A commit waits until no task reads.

    ``seed`` is that of the shuffle, for digests. Commits wait on ``loop``; tasks run in other threads.
    """

    def __init__(self, rank: int, seed: int, loop: asyncio.AbstractEventLoop) -> None:
        self.readers = 0
        self._rank = rank
        self._seed = seed
        self._loop = loop
        self._view: View | None = None
        self._lock = threading.Lock()
        self._no_readers = asyncio.Event()
        self._training_seconds = self._waiting_seconds = 0.0
        self._trained: dict[int, SampleDigest] = {}  # epoch -> samples that were trained on

    @contextmanager
    def partition(self, epoch: int) -> Iterator[Partition]:
        """The partition of an epoch, valid for one task."""
        with self._lock:
            view = self._view
            if view is None or view.epoch != epoch:
                now = "none" if view is None else str(view.epoch)
                raise StaleEpoch(
                    f"a task of epoch {epoch} ran on rank {self._rank} while the current epoch was {now}; submit "
                    "tasks only during their epoch"
                )
            note = functools.partial(self._note_trained, view)
            partition = view.make(note=note, note_waiting=self._note_waiting)
            self.readers += 1
        started = time.perf_counter()
        try:
            yield partition
        finally:
            partition.close()
            with self._lock:
                self._training_seconds += time.perf_counter() - started
                self.readers -= 1
                if not self.readers:
                    self._loop.call_soon_threadsafe(self._no_readers.set)

    async def swap(self, view: View, install: Callable[[], bool]) -> None:
        """Wait until no task reads, then switch to the next epoch atomically, if ``install`` returns true."""
        while True:
            with self._lock:
                if not self.readers:
                    if install():
                        before = -1 if self._view is None else self._view.epoch
                        self._trained = {before: self.trained(before)}  # others may not have swapped yet
                        self._view = view
                    return
                self._no_readers.clear()
            await self._no_readers.wait()

    def close(self) -> None:
        """Let go of the rows. Tasks that run keep them until they end, and no other task gets them."""
        with self._lock:
            self._view = None

    def trained(self, epoch: int) -> SampleDigest:
        """Digest of the samples of the current epoch, or of the one before, that tasks have said to be trained on."""
        return self._trained.get(epoch, SampleDigest())  # without the lock, which ``swap`` holds

    def _note_trained(self, view: View, n_samples: int) -> None:
        trained = self.trained(view.epoch)
        if trained.count > n_samples:  # a task that begins again
            trained = SampleDigest()
        trained += SampleDigest.of(view.sample_ids[trained.count : n_samples], self._seed)
        with self._lock:
            if self._view is view:
                self._trained[view.epoch] = trained

    def _note_waiting(self, seconds: float) -> None:
        with self._lock:
            self._waiting_seconds += seconds

    def take_training_time(self) -> TrainingTime:
        """Time of training on this worker since the last call."""
        with self._lock:
            time_of_tasks = TrainingTime(seconds=self._training_seconds, waiting=self._waiting_seconds)
            self._training_seconds = self._waiting_seconds = 0.0
        return time_of_tasks
