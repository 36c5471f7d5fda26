"""Asynchronous SGD with parameter servers: workers pull and push without waiting for each other.

:class:`ParameterServer` says what a pull or a push changes and which workers it answers. Dask actors and
:func:`simulate_parameter_server` both run it, and :func:`gradients` is what a worker does with the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import heapq
import itertools
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from distributed import as_completed, get_worker
from distributed.utils import sync
from numpy.typing import ArrayLike, NDArray

from dshuffle.checks import as_integer, as_ranks
from dshuffle.errors import ClusterError, InvalidParameter, PeerFailed, WorkerLost
from dshuffle.planning import GivenSharding
from dshuffle.planning.randomness import permutation
from dshuffle.planning.types import Samples
from dshuffle.runtime import Epoch, Partition, PerRank, Shuffler, gathered
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.runtime.session_spec import WorkerFacts
from dshuffle.sharding import Sharding
from dshuffle.store import Dataset
from dshuffle.training.fit import (
    CONSTANT,
    EarlyStopping,
    History,
    OnEpoch,
    Schedule,
    Trained,
    Validate,
    Watch,
    Work,
    run_epochs,
    timed,
)
from dshuffle.training.inputs import (
    NUMBERS,
    WHOLE,
    check_arrays,
    check_batch,
    check_converging,
    check_fixed_workers,
    check_step,
    measured,
)
from dshuffle.training.synchronous import Network

logger = logging.getLogger(__name__)

Parameters = NDArray[Any]
Rows = NDArray[Any]

ONCE, FREE = "once", "free"
PACES = (ONCE, FREE)

PATIENCE = 60.0
"""Seconds after which an actor that does not answer the client counts as lost."""
PERIOD = 2.0
"""Seconds after which a waiting task checks that its actor still exists."""
ATTEMPTS = 3
"""Attempts at an epoch in which workers are lost."""
LOST = "Worker holding Actor was lost"
"""Dask's error message for a lost actor."""


class Model(Protocol):
    """Loss that is a mean over samples, and its gradient. Immutable, as it is sent to all workers."""

    @property
    def n_classes(self) -> int | None:
        """Number of classes, with targets in ``[0, n_classes)``; None if targets are arbitrary numbers."""

    def first(self, n_features: int, seed: int) -> Parameters:
        """Return the initial parameters, ``(p,)``."""

    def gradient(self, parameters: Parameters, rows: Rows, targets: NDArray[Any]) -> tuple[Parameters, float]:
        """Return the mean gradient of the loss over some samples, a new ``(p,)`` array, and the mean loss."""


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
        loss, gradient, _ = Network((rows.shape[1], self.n_classes)).gradient(parameters, rows, targets)
        return gradient, loss

    def predict(self, parameters: Parameters, rows: Rows) -> NDArray[np.int64]:
        """Return the most likely class of each row, ``(n,)``."""
        scores = Network((rows.shape[1], self.n_classes)).scores(parameters, parameters[:0], rows)
        classes: NDArray[np.int64] = scores.argmax(axis=1)
        return classes


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
        gradient = np.append(np.dot(wrong, rows), [wrong.sum()] * self.intercept)
        return gradient / len(rows), float(wrong @ wrong) / (2 * len(rows))

    def predict(self, parameters: Parameters, rows: Rows) -> NDArray[np.float64]:
        """Return the predicted values, ``(n,)``."""
        values: NDArray[np.float64] = rows @ parameters[: rows.shape[1]]
        return values + parameters[-1] if self.intercept else values


Reply = tuple[Parameters, bool]
"""A copy of the parameters, and whether to compute another gradient in this epoch."""


