"""PyTorch: a partition as an ``IterableDataset`` (extra ``torch``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
from dshuffle.planning import permutation
from dshuffle.planning.batching import DROP, Batching

if TYPE_CHECKING:
    from dshuffle.runtime import Partition

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError as exc:
    raise ImportError(f"this needs PyTorch: pip install 'dshuffle[torch]' ({exc})") from exc

Batch = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]


class PartitionBatches(IterableDataset[Batch]):
    """A partition's samples in batches of tensors; made by :meth:`dshuffle.Partition.to_torch`.

    It is valid within the task that received the partition. Give it to a ``DataLoader`` with ``batch_size=None`` and
    ``num_workers=0``, or iterate over it: the rows are in this process's memory.

    Parameters
    ----------
    partition
        The partition.
    batch_size, mode
        Samples a batch, and what becomes of those that fill none: see :class:`~dshuffle.planning.batching.Batching`.
    arrays
        Names: batches are tuples of these arrays in this order. ``None``: dicts of all arrays.

    Raises
    ------
    InvalidParameter
        If the batch size is larger than the smallest partition, the mode is unknown, or an array has a dtype that
        PyTorch lacks.
    KeyError
        If there is no such array.
    """

    def __init__(
        self, partition: Partition, batch_size: int, *, mode: str = DROP, arrays: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self.batching = Batching(len(partition), *partition.shares, as_integer("batch_size", batch_size, 1), mode)
        self._partition = partition
        self._names = tuple(partition.names if arrays is None else arrays)
        self._as_tuple = arrays is not None
        for name, array in partition.take(np.arange(0), self._names).items():
            try:
                torch.from_numpy(array)
            except (TypeError, ValueError):
                hint = "Choose others with arrays=, or use partition.batches()."
                raise InvalidParameter.of(
                    f"arrays[{name!r}].dtype", str(array.dtype), "one of PyTorch's", hint
                ) from None
        self._first = 0
        self.set_epoch(partition.epoch)

    def __len__(self) -> int:
        """Batches, the same number on every rank."""
        return len(self.batching)

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            hint = "The rows are in this process's memory; loading takes no time that another process could save."
            raise InvalidParameter.of("num_workers", get_worker_info().num_workers, "0", hint)
        first, self._first = self._first, 0
        for batch in range(first, len(self)):
            self._position = batch + 1
            positions = self.batching.positions(batch)
            if self._order is not None:
                positions = self._order[positions]
            columns = self._partition.take(positions, self._names)
            tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
            yield tuple(tensors.values()) if self._as_tuple else tensors

    def set_epoch(self, epoch: int) -> None:
        """Go back to the first batch, in the order of this epoch.

        The partition's own epoch (which is the default) has the partition's order. Every other gives the same samples
        in an order of its own, for several passes over one partition.
        """
        self._epoch = as_integer("epoch", epoch)
        self._first = self._position = 0
        own = self._partition
        path = "pass", own.epoch, own.rank, self._epoch
        self._order = None if self._epoch == own.epoch else permutation(len(own), *path)

    def state_dict(self) -> dict[str, int | str]:
        """How far the last iteration has come: plain numbers, to be stored in a checkpoint."""
        return {**self._identity(), "epoch": self._epoch, "batch": self._position % len(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin after the last batch that was given before :meth:`state_dict` was called.

        Raises
        ------
        InvalidParameter
            If the state is that of another partition, batch size or mode.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                hint = "The state belongs to another partition or other batches."
                raise InvalidParameter.of(f"state[{name!r}]", state.get(name), repr(value), hint)
        self.set_epoch(state["epoch"])
        self._first = self._position = as_integer("state['batch']", state["batch"], 0)

    def _identity(self) -> dict[str, int | str]:
        own, batching = self._partition, self.batching
        return {
            "partition_epoch": own.epoch,
            "rank": own.rank,
            "samples": len(own),
            "batch_size": batching.batch_size,
            "mode": batching.mode,
        }
