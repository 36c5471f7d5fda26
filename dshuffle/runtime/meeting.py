"""Where all ranks of a session bring an array each, step by step, and get the mean of all: on rank 0's event loop."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dshuffle.errors import InvalidParameter, PeerFailed

Array = NDArray[Any]

OFFLOAD_BYTES = 2**20
"""Arrays of more bytes, over all ranks, are summed in a thread: the event loop has messages to answer."""


class Meeting:
    """The steps of one call of :meth:`dshuffle.Epoch.together`. At most one of them is open at any time.

    Parameters
    ----------
    number
        Later meetings of a session have higher numbers.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._step = 0
        self._arrived: dict[int, tuple[Array, float]] = {}
        self._mean: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
        self._reason = ""

    async def mean(self, *, size: int, step: int, rank: int, values: Array, weight: float) -> Array:
        """The weighted mean of all ranks' values, once all have come.

        The sum is taken in rank order, whoever comes first: the result is the same to the last bit in every run.

        Raises
        ------
        PeerFailed
            A rank has failed, or does so while others wait.
        """
        if self._reason:
            raise PeerFailed(self._reason)
        if step != self._step or rank in self._arrived:
            self.fail(f"rank {rank} came to step {step} when the others were at step {self._step}")
            raise PeerFailed(self._reason)
        self._arrived[rank] = values, weight
        mean = self._mean
        if len(self._arrived) == size:
            arrived = [self._arrived[rank] for rank in range(size)]
            self._step += 1
            self._arrived, self._mean = {}, asyncio.get_running_loop().create_future()
            try:
                if sum(one.nbytes for one, _ in arrived) > OFFLOAD_BYTES:
                    result = await asyncio.get_running_loop().run_in_executor(None, weighted_mean, arrived)
                else:
                    result = weighted_mean(arrived)
            except Exception as error:  # whatever it is: the others wait for this sum
                reason = str(error) if isinstance(error, InvalidParameter) else f"{type(error).__name__}: {error}"
                _reject(mean, reason)
                self.fail(reason)
            else:
                mean.set_result(result)
        return await asyncio.shield(mean)

    def fail(self, reason: str) -> None:
        """Send everybody home who waits, and who comes later; the first reason counts."""
        self._reason = self._reason or reason
        self._arrived.clear()
        _reject(self._mean, self._reason)


def weighted_mean(arrived: list[tuple[Array, float]]) -> Array:
    """The mean of some arrays of one shape by their weights.

    Raises
    ------
    InvalidParameter
        The shapes differ, or the weights have no positive and finite sum.
    """
    shapes = {values.shape for values, _ in arrived}
    if len(shapes) > 1:
        raise InvalidParameter.of("values.shape", sorted(shapes), "the same on all ranks")
    total = sum(weight for _, weight in arrived)
    if not 0 < total < math.inf:
        raise InvalidParameter.of("weight", total, "positive and finite over all ranks")
    first, weight = arrived[0]
    mean = np.asarray(first * (weight / total))
    for values, weight in arrived[1:]:
        mean += values * (weight / total)
    return mean


def _reject(future: asyncio.Future[Array], reason: str) -> None:
    if not future.done():
        future.set_exception(PeerFailed(reason))
        future.exception()  # perhaps nobody waits
