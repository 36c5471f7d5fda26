"""Slices of the parameters that parameter servers keep, used both by Dask actors and in simulations.

References
----------
Provatas et al. (2021), equation 5; see docs/papers.md.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dshuffle.errors import ClusterError, PeerFailed
from dshuffle.training.parameter_server.models import Parameters


class Reply(NamedTuple):
    """Reply of a server to a pull or a push.

    Parameters
    ----------
    parameters
        Copy of the current slice.
    version
        Number of updates applied to the slice.
    staleness
        Number of updates by other workers since this worker's last reply; 0 for a pull.
    more
        Whether to compute another gradient in this epoch.
    """

    parameters: Parameters
    version: int
    staleness: int
    more: bool


class ParameterSlice:
    """Slice of the parameters. Every push is applied at once, in the order of arrival.

    Parameters
    ----------
    parameters
        Initial values, copied.

    Examples
    --------
    >>> import numpy as np
    >>> part = ParameterSlice(np.zeros(2))
    >>> part.begin(step=0.5, n_updates=None)
    >>> first, second = part.pull(0, following=10), part.pull(1, following=10)
    >>> part.push(0, first.version, np.array([2.0, 4.0]), following=0)
    Reply(parameters=array([-1., -2.]), version=1, staleness=0, more=False)
    >>> part.push(1, second.version, np.array([2.0, 0.0]), following=7)
    Reply(parameters=array([-2., -2.]), version=2, staleness=1, more=True)
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters.copy()
        self._version = 0
        self._aborted = False
        self.begin(0.0, None)

    def begin(self, step: float, n_updates: int | None) -> None:
        """Start an epoch.

        Parameters
        ----------
        step
            Step of a single worker (alpha_w).
        n_updates
            Number of updates in the epoch; None if every worker knows when its epoch ends.
        """
        self._step = step
        self._left = n_updates
        self._started: set[int] = set()

    def pull(self, rank: int, following: int) -> Reply:
        """Return the parameters for the first gradient of an epoch, which will use ``following`` samples.

        Raises
        ------
        PeerFailed
            The rank has begun this epoch before. Its worker was lost, and its gradients must not be applied twice.
        """
        if rank in self._started:
            raise PeerFailed(f"rank {rank} began the epoch again, because its worker was lost")
        self._started.add(rank)
        return self._reply(0, following)

    def push(self, rank: int, version: int, gradient: Parameters, following: int) -> Reply:
        """Apply a mean gradient (equation 5), and return the parameters for the next gradient.

        The next gradient will use ``following`` samples.

        Raises
        ------
        ClusterError
            Another worker has failed.
        """
        self.check()
        stale = self._version - version
        # The trainer checks for values that are not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            self._parameters -= self._step * gradient
        self._version += 1
        return self._reply(stale, following)

    def parameters(self) -> Parameters:
        """Return a copy of the parameters."""
        return self._parameters.copy()

    def abort(self) -> None:
        """Make all later pushes fail."""
        self._aborted = True

    def check(self) -> None:
        """Raise if training has been aborted.

        Raises
        ------
        ClusterError
            Another worker has failed.
        """
        if self._aborted:
            raise ClusterError("training has ended because another worker failed or was cancelled")

    def _reply(self, staleness: int, following: int) -> Reply:
        more = following > 0 and self._left != 0
        if more and self._left is not None:
            self._left -= 1
        return Reply(self.parameters(), self._version, staleness, more)


class Turns:
    """Order in which gradients are ready in virtual time. Ties go to the lowest rank.

    Parameters
    ----------
    speeds
        Samples that each rank processes per unit of virtual time.

    Examples
    --------
    >>> turns = Turns([1.0, 3.0])
    >>> for rank in range(2):
    ...     turns.begin(rank, rows=6)
    >>> order = []
    >>> while (rank := turns.next()) is not None and len(order) < 6:
    ...     order.append(rank)
    ...     turns.finish()
    ...     turns.begin(rank, rows=6)
    >>> order
    [1, 1, 0, 1, 1, 1]
    """

    def __init__(self, speeds: Sequence[float]) -> None:
        self._speeds = speeds
        self._clock = [0.0] * len(speeds)
        self._ready: list[tuple[float, int]] = []

    def begin(self, rank: int, rows: int) -> None:
        """Start a rank's gradient of ``rows`` samples at the time when its last gradient ended."""
        heapq.heappush(self._ready, (self._clock[rank] + rows / self._speeds[rank], rank))

    def next(self) -> int | None:
        """Return the rank whose gradient is ready next; None if no gradient is being computed."""
        return self._ready[0][1] if self._ready else None

    def finish(self) -> None:
        """Mark the next gradient as applied."""
        time, rank = heapq.heappop(self._ready)
        self._clock[rank] = time


class OrderedSlice:
    """Slice that applies pushes in virtual-time order, so that workers of given speeds are emulated bit for bit.

    Pulls are answered at once, but the first push of an epoch waits until all workers have pulled. Workers thus wait in
    real time, but not in virtual time.

    An object belongs to one event loop: for an actor, the loop of its worker. No method blocks the loop while it waits,
    but updates are computed on the loop, and meanwhile the worker does not answer anybody. (Dask runs the methods of a
    :class:`ParameterSlice` actor in a thread, because they are not coroutines.)

    Parameters
    ----------
    parameters
        Initial values, copied.
    speeds
        Speeds of all ranks, as in :class:`Turns`.
    """

    def __init__(self, parameters: Parameters, speeds: Sequence[float]) -> None:
        self._slice = ParameterSlice(parameters)
        self._speeds = speeds
        self._waiting: dict[int, tuple[asyncio.Future[Reply], int, Parameters, int]] = {}

    async def begin(self, step: float, n_updates: int | None) -> None:
        """See :class:`ParameterSlice`."""
        self._slice.begin(step, n_updates)
        self._turns = Turns(self._speeds)
        self._pulled = 0

    async def pull(self, rank: int, following: int) -> Reply:
        """See :class:`ParameterSlice`."""
        reply = self._slice.pull(rank, following)
        self._pulled += 1
        self._turns.begin(rank, following)
        self._admit()
        return reply

    async def push(self, rank: int, version: int, gradient: Parameters, following: int) -> Reply:
        """See :class:`ParameterSlice`."""
        self._slice.check()
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[rank] = (reply, version, gradient, following)
        self._admit()
        return await reply

    async def parameters(self) -> Parameters:
        """Return a copy of the parameters."""
        return self._slice.parameters()

    async def abort(self) -> None:
        """Make all pushes fail, including those that wait."""
        self._slice.abort()
        for rank in list(self._waiting):
            self._apply(rank)

    def _admit(self) -> None:
        if self._pulled < len(self._speeds):
            return
        while (rank := self._turns.next()) is not None and rank in self._waiting:
            self._turns.finish()
            following = self._apply(rank)
            if following:
                self._turns.begin(rank, following)

    def _apply(self, rank: int) -> int:
        """Answer a waiting push, and return the number of samples of the worker's next gradient."""
        reply, version, gradient, following = self._waiting.pop(rank)
        if reply.cancelled():  # the worker's connection is lost
            return 0
        try:
            answer = self._slice.push(rank, version, gradient, following)
        except ClusterError as error:
            reply.set_exception(error)
            return 0
        reply.set_result(answer)
        return following if answer.more else 0
