"""Asynchronous SGD with a parameter server: workers pull and push without waiting for each other.

:class:`ParameterServer` says what a pull or a push changes and which workers it answers. A Dask actor and a simulated
session both run it, and :meth:`Job.pushes` is what a worker does with the answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from distributed import get_worker
from distributed.utils import sync
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter, PeerFailed, WorkerLost
from dshuffle.planning.randomness import permutation
from dshuffle.planning.types import Samples
from dshuffle.runtime import Epoch, Partition, PerRank, Shuffler, gathered
from dshuffle.runtime.client.cluster_view import workers_of
from dshuffle.training.fit import (
    NUMBERS,
    WHOLE,
    FitOptions,
    History,
    Trained,
    check_array,
    check_batch,
    check_converging,
    check_fixed_workers,
    check_step,
    measured,
    run_epochs,
    timed,
    trainer,
)
from dshuffle.training.synchronous import Network, TrainedNetwork

logger = logging.getLogger(__name__)

Parameters = NDArray[Any]
Reply = tuple[Parameters, bool]
"""A copy of the parameters, and whether to compute another gradient in this epoch."""
Settings = tuple[Parameters, float, float]
"""What a :class:`ParameterServer` is made of."""
Result = tuple[Parameters, dict[int, list[int]]]
"""The parameters, and the staleness of the pushes of each rank."""

ONCE, FREE = "once", "free"

PATIENCE = 60.0
"""Seconds after which an actor that does not answer the client counts as lost."""
PERIOD = 2.0
"""Seconds after which a waiting task checks that its actor still exists."""
ATTEMPTS = 3
"""Attempts at an epoch in which workers are lost."""
LOST = "Worker holding Actor was lost"
"""Dask's error message for a lost actor."""


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

    def gradient(self, parameters: Parameters, rows: NDArray[Any], targets: NDArray[Any]) -> tuple[Parameters, float]:
        """Return the mean gradient of the loss over some samples, a new ``(p,)`` array, and the mean loss."""
        loss, gradient, _ = Network((rows.shape[1], self.n_classes)).gradient(parameters, rows, targets)
        return gradient, loss

    def predict(self, parameters: Parameters, rows: NDArray[Any]) -> NDArray[np.int64]:
        """Return the most likely class of each row, ``(n,)``."""
        return TrainedNetwork(Network((rows.shape[1], self.n_classes)), parameters, parameters[:0]).predict(rows)