class ParameterServer:
    """A slice of the parameters in an epoch. With speeds, pushes are applied in the order of virtual time.

    Without speeds, every push is applied at once. With them, a gradient takes samples / speed, ties go to the lowest
    rank, and the first push is applied when all workers have pulled: workers wait in real time, but not in virtual
    time, and the result does not depend on who comes first.

    Parameters
    ----------
    n_updates
        Number of updates of the epoch; None if it ends when all workers have used their samples.
    """

    def __init__(
        self, parameters: Parameters, step: float, n_updates: int | None, speeds: Sequence[float] | None
    ) -> None:
        self._parameters = parameters.copy()
        self._step, self._left, self._speeds = step, n_updates, speeds
        self._version, self._ended = 0, False
        self._seen: dict[int, int] = {}  # the version of the last reply to each rank
        self._pushed: dict[int, tuple[Parameters, int]] = {}
        self._turns: list[tuple[float, int]] = []  # when gradients that are computed will be ready, in virtual time
        self._staleness: dict[int, list[int]] = {}

    def exchange(self, rank: int, gradient: Parameters | None, following: int) -> list[tuple[int, Reply]]:
        """Take a pull (without a gradient) or a push, and return all replies that are due now, with their ranks.

        The next gradient of the rank will use ``following`` samples.
        """
        if self._ended:
            raise ClusterError("training has ended because another worker failed or was cancelled")
        replies = []
        if gradient is None:
            if rank in self._seen:
                raise PeerFailed(f"rank {rank} began the epoch again, because its worker was lost")
            self._staleness[rank] = []
            replies.append((rank, self._reply(rank, following, 0.0)))
        else:
            self._pushed[rank] = gradient, following
        while self._pushed and (self._speeds is None or len(self._seen) == len(self._speeds)):
            now, ready = (0.0, rank) if self._speeds is None else self._turns[0]
            if ready not in self._pushed:
                break
            gradient, following = self._pushed.pop(ready)
            if self._speeds is not None:
                heapq.heappop(self._turns)
            # The trainer checks for values that are not finite.
            with np.errstate(over="ignore", invalid="ignore"):
                self._parameters -= self._step * gradient
            self._staleness[ready].append(self._version - self._seen[ready])
            self._version += 1
            replies.append((ready, self._reply(ready, following, now)))
        return replies

    def _reply(self, rank: int, following: int, now: float) -> Reply:
        more = following > 0 and self._left != 0
        if more and self._left is not None:
            self._left -= 1
        if more and self._speeds is not None:
            heapq.heappush(self._turns, (now + following / self._speeds[rank], rank))
        self._seen[rank] = self._version
        return self._parameters.copy(), more

    def result(self) -> tuple[Parameters, dict[int, list[int]]]:
        """Return the parameters, and the staleness of the pushes of each rank."""
        return self._parameters, self._staleness

    def abort(self) -> None:
        """Make all later pushes fail."""
        self._ended = True


class OrderedServer:
    """Actor of a server with speeds: pushes wait for their turn without holding a thread.

    Updates are computed on the event loop of its worker. (Dask runs the methods of a :class:`ParameterServer` actor in
    a thread, because they are not coroutines.)
    """

    def __init__(self, *settings: Any) -> None:
        self._server = ParameterServer(*settings)
        self._waiting: dict[int, asyncio.Future[list[tuple[int, Reply]]]] = {}

    async def exchange(self, rank: int, gradient: Parameters | None, following: int) -> list[tuple[int, Reply]]:
        """See :class:`ParameterServer`; but return the reply to this rank, when it is due."""
        due = self._server.exchange(rank, gradient, following)
        answer = self._waiting[rank] = asyncio.get_running_loop().create_future()
        for ready, reply in due:
            waiting = self._waiting.pop(ready)
            if not waiting.cancelled():  # the worker's connection is lost
                waiting.set_result([(ready, reply)])
        return list(await answer)

    async def result(self) -> tuple[Parameters, dict[int, list[int]]]:
        """See :class:`ParameterServer`."""
        return self._server.result()

    async def abort(self) -> None:
        """Make all pushes fail, including those that wait."""
        self._server.abort()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ClusterError("training has ended because another worker failed"))


Pushes = Generator[tuple[Parameters | None, int], Parameters, None]
"""Arguments of :meth:`ParameterServer.exchange`, in exchange for parameters."""

