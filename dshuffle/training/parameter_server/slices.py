"""Slices of the parameters that parameter servers keep, used both by Dask actors and in simulations.

References
----------
Provatas et al. (2021), equation 5; see docs/papers.md.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import ClusterError, InvalidParameter, PeerFailed

Parameters = NDArray[np.floating[Any]]
Rows = NDArray[Any]


class Model(Protocol):
    """Loss that is a mean over samples, and its gradient. Immutable, as it is sent to all workers."""

    @property
    def n_classes(self) -> int | None:
        """Number of classes, with targets in ``[0, n_classes)``; None if targets are arbitrary numbers."""

    def first(self, n_features: int, seed: int) -> Parameters:
        """Return the initial parameters, ``(p,)``."""

    def gradient(self, parameters: Parameters, rows: Rows, targets: NDArray[Any]) -> tuple[Parameters, float]:
        """Return the mean gradient of the loss over a mini-batch, a new ``(p,)`` array, and the mean loss."""

    def loss(self, parameters: Parameters, rows: Rows, targets: NDArray[Any]) -> float:
        """Return the mean loss over some samples."""


@dataclass(frozen=True, slots=True)
class SoftmaxRegression:
    """Multinomial logistic regression: cross-entropy of ``softmax(x @ W + b)``.

    Parameters
    ----------
    n_classes
        Number of classes. Labels are integers from 0 to ``n_classes - 1``.

    Raises
    ------
    InvalidParameter
        There are fewer than two classes.

    Examples
    --------
    >>> model = SoftmaxRegression(2)
    >>> rows, labels = np.array([[1.0], [-1.0]]), np.array([0, 1])
    >>> gradient, loss = model.gradient(model.first(n_features=1, seed=0), rows, labels)
    >>> gradient, round(loss, 4)
    (array([-0.5,  0.5,  0. ,  0. ]), 0.6931)
    >>> model.predict(-gradient, rows)
    array([0, 1])
    """

    n_classes: int

    def __post_init__(self) -> None:
        as_integer("n_classes", self.n_classes, 2)

    def first(self, n_features: int, seed: int) -> Parameters:
        """Return zeros for any seed, as the loss is convex: ``W`` row by row, then ``b``."""
        return np.zeros((n_features + 1) * self.n_classes)

    def gradient(self, parameters: Parameters, rows: Rows, targets: NDArray[Any]) -> tuple[Parameters, float]:
        """See :class:`Model`."""
        wrong, losses = self._probabilities(parameters, rows, targets)
        wrong[np.arange(len(rows)), _labels(targets)] -= 1
        wrong /= len(rows)
        gradient = np.empty((rows.shape[1] + 1, self.n_classes))
        np.dot(rows.T, wrong, out=gradient[:-1])
        wrong.sum(axis=0, out=gradient[-1])
        return gradient.ravel(), float(losses.mean())

    def loss(self, parameters: Parameters, rows: Rows, targets: NDArray[Any]) -> float:
        """See :class:`Model`."""
        return float(self._probabilities(parameters, rows, targets)[1].mean())

    def predict(self, parameters: Parameters, rows: Rows) -> NDArray[np.int64]:
        """Return the most likely class of each row, ``(n,)``."""
        classes: NDArray[np.int64] = self._scores(parameters, rows).argmax(axis=1)
        return classes

    def _scores(self, parameters: Parameters, rows: Rows) -> NDArray[np.float64]:
        weights = parameters.reshape(-1, self.n_classes)
        scores: NDArray[np.float64] = rows @ weights[:-1] + weights[-1]
        return scores

    def _probabilities(
        self, parameters: Parameters, rows: Rows, targets: NDArray[Any]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        scores = self._scores(parameters, rows)
        scores -= scores.max(axis=1, keepdims=True)
        own = scores[np.arange(len(rows)), _labels(targets)]
        np.exp(scores, out=scores)
        sums = scores.sum(axis=1, keepdims=True)
        scores /= sums
        return scores, np.log(sums[:, 0]) - own


@dataclass(frozen=True, slots=True)
class LinearModel:
    """Linear regression: half the squared error of ``x @ w + b``, or of ``x @ w``.

    Parameters
    ----------
    intercept
        Whether the model has ``b``, its last parameter.

    Examples
    --------
    >>> model = LinearModel()
    >>> model.gradient(np.zeros(2), np.array([[1.0], [3.0]]), np.array([1.0, 2.0]))
    (array([-3.5, -1.5]), 1.25)
    """

    intercept: bool = True

    @property
    def n_classes(self) -> None:
        """See :class:`Model`."""
        return None

    def first(self, n_features: int, seed: int) -> Parameters:
        """Return zeros for any seed."""
        return np.zeros(n_features + self.intercept)

    def gradient(self, parameters: Parameters, rows: Rows, targets: NDArray[Any]) -> tuple[Parameters, float]:
        """See :class:`Model`."""
        wrong = self.predict(parameters, rows) - targets
        gradient = np.empty(len(parameters))
        np.dot(wrong, rows, out=gradient[: rows.shape[1]])
        if self.intercept:
            gradient[-1] = wrong.sum()
        gradient /= len(rows)
        return gradient, float(wrong @ wrong) / (2 * len(rows))

    def loss(self, parameters: Parameters, rows: Rows, targets: NDArray[Any]) -> float:
        """See :class:`Model`."""
        wrong = self.predict(parameters, rows) - targets
        return float(wrong @ wrong) / (2 * len(rows))

    def predict(self, parameters: Parameters, rows: Rows) -> NDArray[np.float64]:
        """Return the predicted values, ``(n,)``."""
        values: NDArray[np.float64] = rows @ parameters[: rows.shape[1]]
        return values + parameters[-1] if self.intercept else values


def as_rows(values: NDArray[Any]) -> Rows:
    """Return ``(n, ...)`` numbers as ``(n, m)`` floats. float32 is kept, all other dtypes become float64."""
    flat = values.reshape(len(values), math.prod(values.shape[1:]))
    return flat if flat.dtype in (np.float32, np.float64) else flat.astype(np.float64)


def _labels(targets: NDArray[Any]) -> NDArray[np.intp]:
    """Return targets as integer indices. Booleans would act as a mask."""
    return np.asarray(targets, np.intp)


def check_labels(target: str, labels: NDArray[Any], n_samples: int, n_classes: int) -> None:
    """Check that labels suit a model."""
    if labels.dtype.kind not in "biu":
        raise InvalidParameter.of(
            "target", target, f"an array of integers or booleans (it is {labels.dtype})", "Number the classes from 0."
        )
    if len(labels) == n_samples:
        raise InvalidParameter.of(
            "target", target, f"an array whose labels occur more than once (its {n_samples} labels are all distinct)"
        )
    outside = labels[(labels < 0) | (labels >= n_classes)]
    if len(outside):
        allowed = f"an array of labels in [0, {n_classes}) (it contains {outside[0]})"
        hint = "Number the classes from 0, and set n_classes of the model to their number."
        raise InvalidParameter.of("target", target, allowed, hint)


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
    """Slice of the parameters. Every push is applied at once, in the order of arrival."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters.copy()
        self._version = 0
        self._aborted = False
        self.begin(0.0, None)

    def begin(self, step: float, n_updates: int | None) -> None:
        """Start an epoch."""
        self._step = step
        self._left = n_updates
        self._started: set[int] = set()

    def pull(self, rank: int, following: int) -> Reply:
        """Return the parameters for the first gradient of an epoch, which will use ``following`` samples."""
        if rank in self._started:
            raise PeerFailed(f"rank {rank} began the epoch again, because its worker was lost")
        self._started.add(rank)
        return self._reply(0, following)

    def push(self, rank: int, version: int, gradient: Parameters, following: int) -> Reply:
        """Apply a mean gradient (equation 5), and return the parameters for the next gradient.

        The next gradient will use ``following`` samples.
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
        """Raise if training has been aborted."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Staleness:
    """Number of updates by other workers between a worker's pull and its push.

    Parameters
    ----------
    counts
        ``(n_workers, most + 1)`` int64, pushes of each rank by their staleness. If parameters are split over several
        servers, the staleness of a push is its largest staleness at any of them.

    Examples
    --------
    >>> staleness = Staleness(np.array([[2, 0, 2], [0, 4, 0]]))
    >>> staleness.pushes, staleness.most, staleness.mean
    (8, 2, 1.0)
    >>> staleness.mean_by_rank
    (1.0, 1.0)
    """

    counts: NDArray[np.int64]

    @property
    def histogram(self) -> tuple[int, ...]:
        """Number of pushes of all ranks by staleness, from 0."""
        return tuple(self.counts.sum(axis=0).tolist())

    @property
    def pushes(self) -> int:
        """Total number of pushes."""
        return int(self.counts.sum())

    @property
    def pushes_by_rank(self) -> tuple[int, ...]:
        """Number of pushes of each rank."""
        return tuple(self.counts.sum(axis=1).tolist())

    @property
    def most(self) -> int:
        """Largest staleness."""
        return int(np.flatnonzero(self.counts.any(axis=0)).max(initial=0))

    @property
    def mean(self) -> float:
        """Mean staleness over all pushes."""
        return float(self.counts.sum(axis=0) @ np.arange(self.counts.shape[1]) / max(1, self.pushes))

    @property
    def mean_by_rank(self) -> tuple[float, ...]:
        """Mean staleness over the pushes of each rank. Slow workers make the stalest pushes."""
        sums = self.counts @ np.arange(self.counts.shape[1])
        return tuple((sums / np.maximum(1, self.counts.sum(axis=1))).tolist())

    @classmethod
    def of(cls, pushes: list[list[int]]) -> Staleness:
        """Count the pushes of each rank by staleness, from the staleness of every push."""
        most = max((value for own in pushes for value in own), default=0)
        return cls(np.stack([np.bincount(np.asarray(own, np.int64), minlength=most + 1) for own in pushes]))