class ParameterServer:
    """The parameters in an epoch. Dask calls the methods of an actor one after the other.

    Parameters
    ----------
    n_updates
        Number of updates of the epoch; infinite if it ends when all workers have used their samples.
    """

    def __init__(self, parameters: Parameters, step: float, n_updates: float) -> None:
        self._parameters, self._step, self._left = parameters.copy(), step, n_updates
        self._version = 0
        self._seen: dict[int, int] = {}  # the version of the last reply to each rank
        self._staleness: dict[int, list[int]] = defaultdict(list)

    def exchange(self, rank: int, gradient: Parameters | None, following: int) -> Reply:
        """Take a pull (without a gradient) or a push, and return the reply.

        The next gradient of the rank will use ``following`` samples.
        """
        if gradient is not None:
            # The trainer checks for values that are not finite.
            with np.errstate(over="ignore", invalid="ignore"):
                self._parameters -= self._step * gradient
            self._staleness[rank].append(self._version - self._seen[rank])
            self._version += 1
        elif rank in self._seen:
            raise PeerFailed(f"rank {rank} began the epoch again, because its worker was lost")
        more = following > 0 and self._left > 0
        self._left -= more
        self._seen[rank] = self._version
        return self._parameters.copy(), more

    def result(self) -> Result:
        """Return the parameters, and the staleness of the pushes of each rank."""
        return self._parameters, self._staleness


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained on what, and how n workers share it: by mini-batches of B / n samples.

    References
    ----------
    Provatas et al. (2021), equation 3; see docs/papers.md.
    """

    model: Any
    features: str
    target: str
    n_workers: int
    batch_size: int
    pace: str
    seed: int

    @property
    def size(self) -> int:
        """Samples of a mini-batch of one worker."""
        return self.batch_size // self.n_workers

    def batches(self, sample_ids: NDArray[np.integer], rank: int, epoch: int, done: int) -> Iterator[Samples]:
        """Yield the mini-batches of a worker that has trained on ``done`` before, as positions in ``sample_ids``.

        A pass visits all samples in an order that depends only on the seed, the rank and the pass. So the same
        partition gives the same mini-batches, whichever delivery brought it.
        """
        positions = np.argsort(sample_ids, kind="stable")
        per_pass = -(-len(positions) // self.size)
        first = epoch * per_pass if self.pace == ONCE else done
        for number in itertools.islice(itertools.count(first), per_pass if self.pace == ONCE else None):
            if number == first or number % per_pass == 0:
                order = positions[permutation(len(positions), "mini-batches", self.seed, rank, number // per_pass)]
            start = number % per_pass * self.size
            yield order[start : start + self.size]

    def pushes(self, partition: Partition, done: int) -> Generator[tuple[Parameters | None, int], Parameters, None]:
        """Pull, then push the gradient of one mini-batch after the other, each at the parameters of the last reply."""
        # A small share among unequal ones is a batch of its own.
        if (least := partition.shares[partition.unequal]) < self.size:
            hint = (
                f"Each of {self.n_workers} workers takes {self.size} samples of it, but one worker has only "
                f"{least}. Use a smaller batch or fewer workers."
            )
            raise InvalidParameter.of("batch_size", self.batch_size, f"at most {least * self.n_workers}", hint)
        ids, gradient = partition.sample_ids, None
        batches = self.batches(ids, partition.rank, partition.epoch, done)
        following = next(batches)
        while True:
            parameters = yield gradient, len(following)
            batch, following = following, next(batches, following[:0])
            arrays = partition.take(batch, (self.features, self.target))
            rows, targets = check_batch(arrays, ids[batch], self.features, self.target, self.model.n_classes)
            # Values that are not finite are detected at the end of the epoch.
            with np.errstate(over="ignore", invalid="ignore"):
                gradient, _ = self.model.gradient(parameters, as_rows(rows), targets)


def as_rows(values: NDArray[Any]) -> NDArray[Any]:
    """Return ``(n, ...)`` numbers as ``(n, m)`` floats. float32 is kept, all other dtypes become float64."""
    flat = values.reshape(len(values), math.prod(values.shape[1:]))
    return flat if flat.dtype in (np.float32, np.float64) else flat.astype(np.float64)


@trainer(None)
def fit_parameter_server(
    shuffler: Any,
    model: Any,
    *,
    epochs: int,
    batch_size: int,
    step: float,
    pace: str = ONCE,
    speeds: Sequence[float] | None = None,
    seed: int = 0,
    features: str = "x",
    target: str = "y",
    **options: Unpack[FitOptions],
) -> History[Parameters]:
    """Train a model by asynchronous SGD with a parameter server.

    Every worker computes the gradient of a mini-batch at its current parameters and pushes it to the server, a Dask
    actor. The server applies it at once and returns the new parameters. The worker goes on with them, without waiting
    for other workers.

    Parameters
    ----------
    shuffler
        Shuffler with any sharding, assignment and delivery. Provatas et al. (2021) keep the first assignment in all
        epochs: ``assignment="local"`` with ``sharding="random"``, ``"stratified:y"`` or a stored distribution-aware
        one. Or a session of a :class:`~dshuffle.compare.SimulatedCluster`.
    model
        Loss that is a mean over samples: a :class:`~dshuffle.training.SoftmaxRegression`, or an object with its
        attribute ``n_classes`` (None if targets are arbitrary numbers) and its methods ``first`` and ``gradient``.
    epochs
        Number of passes over all samples. With broadcast samples, an epoch of the pace ``"free"`` has as many updates
        as without them (Provatas et al., section IV-B), and one of ``"once"`` has more, because each worker uses its
        copies. In the error, broadcast samples count once for each worker.
    batch_size, step
        Batch size B and step alpha of a single worker. Each of n workers takes mini-batches of ``WB = B / n`` samples,
        rounded down, and steps of ``alpha / n``. (In the synchronous trainers ``batch_size`` is for one worker. Here it
        is for all workers together.)
    pace
        ``"once"``: an epoch uses every sample once, so fast workers finish before the others. ``"free"``: an epoch has
        the same number of updates, but each is made by whichever worker is ready. Fast workers start their share again,
        and samples of slow workers are used less. Provatas et al. (2021) use this pace. At this pace, differences
        between shares do harm.
    speeds
        Relative speeds by rank, in a simulated session, of which the result is reproducible: gradients are applied in
        the order in which workers of these speeds would push them. By default they are equally fast. Real workers run
        at their real speed.
    seed
        Seed of the order of each worker's samples, and of the model's initial parameters.
    features, target
        Names of arrays in the dataset: ``(q, ...)`` numbers, flattened; ``(q,)`` labels if the model has classes,
        otherwise numbers.
    **options
        Options of all trainers: see :class:`~dshuffle.training.FitOptions`.

    Returns
    -------
    History
        ``model`` is the vector of parameters. A point's ``error`` is the mean loss over the whole dataset, which the
        workers evaluate between epochs. ``staleness`` counts every push.

    Raises
    ------
    InvalidParameter
        A parameter is out of range, the arrays do not suit the model, samples are not finite (the message names one), a
        mini-batch is larger than a share, or the parameters diverge.
    WorkerLost
        A worker or the server is lost, and the epoch could not be trained again.

    Notes
    -----
    The server runs on a worker that does not train, if there is one, otherwise on that of rank 0, beside training. An
    epoch starts when all workers have finished the previous one, because samples move only then. An epoch of
    ``"once"`` ends with updates from slow workers only; an epoch of ``"free"`` ends with one update from each worker.

    If a worker or the server is lost, the epoch starts again on all workers, with a new server and from the parameters
    at its beginning. So no gradient is applied twice.

    References
    ----------
    Provatas et al. (2021), sections II-B to II-D, equations 3 to 5; see docs/papers.md.
    """
    check_fixed_workers(shuffler, "fit_parameter_server")
    n, simulated = shuffler.n_workers, not isinstance(shuffler, Shuffler)
    rates = (1.0,) * n if speeds is None else tuple(map(float, speeds))
    arrays = shuffler.dataset.arrays
    as_integer("seed", seed)
    if as_integer("batch_size", batch_size, 1) < n:
        raise InvalidParameter.of("batch_size", batch_size, f"at least the number of workers ({n})", "They share it.")
    check_step(step)
    if pace not in (ONCE, FREE):
        raise InvalidParameter.of("pace", pace, f"{ONCE} or {FREE}")
    if speeds is not None and not simulated:
        raise InvalidParameter.because("speeds", "workers run at their real speed", "Use a SimulatedCluster.")
    if len(rates) != n or not all(0 < rate < math.inf for rate in rates):
        raise InvalidParameter.of("speeds", rates, f"{n} finite numbers > 0, one per worker")
    check_array("features", features, arrays, -2, NUMBERS)
    check_array("target", target, arrays, 1, NUMBERS if model.n_classes is None else WHOLE)
    job = Job(model, features, target, n, batch_size, pace, seed)
    if rest := batch_size % n:
        text = "dshuffle: batch_size=%d on %d workers is rounded to %d: each takes %d samples"
        logger.warning(text, batch_size, n, batch_size - rest, job.size)
    pushes: list[list[int]] = [[] for _ in range(n)]  # the staleness of those of each worker

    def train(epoch: Any, number: int, parameters: Parameters, factor: float) -> Trained:
        n_updates = math.inf
        if pace == FREE:  # the first epoch of a resumed session has fewer samples
            n_updates = -(-max(1, sum(gathered(epoch.map(_n_counted)))) // job.size)
        settings, done = (parameters, step / n * factor, n_updates), [len(own) for own in pushes]
        if simulated:
            parameters, staleness = _simulated_epoch(job, epoch, settings, done, rates)
        else:
            parameters, staleness = _one_epoch(shuffler, job, epoch, settings, done)
        for rank, own in enumerate(pushes):
            own += staleness[rank]
        wrong, count = measured(epoch, _loss, (model, parameters), features, target)
        check_converging(f"step={step:g}", number, parameters, wrong)
        return Trained(parameters, wrong / count)

    first = model.first(math.prod(arrays[features].shape), seed)
    history = run_epochs(shuffler, "fit_parameter_server", first, train, epochs, **options)
    most = max(itertools.chain.from_iterable(pushes), default=0)
    staleness = np.stack([np.bincount(np.array(own, np.int64), minlength=most + 1) for own in pushes])
    return dataclasses.replace(history, staleness=staleness, batch_size=job.size * n)


def _n_counted(partition: Partition) -> int:
    """Number of samples of a worker, of which those of all workers count once."""
    return len(partition) - (partition.rank > 0) * len(partition.broadcast_ids)


def _loss(model: tuple[Any, Parameters], rows: NDArray[Any], targets: NDArray[Any]) -> tuple[float, int]:
    return model[0].gradient(model[1], as_rows(rows), targets)[1] * len(targets), len(targets)


def _one_epoch(
    shuffler: Shuffler, job: Job, epoch: Epoch, settings: Settings, done: list[int], left: int = ATTEMPTS
) -> Result:
    """Train for an epoch, in which each worker has pushed so often before."""
    try:
        with serving(shuffler, *settings) as server:
            futures = epoch.map(timed, work, server, job, PerRank(done))
            shuffler.client.gather(futures)  # raises at the first error
            epoch.forget(futures)  # if a worker is lost from here on, its part of the epoch is not trained again
            return server.result().result(timeout=PATIENCE)  # type: ignore[no-any-return]
    except (WorkerLost, PeerFailed) as error:
        if left == 1:
            raise
        logger.warning("dshuffle: the epoch starts again on all workers: %s", error)
        shuffler.accept()  # the tasks that failed are run again
        return _one_epoch(shuffler, job, epoch, settings, done, left - 1)


def _simulated_epoch(job: Job, epoch: Any, settings: Settings, done: list[int], speeds: Sequence[float]) -> Result:
    """The same in the order of virtual time: all workers pull at time 0, and a gradient takes samples / speed.

    Ties go to the lowest rank.
    """
    server = ParameterServer(*settings)
    ranks = [job.pushes(partition, own) for partition, own in zip(epoch.partitions(), done, strict=True)]
    following, turns = [next(pushes) for pushes in ranks], [(0.0, rank) for rank in range(len(ranks))]
    while turns:
        now, rank = heapq.heappop(turns)
        parameters, more = server.exchange(rank, *following[rank])
        if more:
            heapq.heappush(turns, (now + following[rank][1] / speeds[rank], rank))
            following[rank] = ranks[rank].send(parameters)
    return server.result()


def work(partition: Partition, server: Any, job: Job, done: int) -> None:
    """Train on a worker's mini-batches of an epoch."""
    more, pushes = True, job.pushes(partition, done)
    push = next(pushes)
    while more:
        began = time.perf_counter()
        parameters, more = _answer(server, server.exchange(partition.rank, *push))
        partition.note_waiting(time.perf_counter() - began)
        if more:
            push = pushes.send(parameters)


