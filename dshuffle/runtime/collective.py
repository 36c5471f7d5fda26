"""Collective mean over all ranks of a session.

Each rank sends an array to rank 0's worker, which averages the arrays on its event loop and returns the mean to every
rank. :class:`Group` is the interface for tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import Worker, get_worker, secede
from distributed.utils import sync
from numpy.typing import ArrayLike, NDArray

from dshuffle.errors import ClusterError, InvalidParameter, PeerFailed
from dshuffle.exchange.comms import request
from dshuffle.runtime.messages import unless, unwrap
from dshuffle.runtime.partition import Partition
from dshuffle.runtime.session_spec import PLUGIN

Array = NDArray[Any]

OFFLOAD_BYTES = 2**20
"""Arrays with more bytes than this in total over all ranks are averaged in a thread, to keep the event loop free."""


class Collective:
    """The averaging steps of one call of :meth:`dshuffle.Epoch.together`. At most one step is open at any time.

    Later calls in a session have higher numbers.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._step = 0
        self._arrived: dict[int, tuple[Array, float]] = {}
        self._mean: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
        self._failure: Callable[[], PeerFailed] | None = None

    async def mean(self, *, size: int, step: int, rank: int, values: Array, weight: float) -> Array:
        """Wait for the values of all ranks and return their weighted mean.

        The values are added in rank order, not in order of arrival, so the result is reproducible to the last bit.
        """
        if self._failure is None and (step != self._step or rank in self._arrived):
            reason = f"rank {rank} called mean for step {step} while the others were at step {self._step}"
            self.fail(reason, transient=False)
        if self._failure is not None:
            raise self._failure()
        self._arrived[rank] = values, weight
        mean, loop = self._mean, asyncio.get_running_loop()
        if len(self._arrived) == size:
            arrived = [self._arrived[rank] for rank in range(size)]
            self._step += 1
            self._arrived, self._mean = {}, loop.create_future()
            try:
                if sum(array.nbytes for array, _ in arrived) > OFFLOAD_BYTES:
                    result = await loop.run_in_executor(None, weighted_mean, arrived)
                else:
                    result = weighted_mean(arrived)
            except Exception as error:  # any error must reach the other ranks, which wait for this mean
                reason = str(error) if isinstance(error, InvalidParameter) else f"{type(error).__name__}: {error}"
                self.fail(reason, transient=False, mean=mean)
            else:
                mean.set_result(result)
        return await asyncio.shield(mean)

    def fail(self, reason: str, *, transient: bool = True, mean: asyncio.Future[Array] | None = None) -> None:
        """Fail all current and future waiters. Only the first reason is kept.

        ``transient`` says whether another attempt can succeed: not if the ranks do not make the same calls.
        """
        self._failure = self._failure or functools.partial(PeerFailed, reason, transient=transient)
        self._arrived.clear()
        for future in (self._mean, mean):
            if future is not None and not future.done():
                future.set_exception(self._failure())
                future.exception()  # marks it as retrieved, in case nobody waits


def weighted_mean(arrived: list[tuple[Array, float]]) -> Array:
    """Weighted mean of arrays of the same shape."""
    shapes = {values.shape for values, _ in arrived}
    if len(shapes) > 1:
        raise InvalidParameter.of("values.shape", sorted(shapes), "the same on all ranks")
    total = sum(weight for _, weight in arrived)
    if not 0 < total < math.inf:
        raise InvalidParameter.of("weight", total, "positive and finite when summed over all ranks")
    first, weight = arrived[0]
    mean = np.asarray(first * (weight / total))
    for values, weight in arrived[1:]:
        mean += values * (weight / total)
    return mean


@dataclass(frozen=True, slots=True)
class CollectiveId:
    """Address at which the ranks of a session average (rank 0's worker), and the number of the call."""

    session_id: str
    number: int
    size: int
    address: str