Results = Sequence[tuple[Parameters, Mapping[int, Sequence[int]]]]
"""What servers have at the end of an epoch; see :meth:`ParameterServer.result`."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained on what, and how workers share it: mini-batches of B / n samples and steps of alpha / n.

    References
    ----------
    Provatas et al. (2021), equations 3 and 4; see docs/papers.md.
    """

    model: Model
    features: str
    target: str
    n_workers: int
    batch_size: int
    step: float
    pace: str
    speeds: tuple[float, ...] | None
    seed: int

    def __post_init__(self) -> None:
        as_integer("batch_size", self.batch_size, 1)
        as_integer("seed", self.seed)
        if self.batch_size < self.n_workers:
            raise InvalidParameter.of(
                "batch_size", self.batch_size, f"at least the number of workers ({self.n_workers})", "They share it."
            )
        check_step(self.step)
        if self.pace not in PACES:
            raise InvalidParameter.of("pace", self.pace, f"one of {', '.join(PACES)}")
        speeds = self.speeds or (1.0,) * self.n_workers
        if len(speeds) != self.n_workers or not all(0 < speed < math.inf for speed in speeds):
            raise InvalidParameter.of("speeds", speeds, f"{self.n_workers} finite numbers > 0, one per worker")
        if rest := self.batch_size % self.n_workers:
            logger.warning(
                "dshuffle: batch_size=%d on %d workers is rounded to %d: each takes %d samples",
                *(self.batch_size, self.n_workers, self.batch_size - rest, self.size),
            )

    @property
    def size(self) -> int:
        """Samples of a mini-batch of one worker."""
        return self.batch_size // self.n_workers

    def check(self, arrays: Dataset | Mapping[str, NDArray[Any]]) -> None:
        """Check that the model can be trained on these arrays."""
        kinds = NUMBERS if self.model.n_classes is None else WHOLE
        check_arrays(arrays, features=(self.features, -2, NUMBERS), target=(self.target, 1, kinds))

    def samples(self, arrays: Mapping[str, NDArray[Any]], ids: NDArray[np.integer]) -> tuple[Rows, NDArray[Any]]:
        """Return rows and targets of samples, if the model can be trained on them."""
        rows, targets = check_batch(
            arrays, ids, features=self.features, target=self.target, n_classes=self.model.n_classes
        )
        return as_rows(rows), targets

    def n_updates(self, n_samples: int) -> int | None:
        """Return the number of updates of an epoch; None if it ends when all samples have been used."""
        return -(-n_samples // self.size) if self.pace == FREE else None

    def check_share(self, n_samples: int) -> None:
        """Check that mini-batches are not larger than a share."""
        if n_samples < self.size:
            raise InvalidParameter.of(
                "batch_size",
                self.batch_size,
                f"at most {n_samples * self.n_workers}",
                f"Each of {self.n_workers} workers takes {self.size} samples of it, but one worker has only "
                f"{n_samples}. Use a smaller batch or fewer workers.",
            )

    def batches(self, sample_ids: NDArray[np.integer], rank: int, epoch: int, done: int) -> Iterator[Samples]:
        """Yield the mini-batches of a worker that has trained on ``done`` before, as positions in ``sample_ids``.

        A pass visits all samples in an order that depends only on the seed, the rank and the pass. So the same
        partition gives the same mini-batches, whichever delivery brought it.
        """
        positions = np.argsort(sample_ids, kind="stable")
        per_pass = -(-len(positions) // self.size)
        first = epoch * per_pass if self.pace == ONCE else done
        order = positions[:0]
        for number in range(first, first + per_pass) if self.pace == ONCE else itertools.count(first):
            if number == first or number % per_pass == 0:
                order = positions[permutation(len(positions), "mini-batches", self.seed, rank, number // per_pass)]
            start = number % per_pass * self.size
            yield order[start : start + self.size]

    def pushes(self, batches: Iterator[Samples], read: Callable[[Samples], tuple[Rows, NDArray[Any]]]) -> Pushes:
        """Pull, then push the gradient of one mini-batch after the other, each at the parameters of the last reply."""
        gradient, following = None, next(batches)
        while True:
            parameters = yield gradient, len(following)
            batch, following = following, next(batches, following[:0])
            # Values that are not finite are detected at the end of the epoch.
            with np.errstate(over="ignore", invalid="ignore"):
                gradient, _ = self.model.gradient(parameters, *read(batch))


def as_rows(values: NDArray[Any]) -> Rows:
    """Return ``(n, ...)`` numbers as ``(n, m)`` floats. float32 is kept, all other dtypes become float64."""
    flat = values.reshape(len(values), math.prod(values.shape[1:]))
    return flat if flat.dtype in (np.float32, np.float64) else flat.astype(np.float64)


def _run(
    shuffler: Any,
    trainer: str,
    job: Job,
    first: Parameters,
    attempt: Callable[[Any, Parameters, float, list[int]], tuple[Results, Work]],
    loss: Callable[[Any, Parameters], float],
    epochs: int,
    watch: Watch,
) -> History[Parameters]:
    """Train by attempts at an epoch, which get parameters, the step and how often each worker has pushed before."""
    pushes: list[list[int]] = [[] for _ in range(job.n_workers)]

    def train(epoch: Any, number: int, parameters: Parameters, factor: float) -> Trained:
        step = job.step / job.n_workers * factor
        results, work = attempt(epoch, parameters, step, [len(own) for own in pushes])
        parameters = np.concatenate([part for part, _ in results])
        for rank, own in enumerate(pushes):
            own += np.max([staleness[rank] for _, staleness in results], axis=0).tolist()
        check_converging(f"step={job.step:g}", number, parameters)
        error = loss(epoch, parameters)
        check_converging(f"step={job.step:g}", number, error)
        return Trained(parameters, error, work if job.speeds is None else [(speed, 1.0) for speed in job.speeds])

    settings = {"batch_size": job.batch_size, "step": job.step}
    history = run_epochs(shuffler, trainer, first, train, epochs, watch, settings)
    most = max(itertools.chain.from_iterable(pushes), default=0)
    staleness = np.stack([np.bincount(np.array(own, np.int64), minlength=most + 1) for own in pushes])
    return dataclasses.replace(history, staleness=staleness, batch_size=job.size * job.n_workers)


def simulate_parameter_server(
    arrays: Mapping[str, NDArray[Any]],
    ranks: ArrayLike | Sharding,
    model: Model,
    *,
    epochs: int,
    batch_size: int,
    step: float,
    pace: str = ONCE,
    speeds: Sequence[float] | None = None,
    seed: int = 0,
    features: str = "x",
    target: str = "y",
    schedule: Schedule = CONSTANT,
    validate: Validate[Parameters] | None = None,
    early_stopping: EarlyStopping | None = None,
    on_epoch: OnEpoch | None = None,
) -> History[Parameters]:
    """Simulate :func:`fit_parameter_server` in one process, for workers of given speeds and fixed shares.

    Parameters
    ----------
    arrays
        Mapping from name to array, with all samples.
    ranks
        ``(q,)`` ranks that train on each sample, in all epochs (``assignment="local"``), or a sharding, which may have
        broadcast samples.
    model, epochs, batch_size, step, pace, seed, features, target, schedule, validate, early_stopping, on_epoch
        See :func:`fit_parameter_server`.
    speeds
        Relative speeds by rank. By default all workers are equally fast.

    Returns
    -------
    History
        Bit for bit the result of :func:`fit_parameter_server` with the same ``speeds`` (all 1 if none are given) and a
        shuffler with this sharding. Only the seconds differ, and the error: it is summed in another order, and counts
        broadcast samples once.

    Raises
    ------
    InvalidParameter
        See :func:`fit_parameter_server`; also if the arrays and ``ranks`` do not have the same number of samples.

    Examples
    --------
    >>> from dshuffle.training import LinearModel
    >>> x = np.random.default_rng(0).standard_normal((100, 2))
    >>> history = simulate_parameter_server(
    ...     {"x": x, "y": x @ [1, 2]}, np.arange(100) % 2, LinearModel(), epochs=20, batch_size=10, step=0.3
    ... )
    >>> history.model.round(2) + 0
    array([1., 2., 0.])
    """
    if not isinstance(ranks, Sharding):
        checked = as_ranks("ranks", ranks, 2**31)
        ranks = Sharding(checked, int(checked.max(initial=0)) + 1, np.arange(0))
    n, samples = ranks.n_workers, np.arange(len(ranks.ranks))
    emulated = (1.0,) * n if speeds is None else tuple(map(float, speeds))
    job = Job(model, features, target, n, batch_size, step, pace, emulated, seed)
    job.check(arrays)
    if lengths := {len(arrays[name]) for name in (features, target)} - {len(samples)}:
        raise InvalidParameter.of("len(ranks)", len(samples), f"{min(lengths)}, the number of samples")
    rows, targets = job.samples(arrays, samples)
    everywhere = np.isin(samples, ranks.broadcast)
    shards = [np.flatnonzero((ranks.ranks == rank) | everywhere) for rank in range(n)]
    job.check_share(min(map(len, shards)))

    def attempt(epoch: int, parameters: Parameters, step: float, done: list[int]) -> tuple[Results, Work]:
        server = ParameterServer(parameters, step, job.n_updates(len(rows)), emulated)
        workers = [
            job.pushes(
                job.batches(shard, rank, epoch, done[rank]),
                lambda batch, shard=shard: (rows[shard[batch]], targets[shard[batch]]),  # type: ignore[misc]
            )
            for rank, shard in enumerate(shards)
        ]
        replies = [reply for rank, worker in enumerate(workers) for reply in server.exchange(rank, *next(worker))]
        while replies:
            rank, (parameters, more) = replies.pop()
            if more:
                replies += server.exchange(rank, *workers[rank].send(parameters))
        return [server.result()], ()

    def loss(_: object, parameters: Parameters) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            return model.gradient(parameters, rows, targets)[1]

    first, watch = model.first(rows.shape[1], seed), Watch(schedule, validate, early_stopping, on_epoch)
    return _run(_Numbers, "simulate_parameter_server", job, first, attempt, loss, epochs, watch)


class _Numbers:
    """Epochs of a simulation, which needs nothing but their numbers."""

    epochs = range


def fit_parameter_server(
    shuffler: Shuffler,
    model: Model,
    *,
    epochs: int,
    batch_size: int,
    step: float,
    servers: int = 1,
    pace: str = ONCE,
    speeds: Sequence[float] | None = None,
    seed: int = 0,
    features: str = "x",
    target: str = "y",
    schedule: Schedule = CONSTANT,
    validate: Validate[Parameters] | None = None,
    early_stopping: EarlyStopping | None = None,
    on_epoch: OnEpoch | None = None,
) -> History[Parameters]:
    """Train a model by asynchronous SGD with parameter servers.

    Every worker computes the gradient of a mini-batch at its current parameters and pushes it to the servers. The
    servers apply it at once and return the new parameters. The worker goes on with them, without waiting for other
    workers.

    Parameters
    ----------
    shuffler
        Shuffler with any sharding, assignment and delivery. Provatas et al. (2021) keep the first assignment in all
        epochs: ``assignment="local"`` with ``sharding="random"``, ``"stratified:y"`` or a stored distribution-aware
        one.
    model
        Model such as :class:`~dshuffle.training.SoftmaxRegression`, or any object with the methods of
        :class:`~dshuffle.training.Model`.
    epochs
        Number of passes over all samples. With broadcast samples, an epoch of the pace ``"free"`` has as many updates
        as without them (Provatas et al., section IV-B), and one of ``"once"`` has more, because each worker uses its
        copies. In the error, broadcast samples count once for each worker.
    batch_size, step
        Batch size B and step alpha of a single worker. Each of n workers takes mini-batches of ``WB = B / n`` samples,
        rounded down, and steps of ``alpha / n``. (In the synchronous trainers ``batch_size`` is for one worker. Here it
        is for all workers together.)
    servers
        Number of Dask actors that share the parameters equally. They run on workers that do not train, if there are
        any, otherwise on the workers with the lowest ranks, beside training.
    pace
        ``"once"``: an epoch uses every sample once, so fast workers finish before the others. ``"free"``: an epoch has
        the same number of updates, but each is made by whichever worker is ready. Fast workers start their share again,
        and samples of slow workers are used less. Provatas et al. (2021) use this pace. At this pace, differences
        between shares do harm.
    speeds
        Relative speeds by rank, for experiments. The servers then apply gradients in the order in which workers of
        these speeds would push them. This makes the result reproducible, but fast workers have to wait. Gradients are
        then applied on the event loop of the server's worker, which does nothing else meanwhile. This suits models of
        up to some millions of parameters, whose updates take milliseconds. By default workers run at their real speed.
    seed
        Seed of the order of each worker's samples, and of the model's initial parameters.
    features, target
        Names of arrays in the dataset: ``(q, ...)`` numbers, flattened; ``(q,)`` labels if the model has classes,
        otherwise numbers.
    schedule
        Factor on the step by epoch.
    validate
        Function that is called with the parameters after every epoch. The metrics that it returns become the point's
        ``validation``.
    early_stopping
        Rule that ends the fit before ``epochs``.
    on_epoch
        Function that is called with the :class:`~dshuffle.report.TrainingPoint` of each epoch as soon as it is known.

    Returns
    -------
    History
        ``model`` is the vector of parameters. A point's ``error`` is the mean loss over the whole dataset, which the
        workers evaluate between epochs. ``staleness`` counts every push. With ``speeds``, ``worker_rates`` are samples
        per unit of virtual time.

    Raises
    ------
    InvalidParameter
        A parameter is out of range, the arrays do not suit the model, samples are not finite (the message names one), a
        mini-batch is larger than a share, or the parameters diverge.
    WorkerLost
        A worker or a server is lost, and the epoch could not be trained again.

    Notes
    -----
    An epoch starts when all workers have finished the previous one, because samples move only then. An epoch of
    ``"once"`` ends with updates from slow workers only; an epoch of ``"free"`` ends with one update from each worker.

    If a worker or a server is lost, the epoch starts again on all workers, with new servers and from the parameters at
    its beginning. So no gradient is applied twice.

    A push takes one message to each server and returns the parameters. With several servers, a worker may get one slice
    of the parameters from before another worker's update and another slice from after it, as with any split server.

    References
    ----------
    Provatas et al. (2021), sections II-B to II-D, equations 3 to 5; see docs/papers.md.
    """
    as_integer("servers", servers, 1)
    rates = None if speeds is None else tuple(map(float, speeds))
    check_fixed_workers(shuffler, "fit_parameter_server")
    dataset, n = shuffler.dataset, shuffler.n_workers
    job = Job(model, features, target, n, batch_size, step, pace, rates, seed)
    job.check(dataset)
    first = model.first(math.prod(dataset.arrays[features].shape), seed)
    if servers > len(first):
        raise InvalidParameter.of("servers", servers, f"at most {len(first)}, the number of parameters")
    ends = np.arange(servers + 1) * len(first) // servers
    bounds = [slice(int(begin), int(end)) for begin, end in itertools.pairwise(ends)]
    sharding = shuffler.choices.sharding
    copies = sharding.n_broadcast * (n - 1) if isinstance(sharding, GivenSharding) else 0

    def once(epoch: Epoch, parameters: Parameters, step: float, done: list[int]) -> tuple[Results, Work]:
        n_updates = None
        if pace == FREE:  # the first epoch of a resumed session has fewer samples; broadcast samples count once
            trained = sum(gathered(epoch.map(len))) * dataset.n_samples
            n_updates = job.n_updates(-(-trained // (dataset.n_samples + copies)))
        with serving(shuffler, [parameters[part] for part in bounds], step, n_updates, rates) as handles:
            futures = epoch.map(timed, work, handles, bounds, job, PerRank(done))
            with shuffler.client.as_current():
                for future in as_completed(futures, loop=shuffler.client.loop):
                    if future.status != "finished":
                        reached(future)
            worked = gathered(futures)
            epoch.forget(futures)  # if a worker is lost from here on, its part of the epoch is not trained again
            results = [reached(call) for call in [handle.result() for handle in handles]]
        return results, [(samples, seconds) for samples, _, seconds in worked]

    def attempt(*settings: Any) -> tuple[Results, Work]:
        for left in reversed(range(ATTEMPTS)):
            try:
                return once(*settings)
            except (WorkerLost, PeerFailed) as error:
                if not left:
                    raise
                logger.warning("dshuffle: the epoch starts again on all workers: %s", error)
                shuffler.accept()  # the tasks that failed are run again
        raise AssertionError

    def loss(epoch: Epoch, parameters: Parameters) -> float:
        wrong, count = measured(epoch, _loss, (model, parameters), features=features, target=target)
        return wrong / count

    watch = Watch(schedule, validate, early_stopping, on_epoch)
    return _run(shuffler, "fit_parameter_server", job, first, attempt, loss, epochs, watch)


def _loss(model: tuple[Model, Parameters], rows: Rows, targets: NDArray[Any]) -> tuple[float, int]:
    return model[0].gradient(model[1], as_rows(rows), targets)[1] * len(targets), len(targets)


def work(partition: Partition, servers: Sequence[Any], bounds: Sequence[slice], job: Job, done: int) -> int:
    """Train on a worker's mini-batches of an epoch, and return the number of their samples. Runs on each worker."""
    # A small share among unequal ones is a batch of its own.
    job.check_share(partition.shares[1 if partition.unequal else 0])
    samples, waiting, ids = 0, 0.0, partition.sample_ids

    def read(batch: Samples) -> tuple[Rows, NDArray[Any]]:
        return job.samples(partition.take(batch, (job.features, job.target)), ids[batch])

    pushes = job.pushes(job.batches(ids, partition.rank, partition.epoch, done), read)
    gradient, following = next(pushes)
    while True:
        calls = [
            server.exchange(partition.rank, None if gradient is None else gradient[part], following)
            for server, part in zip(servers, bounds, strict=True)
        ]
        began = time.perf_counter()
        replies = [_answer(server, call) for server, call in zip(servers, calls, strict=True)]
        waiting += time.perf_counter() - began
        if not replies[0][1]:
            partition.note_waiting(waiting)
            return samples
        samples += following
        gradient, following = pushes.send(np.concatenate([parameters for parameters, _ in replies]))


def _answer(server: Any, call: Any) -> Reply:
    # Dask never answers a call whose actor was lost during it, so the task has to check.
    while True:
        try:
            [(_, reply)] = call.result(timeout=PERIOD)
            return reply  # type: ignore[no-any-return]
        except TimeoutError as error:
            worker = get_worker()
            if not sync(worker.loop, worker.scheduler.who_has, keys=[server.key]).get(server.key):
                raise _lost(error) from error
        except OSError as error:
            raise _lost(error) from error


def reached(call: Any) -> Any:
    """Return the result of an actor call from the client, or of a task that depends on an actor."""
    try:
        return call.result(timeout=PATIENCE)
    except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
        if isinstance(error, ClusterError) or not (isinstance(error, OSError) or LOST in str(error)):
            raise
        raise _lost(error) from error


def _lost(error: Exception) -> WorkerLost:
    return WorkerLost(f"a parameter server is lost, with its slice of the parameters ({type(error).__name__}: {error})")


@contextlib.contextmanager
def serving(shuffler: Shuffler, slices: Sequence[Parameters], *settings: Any) -> Iterator[list[Any]]:
    """Make actors that hold the slices, on workers that do not train, if there are any; yield their handles.

    An error ends the training tasks, including those that wait for another worker's turn.
    """
    client, places = shuffler.client, _places(shuffler)
    kind = ParameterServer if settings[-1] is None else OrderedServer
    futures = [
        client.submit(kind, part, *settings, actor=True, workers=[place], allow_other_workers=False, pure=False)
        for part, place in zip(slices, itertools.cycle(places), strict=False)
    ]
    handles: list[Any] = []
    try:
        with client.as_current():  # a handle belongs to the client that is current when the handle is made
            handles += [reached(future) for future in futures]
        yield handles
    except BaseException:
        for handle in handles:
            with contextlib.suppress(Exception):
                handle.abort()
        raise
    finally:
        for future in futures:
            future.release()


def _places(shuffler: Shuffler) -> list[str]:
    """Workers that do not train, or those that do. Waits for one if all are lost and are being replaced."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        shuffler.look_up_members()
        training, workers = shuffler.addresses, cluster_info(shuffler.client)["workers"]
        connected = {worker.address for worker in WorkerFacts.of_all(workers) if shuffler._choice.allows(worker)}
        places = sorted(connected - set(training)) or [address for address in training if address in connected]
        if places:
            return places
        time.sleep(0.5)
    raise WorkerLost(f"no worker can serve the parameters after {PATIENCE:g} s: all have left")