def _answer(server: Any, call: Any) -> Reply:
    # Dask never answers a call whose actor was lost during it, so the task has to check.
    while True:
        try:
            return call.result(timeout=PERIOD)  # type: ignore[no-any-return]
        except TimeoutError:
            worker = get_worker()
            if not sync(worker.loop, worker.scheduler.who_has, keys=[server.key]).get(server.key):
                raise


@contextlib.contextmanager
def serving(shuffler: Shuffler, *settings: Any) -> Iterator[Any]:
    """Make a server, on a worker that does not train, if there is one; yield its handle."""
    client, place = shuffler.client, _place(shuffler)
    future = client.submit(
        ParameterServer, *settings, actor=True, workers=[place], allow_other_workers=False, pure=False
    )
    try:
        with client.as_current():  # a handle belongs to the client that is current when the handle is made
            server = future.result(timeout=PATIENCE)
        yield server
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) or LOST in str(error):
            raise WorkerLost(f"the parameter server is lost ({type(error).__name__}: {error})") from error
        raise
    finally:
        future.release()


def _place(shuffler: Shuffler) -> str:
    """A worker that does not train, or one that does. Waits for one if all are lost and are being replaced."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        shuffler.look_up_members()
        training = shuffler.addresses
        connected = {worker.address for worker in workers_of(shuffler.client, shuffler._choice)}
        for place in (*sorted(connected - {*training}), *training):
            if place in connected:
                return place
        time.sleep(0.5)
    raise WorkerLost(f"no worker can serve the parameters after {PATIENCE:g} s: all have left")
