"""A partition as a PyTorch ``IterableDataset`` (extra ``torch``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.integrations import INSTALL_TORCH
from dshuffle.integrations.position import Position, Positioned
from dshuffle.planning.batching import DROP, Batching
from dshuffle.planning.randomness import permutation

try:
    import torch as torch  # also for other modules, which then say how to install it
    from torch.utils.data import IterableDataset, get_worker_info
    from torch.utils.data._utils.collate import default_collate_fn_map
except ImportError as exc:
    raise ImportError(f"PyTorch is not installed ({exc}). {INSTALL_TORCH}") from exc

Batch = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]
Tensors = tuple[torch.Tensor, ...]
Load = Callable[[int], tuple[NDArray[Any], ...]]
"""Returns the arrays of a batch by its number."""


class BatchDict(dict[str, torch.Tensor]):
    """A batch of all arrays, with a type of its own by which a ``DataLoader`` that collates batches is recognized."""


class BatchTuple(tuple[torch.Tensor, ...]):
    """A batch of some arrays, with a type of its own for the same reason."""

    __slots__ = ()


def _refuse(batches: Sequence[Batch], **_: Any) -> NoReturn:
    hint = (
        "The dataset of to_torch() gives batches already, and a DataLoader with a batch_size, which is 1 by default, "
        "would stack them."
    )
    raise InvalidParameter.of("batch_size of the DataLoader", len(batches), "None", hint)


# A DataLoader does not tell its dataset that it collates, but looks up here how it collates items of a type.
default_collate_fn_map.update({BatchDict: _refuse, BatchTuple: _refuse})


class PartitionBatches(Positioned[Batch], IterableDataset[Batch]):
    """The samples of a partition in batches of tensors, created by :meth:`dshuffle.Partition.to_torch`.

    The dataset is valid within the task that received the partition. Iterate over it, or pass it to a ``DataLoader``
    with ``batch_size=None`` and ``num_workers=0``: the rows are already in this process's memory. A ``DataLoader`` that
    would collate the batches is refused when it is iterated over.

    Parameters
    ----------
    partition
        A :class:`dshuffle.Partition`.
    batch_size
        Number of samples per batch.
    mode
        Treatment of samples that do not fill a batch; see :class:`~dshuffle.planning.batching.Batching`.
    arrays
        Array names: each batch is a tuple of these arrays in this order. ``None``: each batch is a dict of all arrays.
    least
        With unequal shares, the smallest number of samples in a batch.
    device
        Device of the tensors; see :func:`to_device`. By default they share the memory of the arrays of a batch.
    """

    def __init__(
        self,
        partition: Any,
        batch_size: int,
        *,
        mode: str = DROP,
        arrays: Sequence[str] | None = None,
        least: int = 1,
        device: Any = None,
    ) -> None:
        super().__init__()
        size = as_integer("batch_size", batch_size, 1)
        smallest, largest = partition.shares
        self.batching = Batching(len(partition), smallest, largest, size, mode, partition.unequal, least)
        self._partition = partition
        self._names = tuple(partition.names if arrays is None else arrays)
        self._as_tuple = arrays is not None
        self._device = "cpu" if device is None else device
        to_device(self._device)
        for name, array in partition.take(np.arange(0), self._names).items():
            try:
                tensor_of(array)
            except (TypeError, ValueError):
                hint = "Choose other arrays with arrays=, or use partition.batches()."
                raise InvalidParameter.of(
                    f"arrays[{name!r}].dtype", str(array.dtype), "a dtype that PyTorch supports", hint
                ) from None
        self._position = Position(partition.epoch)
        self._go_to(partition.epoch)

    def __len__(self) -> int:
        """Number of batches, the same on every rank."""
        return len(self.batching)

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            hint = "The rows are already in this process's memory, so loader processes save no time."
            raise InvalidParameter.of("num_workers", get_worker_info().num_workers, "0", hint)
        return super().__iter__()

    @property
    def _n_items(self) -> int:
        return len(self)

    def _items(self) -> Callable[[int], Batch]:
        order = self._order

        def load(number: int) -> tuple[NDArray[Any], ...]:
            positions = self.batching.positions(number)
            columns = self._partition.take(positions if order is None else order[positions], self._names)
            return tuple(columns.values())

        tensors_of = to_device(self._device)(load, len(self))

        def batch_at(number: int) -> Batch:
            tensors = tensors_of(number)
            return BatchTuple(tensors) if self._as_tuple else BatchDict(zip(self._names, tensors, strict=True))

        return batch_at

    def set_epoch(self, epoch: int) -> None:
        """Go to the first batch, in the order of an epoch.

        The partition's own epoch, the default, uses the partition's order. Any other epoch gives the same samples in
        another order, for several passes over one partition.

        A position in this epoch from :meth:`load_state_dict` stays, until an iteration has begun there.
        """
        super().set_epoch(epoch)

    def _go_to(self, epoch: int) -> None:
        own = self._partition
        path = "pass", own.epoch, own.rank, epoch
        self._order = None if epoch == own.epoch else permutation(len(own), *path)

    def _identity(self) -> dict[str, Any]:
        own, batching = self._partition, self.batching
        return {
            "partition_epoch": own.epoch,
            "rank": own.rank,
            "samples": len(own),
            "batch_size": batching.batch_size,
            "mode": batching.mode,
        }


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares the memory of an array, or a copy if the bytes are not in the machine's order."""
    # A copy takes 40 us for 1 MiB of floats, and NumPy's byteswap in place 345 us.
    return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))


def to_device(device: Any) -> Callable[[Load, int], Callable[[int], Tensors]]:
    """Return a function that makes tensors on a device of the arrays of batches."""
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise InvalidParameter.of("device", device, f"a device of torch that is there ({error})") from error
    if where.type == "cuda":
        return lambda load, n_batches: DeviceBatches(load, n_batches, where)
    return lambda load, n_batches: lambda number: _tensors(load(number), where)


def _tensors(arrays: tuple[NDArray[Any], ...], device: torch.device) -> Tensors:
    return tuple(tensor_of(array).to(device) for array in arrays)


class DeviceBatches:
    """Batches on a CUDA device. While one is trained on, the next one is copied.

    Parameters
    ----------
    load
        Returns the arrays of a batch.
    """

    def __init__(self, load: Load, n_batches: int, device: torch.device) -> None:
        self._load, self._n_batches, self._device = load, n_batches, device
        self._stream = torch.cuda.Stream(device)
        self._ahead: tuple[int, Tensors] | None = None

    def __call__(self, number: int) -> Tensors:
        """Return a batch, and begin to copy the next one."""
        ahead, self._ahead = self._ahead, None
        batch = ahead[1] if ahead is not None and ahead[0] == number else self._copied(number)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in batch:
            tensor.record_stream(current)  # its memory is not used again before the loop's work on it is done
        if number + 1 < self._n_batches:
            self._ahead = number + 1, self._copied(number + 1)
        return batch

    def _copied(self, number: int) -> Tensors:
        pinned = [tensor_of(array).pin_memory() for array in self._load(number)]
        with torch.cuda.stream(self._stream):
            return tuple(tensor.to(self._device, non_blocking=True) for tensor in pinned)
