"""A partition as a PyTorch ``IterableDataset`` (extra ``torch``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.integrations import INSTALL_TORCH
from dshuffle.planning.batching import DROP, Batching, Position, Positioned
from dshuffle.planning.randomness import permutation

try:
    import torch as torch  # also for other modules, which then say how to install it
    from torch.utils.data import IterableDataset, get_worker_info
    from torch.utils.data._utils.collate import default_collate_fn_map
except ImportError as exc:
    raise ImportError(f"PyTorch is not installed ({exc}). {INSTALL_TORCH}") from exc

Tensors = tuple[torch.Tensor, ...]
Load = Callable[[int], tuple[NDArray[Any], ...]]
"""Returns the arrays of a batch by its number."""


class BatchDict(dict[str, torch.Tensor]):
    """A batch of all arrays, with a type of its own by which a ``DataLoader`` that collates batches is recognized."""


class BatchTuple(Tensors):
    """A batch of some arrays, with a type of its own for the same reason."""


def _refuse(batches: Sequence[Any], **_: Any) -> NoReturn:
    hint = (
        "The dataset of to_torch() gives batches already, and a DataLoader with a batch_size, which is 1 by default, "
        "would stack them."
    )
    raise InvalidParameter.of("batch_size of the DataLoader", len(batches), "None", hint)


# A DataLoader does not tell its dataset that it collates, but looks up here how it collates items of a type.
default_collate_fn_map.update({BatchDict: _refuse, BatchTuple: _refuse})


class PartitionBatches(Positioned[Any], IterableDataset[Any]):
    """The samples of a partition in batches of tensors, created by :meth:`dshuffle.Partition.to_torch`.

    The dataset is valid within the task that received the partition. The partition's own epoch, the default, uses the
    partition's order. Any other epoch gives the same samples in another order, for several passes over one partition.
    Iterate over it, or pass it to a ``DataLoader``
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
        smallest, largest = partition.shares
        self.batching = Batching(len(partition), smallest, largest, batch_size, mode, partition.unequal, least)
        self._partition, self._n_items = partition, len(self.batching)
        self._names = tuple(partition.names if arrays is None else arrays)
        self._batch: Callable[[Tensors], Any] = BatchTuple
        if arrays is None:
            self._batch = lambda tensors: BatchDict(zip(self._names, tensors, strict=True))
        self._tensors = to_device("cpu" if device is None else device)
        for name, array in partition.take(np.arange(0), self._names).items():
            try:
                tensor_of(array)
            except (TypeError, ValueError):
                hint = "Choose other arrays with arrays=, or use partition.batches()."
                raise InvalidParameter.of(
                    f"arrays[{name!r}].dtype", str(array.dtype), "a dtype that PyTorch supports", hint
                ) from None
        self._position = Position()
        self._go_to(partition.epoch)

    def __len__(self) -> int:
        """Number of batches, the same on every rank."""
        return self._n_items

    def __iter__(self) -> Iterator[Any]:
        if (info := get_worker_info()) is not None:
            hint = "The rows are already in this process's memory, so loader processes save no time."
            raise InvalidParameter.of("num_workers", info.num_workers, "0", hint)
        return super().__iter__()

    def _items(self) -> Callable[[int], Any]:
        order = self._order

        def load(number: int) -> tuple[NDArray[Any], ...]:
            positions = self.batching.positions(number)
            columns = self._partition.take(positions if order is None else order[positions], self._names)
            return tuple(columns.values())

        tensors = self._tensors(load, self._n_items)
        return lambda number: self._batch(tensors(number))

    def _go_to(self, epoch: int) -> None:
        own, self.epoch = self._partition, epoch
        self._order = None if epoch == own.epoch else permutation(len(own), "pass", own.epoch, own.rank, epoch)

    def _identity(self) -> dict[str, Any]:
        own, batching = self._partition, self.batching
        place = {"partition_epoch": own.epoch, "rank": own.rank, "samples": len(own)}
        return {**place, "batch_size": batching.batch_size, "mode": batching.mode}


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
        return lambda load, n_batches: on_card(load, n_batches, where)
    return lambda load, _: lambda number: tuple(tensor_of(array).to(where) for array in load(number))


def on_card(load: Load, n_batches: int, device: torch.device) -> Callable[[int], Tensors]:
    """Return a function that returns batches on a CUDA device. While one is trained on, the next one is copied."""
    stream, ahead = torch.cuda.Stream(device), dict[int, Tensors]()

    def copied(number: int) -> Tensors:
        pinned = [tensor_of(array).pin_memory() for array in load(number)]
        with torch.cuda.stream(stream):
            return tuple(tensor.to(device, non_blocking=True) for tensor in pinned)

    def batch_at(number: int) -> Tensors:
        batch = ahead.pop(number) if number in ahead else copied(number)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for tensor in batch:
            tensor.record_stream(current)  # its memory is not used again before the loop's work on it is done
        ahead.clear()
        if number + 1 < n_batches:
            ahead[number + 1] = copied(number + 1)
        return batch

    return batch_at
