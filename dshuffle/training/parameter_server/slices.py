"""What a parameter server keeps: a slice of the parameters. As Dask actors, and in a simulation, by the same code."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dshuffle.errors import ClusterError
from dshuffle.training.parameter_server.models import Parameters


class Reply(NamedTuple):
    """What a worker gets for a pull or a push.

    Parameters
    ----------
    parameters
        The slice as it is now, a copy.
    version
        Updates that are in it.
    staleness
        Updates of others since the worker's last reply; of a pull 0.
    more
        Whether to compute another gradient in this epoch.
    """

    parameters: Parameters
    version: int
    staleness: int
    more: bool


class ParameterSlice:
    """Some of the parameters; every push is applied at once, in the order in which pushes come.

    Parameters
    ----------
    parameters
        Copied.

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
            Of a single worker: paper 002's alpha_w.
        n_updates
            After how many it ends; None if every worker knows by itself.
        """
        self._step = step
        self._left = n_updates

    def pull(self, rank: int, following: int) -> Reply:
        """The parameters for the first gradient of an epoch, which will be of so many samples."""
        return self._reply(0, following)

    def push(self, rank: int, version: int, gradient: Parameters, following: int) -> Reply:
        """Apply a mean gradient (paper 002, equation 5); the parameters for the next one, of so many samples.

        Raises
        ------
        ClusterError
            Another worker has failed.
        """
        self.check()
        stale = self._version - version
        # Whoever trains looks for values that are not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            self._parameters -= self._step * gradient
        self._version += 1
        return self._reply(stale, following)

    def parameters(self) -> Parameters:
        """A copy."""
        return self._parameters.copy()

    def abort(self) -> None:
        """Let all pushes fail from now on."""
        self._aborted = True

    def check(self) -> None:
        """Raise unless training goes on.

        Raises
        ------
        ClusterError
            Another worker has failed.
        """
        if self._aborted:
            raise ClusterError("training has ended: another worker failed, or was cancelled")

    def _reply(self, staleness: int, following: int) -> Reply:
        more = following > 0 and self._left != 0
        if more and self._left is not None:
            self._left -= 1
        return Reply(self.parameters(), self._version, staleness, more)


class Turns:
    """Whose gradient is ready next, in virtual time; of several at the same time the lowest rank's.

    Parameters
    ----------
    speeds
        Samples that each rank goes through in a unit of time.

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
        """A rank begins the gradient of so many samples, where its last one ended."""
        heapq.heappush(self._ready, (self._clock[rank] + rows / self._speeds[rank], rank))

    def next(self) -> int | None:
        """The rank whose gradient is ready next; None if no rank computes one."""
        return self._ready[0][1] if self._ready else None

    def finish(self) -> None:
        """That gradient is applied."""
        time, rank = heapq.heappop(self._ready)
        self._clock[rank] = time


class OrderedSlice:
    """A slice whose pushes wait for their turn, so that workers seem to have given speeds, to the last bit.

    Pulls are answered at once, but the first push of an epoch waits until all workers have pulled. Not waiting for
    anybody is then true of virtual time only. For one event loop: as an actor, its worker's own. Nothing in it waits
    while it holds the loop, but updates are computed there, and meanwhile the worker answers nobody. (Dask runs the
    methods of a :class:`ParameterSlice`, which are no coroutines, in a thread for actors.)

    Parameters
    ----------
    parameters
        Copied.
    speeds
        As in :class:`Turns`, of all ranks.
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
        """A copy."""
        return self._slice.parameters()

    async def abort(self) -> None:
        """Let all pushes fail, those that wait too."""
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
        """Answer a push that waits; of how many samples the worker's next gradient will be."""
        reply, version, gradient, following = self._waiting.pop(rank)
        if reply.cancelled():  # its connection is lost
            return 0
        try:
            answer = self._slice.push(rank, version, gradient, following)
        except ClusterError as error:
            reply.set_exception(error)
            return 0
        reply.set_result(answer)
        return following if answer.more else 0
