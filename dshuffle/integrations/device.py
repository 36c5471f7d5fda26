"""Batches of tensors on a device (extra ``torch``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter
from dshuffle.integrations.torch import tensor_of, torch

Arrays = tuple[NDArray[Any], ...]
Tensors = tuple[torch.Tensor, ...]
Load = Callable[[int], Arrays]


def to_device(device: Any) -> Callable[[Load, int], Callable[[int], Tensors]]:
    """Return a function that makes tensors on a device of the arrays of batches.

    Parameters
    ----------
    device
        A ``torch.device``, or its name. On ``"cuda"``, the next batch is copied from pinned memory on a stream of its
        own while the current one is trained on.

    Raises
    ------
    InvalidParameter
        If there is no such device.

    Examples
    --------
    >>> import numpy as np
    >>> batches = to_device("cpu")(lambda number: (np.full(2, number),), 3)
    >>> batches(1)
    (tensor([1, 1]),)
    """
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise InvalidParameter.of("device", device, f"a device of torch that is there ({error})") from error
    if where.type == "cuda":
        return lambda load, n_batches: DeviceBatches(load, n_batches, where)
    return lambda load, n_batches: lambda number: _tensors(load(number), where)


def _tensors(arrays: Arrays, device: torch.device) -> Tensors:
    return tuple(tensor_of(array).to(device) for array in arrays)


class DeviceBatches:
    """Batches on a CUDA device. While one is trained on, the next one is copied.

    Parameters
    ----------
    load
        Returns the arrays of a batch.
    n_batches
        Number of batches.
    device
        The device.
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