class Group:
    """All ranks that run one function at the same time (see :meth:`dshuffle.Epoch.together`).

    Attributes
    ----------
    rank, size
        This rank, and the number of ranks.
    address
        Dask address of the worker of rank 0.
    """

    def __init__(
        self, collective: CollectiveId, rank: int, note_waiting: Callable[[float], None] = lambda _: None
    ) -> None:
        self.rank = rank
        self.size = collective.size
        self.address = collective.address
        self._collective = collective
        self._note_waiting = note_waiting
        self._step = 0

    def mean(self, values: ArrayLike, weight: float = 1.0) -> NDArray[Any]:
        """Wait for all ranks to make the same call and return the weighted mean of their arrays.

        Parameters
        ----------
        values
            Array of numbers, with the same shape on all ranks.
        weight
            Weight of this rank's values: finite and at least 0. At least one rank needs a positive weight.

        Returns
        -------
        numpy.ndarray
            The mean, identical on all ranks to the last bit. Do not write to it: other ranks in this process may share
            its memory.

        Raises
        ------
        InvalidParameter
            If ``values`` are not numbers, or ``weight`` is not allowed.
        PeerFailed
            If another rank has failed or returned, or the shapes or weights of the ranks do not fit together.
        """
        array, weight = np.asarray(values), float(weight)
        if array.dtype.kind not in "biufc":
            raise InvalidParameter.of("values.dtype", str(array.dtype), "a numeric dtype")
        if not 0 <= weight < math.inf:
            raise InvalidParameter.of("weight", weight, "a finite number >= 0")
        worker = get_worker()
        step, self._step = self._step, self._step + 1
        message = {"size": self.size, "step": step, "rank": self.rank, "weight": weight}
        began = time.perf_counter()
        mean: NDArray[Any] = sync(worker.loop, self._request_mean, worker, values=array, **message)
        self._note_waiting(time.perf_counter() - began)
        return mean

    def fail(self, reason: str) -> None:
        """Tell the other ranks that this rank has failed."""
        worker = get_worker()
        sync(worker.loop, self._end_collective, worker, reason)

    async def _request_mean(self, worker: Worker, **message: Any) -> NDArray[Any]:
        try:
            reply = await self._ask_rank_0(worker, "mean", **message)
        except OSError as error:
            raise PeerFailed(f"rank 0 cannot be reached at {self.address}: {error}") from error
        mean: NDArray[Any] = unwrap(reply, self.address)["mean"]
        return mean

    async def _end_collective(self, worker: Worker, reason: str) -> None:
        with contextlib.suppress(OSError, ClusterError):  # rank 0 or its session is gone, so nobody waits there
            await self._ask_rank_0(worker, "end_collective", reason=reason)

    async def _ask_rank_0(self, worker: Worker, operation: str, **message: Any) -> Any:
        # Dask tries for half a minute to connect to a worker that is gone. The session knows earlier that it is.
        session_id, number, address = self._collective.session_id, self._collective.number, self.address
        error = PeerFailed(f"rank 0 has left {address}, or the session has been closed")
        plugin: Any = worker.plugins.get(PLUGIN)
        session = None if plugin is None else plugin.sessions.get(session_id)
        if session is None:
            raise error
        call = request(worker, address, operation, session_id=session_id, number=number, **message)
        return await unless(session.addresses.until_left(0, address), call, error)


def run_together(
    partition: Partition, collective: CollectiveId, fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run the task behind :meth:`dshuffle.Epoch.together` and report its failure to the other ranks."""
    # Tasks that wait for each other must all run. If two sessions share single-threaded workers, each could hold
    # threads that the other waits for. Seceding keeps these tasks out of the worker's thread pool.
    secede()
    group = Group(collective, partition.rank, partition.note_waiting)
    try:
        return fn(partition, group, *args, **kwargs)
    except PeerFailed:
        raise
    except BaseException as error:
        group.fail(f"rank {group.rank} has failed: {type(error).__name__}: {error}")
        raise
