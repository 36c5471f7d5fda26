"""Where all ranks of a session bring an array each, step by step, and get the mean of all: on rank 0's event loop.

A task's handle on the tasks of the other ranks, for steps that all take together.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import Worker, get_worker, secede
from distributed.utils import sync
from numpy.typing import ArrayLike, NDArray

from dshuffle.errors import ClusterError, InvalidParameter, PeerFailed
from dshuffle.exchange.comms import disband, meet
from dshuffle.runtime.partition import Partition
from dshuffle.runtime.replies import unwrap

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


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks of a session meet: rank 0's worker, and the number of the meeting."""

    session_id: str
    number: int
    size: int
    address: str


class Group:
    """All ranks, while they run one function at the same time (see :meth:`dshuffle.Epoch.together`).

    Attributes
    ----------
    rank, size
        This rank, and how many there are.
    """

    def __init__(self, place: Place, rank: int) -> None:
        self.rank = rank
        self.size = place.size
        self._place = place
        self._step = 0

    def mean(self, values: ArrayLike, weight: float = 1.0) -> NDArray[Any]:
        """The weighted mean of all ranks' arrays, once all ranks have come this far.

        Parameters
        ----------
        values
            Numbers; the same shape on all ranks.
        weight
            Of this rank's values: finite, at least 0, and not 0 on all ranks.

        Returns
        -------
        numpy.ndarray
            The same on all ranks, to the last bit. Other ranks in this process may share its memory: do not write.

        Raises
        ------
        InvalidParameter
            These are no numbers, or no weight.
        PeerFailed
            Another rank has failed or has returned, or shapes or weights do not fit together.
        """
        array, weight = np.asarray(values), float(weight)
        if array.dtype.kind not in "biufc":
            raise InvalidParameter.of("values.dtype", str(array.dtype), "one of numbers")
        if not 0 <= weight < math.inf:
            raise InvalidParameter.of("weight", weight, "a finite number >= 0")
        worker = get_worker()
        step, self._step = self._step, self._step + 1
        message = {"size": self.size, "step": step, "rank": self.rank, "weight": weight}
        mean: NDArray[Any] = sync(worker.loop, self._meet, worker, values=array, **message)
        return mean

    def fail(self, reason: str) -> None:
        """Tell the others that this rank will not come."""
        worker = get_worker()
        sync(worker.loop, self._disband, worker, reason)

    async def _meet(self, worker: Worker, **message: Any) -> NDArray[Any]:
        place = self._place
        try:
            reply = await meet(worker, place.address, session_id=place.session_id, number=place.number, **message)
        except OSError as error:
            raise PeerFailed(f"rank 0 cannot be reached at {place.address}: {error}") from error
        mean: NDArray[Any] = unwrap(reply, place.address)["mean"]
        return mean

    async def _disband(self, worker: Worker, reason: str) -> None:
        place = self._place
        try:
            await disband(worker, place.address, session_id=place.session_id, number=place.number, reason=reason)
        except (OSError, ClusterError):  # then nobody waits there
            return


def run_together(partition: Partition, place: Place, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The task behind :meth:`dshuffle.Epoch.together`: no rank waits for one that has failed."""
    # Tasks that wait for each other must all run. Where two sessions share workers of one thread, each might hold
    # threads that the other waits for; so none of these tasks counts as one of its worker's.
    secede()
    group = Group(place, partition.rank)
    try:
        return fn(partition, group, *args, **kwargs)
    except PeerFailed:
        raise
    except BaseException as error:
        group.fail(f"rank {group.rank} has failed: {type(error).__name__}: {error}")
        raise
