"""Asynchronous parameter server on Dask actors: workers pull and push without waiting for each other."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from distributed import Future, as_completed, get_worker
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
from dshuffle.training.fit import (
    CONSTANT,
    EarlyStopping,
    History,
    OnEpoch,
    Recorder,
    Schedule,
    Validate,
    WorkerSpeeds,
    raises_once,
)
from dshuffle.training.inputs import (
    EVALUATION_ROWS,
    check_finite,
    check_fixed_workers,
    check_step,
    checked_width,
    diverged,
)
from dshuffle.training.parameter_server.slices import (
    Model,
    OrderedSlice,
    Parameters,
    ParameterSlice,
    Reply,
    Staleness,
    Turns,
    as_rows,
    check_labels,
)

logger = logging.getLogger(__name__)


ONCE, FREE = "once", "free"
PACES = (ONCE, FREE)


@dataclass(frozen=True, slots=True)
class Asynchrony:
    """Checked parameters of :func:`fit_parameter_server` that say how workers divide the work.

    Parameters
    ----------
    batch_size, step
        Batch size B and step alpha of a single worker.

    References
    ----------
    Provatas et al. (2021), equations 3 and 4; see docs/papers.md.
    """

    n_workers: int
    batch_size: int
    step: float
    pace: str = ONCE
    speeds: tuple[float, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        as_integer("n_workers", self.n_workers, 1)
        as_integer("batch_size", self.batch_size, 1)
        as_integer("seed", self.seed)
        if self.batch_size < self.n_workers:
            raise InvalidParameter.of(
                "batch_size", self.batch_size, f"at least the number of workers ({self.n_workers})", "They share it."
            )
        check_step(self.step)
        if self.pace not in PACES:
            raise InvalidParameter.of("pace", self.pace, f"one of {', '.join(PACES)}")
        if self.speeds is not None:
            if len(self.speeds) != self.n_workers:
                raise InvalidParameter.of("len(speeds)", len(self.speeds), f"{self.n_workers}, one per worker")
            for rank, speed in enumerate(self.speeds):
                if not (math.isfinite(speed) and speed > 0):
                    raise InvalidParameter.of(f"speeds[{rank}]", speed, "a finite number > 0")

    @property
    def worker_batch(self) -> int:
        """Batch size of a worker, WB = B / n (equation 3), rounded down."""
        return self.batch_size // self.n_workers

    @property
    def rounded_batch(self) -> int:
        """Batch size of all workers together."""
        return self.worker_batch * self.n_workers

    def warn_of_rounding(self) -> None:
        """Log a warning if the workers together take smaller batches than asked for."""
        if self.rounded_batch < self.batch_size:
            logger.warning(
                "dshuffle: batch_size=%d on %d workers is rounded to %d: each takes %d samples",
                *(self.batch_size, self.n_workers, self.rounded_batch, self.worker_batch),
            )

    @property
    def worker_step(self) -> float:
        """Step of a worker, alpha_w = alpha / n (equation 4)."""
        return self.step / self.n_workers

    def n_updates(self, n_samples: int) -> int | None:
        """Return the number of updates of an epoch; None if it ends when all samples have been used."""
        return -(-n_samples // self.worker_batch) if self.pace == FREE else None

    def check_partition(self, n_samples: int) -> None:
        """Check that mini-batches are not larger than a share."""
        if n_samples < self.worker_batch:
            raise InvalidParameter.of(
                "batch_size",
                self.batch_size,
                f"at most {n_samples * self.n_workers}",
                f"Each of {self.n_workers} workers takes {self.worker_batch} samples of it, but one worker has only "
                f"{n_samples}. Use a smaller batch or fewer workers.",
            )


class MiniBatches:
    """Mini-batches of a worker's samples, in the order in which it takes them.

    A pass visits all samples in an order that depends only on the seed, the rank and the pass. The same partition
    therefore gives the same batches, whichever delivery brought it.

    Parameters
    ----------
    sample_ids
        ``(n,)``, in any order.
    sharing
        Batch size, pace and seed.
    done
        Number of mini-batches that the worker has trained on before. It is ignored at the pace ``"once"``.
    """

    def __init__(
        self, sample_ids: NDArray[np.integer], sharing: Asynchrony, *, rank: int, epoch: int, done: int = 0
    ) -> None:
        self._positions = np.argsort(sample_ids, kind="stable")
        self._size = sharing.worker_batch
        self._path: tuple[int | str, ...] = ("mini-batches", sharing.seed, rank)
        self._per_pass = -(-len(sample_ids) // self._size)
        self._done = epoch * self._per_pass if sharing.pace == ONCE else done
        self._end = self._done + self._per_pass if sharing.pace == ONCE else None
        self._begin_pass()

    @property
    def following(self) -> int:
        """Number of samples in the next mini-batch; 0 if there is none left in this epoch."""
        if self._done == self._end:
            return 0
        return min(self._size, len(self._positions) - self._done % self._per_pass * self._size)

    def take(self) -> Samples:
        """Return the next mini-batch, as positions in ``sample_ids``."""
        first = self._done % self._per_pass * self._size
        batch = self._order[first : first + self._size]
        self._done += 1
        if self._done % self._per_pass == 0 and self._done != self._end:
            self._begin_pass()
        return batch

    def _begin_pass(self) -> None:
        order = permutation(len(self._positions), *self._path, self._done // self._per_pass)
        self._order: Samples = self._positions[order]


def geometric_speeds(n_workers: int, ratio: float) -> tuple[float, ...]:
    """Return speeds that fall by a constant factor from 1 to ``1 / ratio``.

    Raises
    ------
    InvalidParameter
        The ratio is less than 1.

    Examples
    --------
    >>> geometric_speeds(3, 4)
    (1.0, 0.5, 0.25)
    """
    if not 1 <= ratio < math.inf:
        raise InvalidParameter.of("ratio", ratio, "a finite number >= 1")
    speeds: Sequence[float] = np.geomspace(1, 1 / ratio, n_workers).tolist()
    return tuple(speeds)


PATIENCE = 60.0
"""Seconds after which an actor that does not answer the client counts as lost."""
PERIOD = 2.0
"""Seconds after which a waiting task checks that its actor still exists."""
ATTEMPTS = 3
"""Attempts at an epoch in which workers are lost."""
LOST = "Worker holding Actor was lost"
"""Dask's error message for a lost actor."""


T = TypeVar("T")


class Servers:
    """Actors that hold the parameters, one slice each.

    Parameters
    ----------
    shuffler
        Shuffler whose workers train. Servers are placed in turn on other workers of the cluster, if there are any.
    count
        Number of slices, at most the number of parameters.
    speeds
        Speeds of emulated workers; None for real ones.

    Attributes
    ----------
    handles
        Handles of the actors, to pass to tasks.
    bounds
        Slice of the parameters that each actor holds.
    """

    def __init__(self, shuffler: Shuffler, parameters: Parameters, count: int, speeds: Sequence[float] | None) -> None:
        ends = np.arange(count + 1) * len(parameters) // count
        self.bounds = [slice(int(first), int(last)) for first, last in itertools.pairwise(ends)]
        self.handles: list[Any] = []
        self._shuffler = shuffler
        self._slices = [parameters[part] for part in self.bounds]
        self._speeds = speeds
        self._futures: list[Future[Any]] = []

    def __enter__(self) -> Self:
        self._make()
        return self

    def _make(self) -> None:
        client, places = self._shuffler.client, self._places()
        for number, part in enumerate(self._slices):
            made = (ParameterSlice, part) if self._speeds is None else (OrderedSlice, part, self._speeds)
            place = [places[number % len(places)]]
            future = client.submit(*made, actor=True, workers=place, allow_other_workers=False, pure=False)
            self._futures.append(future)
        # A handle belongs to the client that is current when the handle is made.
        with client.as_current():
            self.handles = [reached(future) for future in self._futures]

    def _places(self) -> list[str]:
        """Workers that do not train, or those that do. Waits for one if all are lost and are being replaced."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self._shuffler.look_up_members()
            training, workers = self._shuffler.addresses, cluster_info(self._shuffler.client)["workers"]
            allowed = filter(self._shuffler._choice.allows, WorkerFacts.of_all(workers))
            connected = {worker.address for worker in allowed}
            places = sorted(connected - set(training)) or [address for address in training if address in connected]
            if places:
                return places
            if time.monotonic() > deadline:
                raise WorkerLost(f"no worker can serve the parameters after {PATIENCE:g} s: all have left")
            time.sleep(0.5)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._abort()
        self._release()

    def _release(self) -> None:
        for future in self._futures:
            future.release()
        self._futures = []

    def attempt(self, parameters: Parameters, train: Callable[[], T]) -> T:
        """Train an epoch; again, with new servers and from the same parameters, if a worker is lost meanwhile."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                if attempt > 1:
                    self._shuffler.accept()  # the tasks that failed are run again
                    self._abort()
                    self._release()
                    self._slices = [parameters[part] for part in self.bounds]
                    self._make()
                return train()
            except (WorkerLost, PeerFailed) as error:
                if attempt == ATTEMPTS:
                    raise
                logger.warning("dshuffle: the epoch starts again on all workers: %s", error)
        raise AssertionError

    def begin(self, step: float, n_updates: int | None) -> None:
        """Start an epoch."""
        for call in [handle.begin(step, n_updates) for handle in self.handles]:
            reached(call)

    def parameters(self) -> Parameters:
        """Return all parameters as they are now."""
        return np.concatenate([reached(call) for call in [handle.parameters() for handle in self.handles]])

    def results(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """Return the results of tasks, or raise the first error as soon as it occurs."""
        client = self._shuffler.client
        with client.as_current():
            for future in as_completed(futures, loop=client.loop):
                if future.status != "finished":
                    self._abort()
                    reached(future)
        return gathered(futures)

    def _abort(self) -> None:
        """End the training tasks, including those that wait for another worker's turn."""
        for handle in self.handles:
            with contextlib.suppress(Exception):
                handle.abort()


def reached(call: Any) -> Any:
    """Return the result of an actor call from the client, or of a task that depends on an actor."""
    try:
        return call.result(timeout=PATIENCE)
    except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
        if isinstance(error, ClusterError) or not (isinstance(error, OSError) or LOST in str(error)):
            raise
        raise _lost(error) from error


def answers(servers: Sequence[Any], calls: Iterable[Any]) -> list[Any]:
    """Return the results of concurrent actor calls from a task, one call per server."""
    return [_answer(server, call) for server, call in zip(servers, list(calls), strict=True)]


def _answer(server: Any, call: Any) -> Any:
    # Dask never answers a call whose actor was lost during it, so the task has to check.
    while True:
        try:
            return call.result(timeout=PERIOD)
        except TimeoutError as error:
            worker = get_worker()
            if not sync(worker.loop, worker.scheduler.who_has, keys=[server.key]).get(server.key):
                raise _lost(error) from error
        except OSError as error:
            raise _lost(error) from error


def _lost(error: Exception) -> WorkerLost:
    return WorkerLost(f"a parameter server is lost, with its slice of the parameters ({type(error).__name__}: {error})")


REMEDY = "take a smaller step, fewer workers, or scale the features"


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
    given_ranks, broadcast = (ranks.ranks, ranks.broadcast) if isinstance(ranks, Sharding) else (ranks, ())
    checked = as_ranks("ranks", given_ranks, 2**31)
    n_workers = ranks.n_workers if isinstance(ranks, Sharding) else int(checked.max(initial=0)) + 1
    as_integer("epochs", epochs, 1)
    emulated = (1.0,) * n_workers if speeds is None else tuple(map(float, speeds))
    sharing = Asynchrony(n_workers, batch_size, step, pace, emulated, seed)
    sharing.warn_of_rounding()
    described = {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}
    checked_width(described, model.n_classes, features=features, target=target)
    for parameter, name in (("features", features), ("target", target)):
        if (shape := arrays[name].shape)[:1] != checked.shape:
            allowed = f"an array of {len(checked)} samples, the length of ranks (its shape is {shape})"
            raise InvalidParameter.of(parameter, name, allowed)
        check_finite(parameter, name, arrays[name], np.arange(len(checked)))
    rows, targets = as_rows(arrays[features]), arrays[target]
    if model.n_classes is not None:
        check_labels(target, np.unique(targets), len(targets), model.n_classes)
    everywhere = np.zeros(len(checked), np.bool_)
    everywhere[np.asarray(broadcast, np.int64)] = True
    shards = [np.flatnonzero((checked == rank) | everywhere) for rank in range(n_workers)]
    sharing.check_partition(min(map(len, shards)))
    server = ParameterSlice(model.first(rows.shape[1], seed))
    pushes: list[list[int]] = [[] for _ in shards]
    recorder = Recorder(validate, early_stopping, on_epoch, speeds=WorkerSpeeds(emulated=True))
    for epoch in range(epochs):
        server.begin(sharing.worker_step * schedule(epoch), sharing.n_updates(len(rows)))
        batches = [
            MiniBatches(shard, sharing, rank=rank, epoch=epoch, done=len(pushes[rank]))
            for rank, shard in enumerate(shards)
        ]
        recorder.speeds.add(emulated, seconds=0.0)
        turns = Turns(emulated)
        replies = []
        for rank, own in enumerate(batches):
            replies.append(server.pull(rank, own.following))
            turns.begin(rank, own.following)
        while (ready := turns.next()) is not None:
            turns.finish()
            batch = shards[ready][batches[ready].take()]
            # Values that are not finite are detected at the end of the epoch.
            with np.errstate(over="ignore", invalid="ignore"):
                gradient, _ = model.gradient(replies[ready].parameters, rows[batch], targets[batch])
            following = batches[ready].following
            replies[ready] = server.push(ready, replies[ready].version, gradient, following)
            pushes[ready].append(replies[ready].staleness)
            if replies[ready].more:
                turns.begin(ready, following)
        parameters = server.parameters()
        with np.errstate(over="ignore", invalid="ignore"):
            loss = model.loss(parameters, rows, targets)
        if not (np.isfinite(loss) and np.isfinite(parameters).all()):
            raise diverged(step, epoch, remedy=REMEDY)
        if recorder.add(parameters, loss):
            break
    return recorder.history(server.parameters(), staleness=Staleness.of(pushes), batch_size=sharing.rounded_batch)


@raises_once
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
    as_integer("epochs", epochs, 1)
    as_integer("servers", servers, 1)
    rates = None if speeds is None else tuple(map(float, speeds))
    check_fixed_workers(shuffler, "fit_parameter_server")
    sharing = Asynchrony(shuffler.n_workers, batch_size, step, pace, rates, seed)
    sharing.warn_of_rounding()
    arrays = {"features": features, "target": target}
    described = {name: (array.dtype, tuple(array.shape)) for name, array in shuffler.dataset.arrays.items()}
    first = model.first(checked_width(described, model.n_classes, **arrays), seed)
    if servers > len(first):
        raise InvalidParameter.of("servers", servers, f"at most {len(first)}, the number of parameters")
    recorder = Recorder(validate, early_stopping, on_epoch, speeds=WorkerSpeeds(emulated=rates is not None))
    pushes: list[list[int]] = [[] for _ in range(shuffler.n_workers)]
    parameters = recorder.begin(shuffler, "fit_parameter_server", first, batch_size=batch_size, step=step)
    n_samples = 0
    with Servers(shuffler, parameters, servers, rates) as actors:
        for number, epoch in recorder.epochs(shuffler, epochs):
            if not n_samples:
                surveys = actors.results(epoch.map(survey, model.n_classes, **arrays))
                n_samples = without_copies(shuffler, sum(count for _, count in surveys))
                if model.n_classes is not None:
                    labels = np.unique(np.concatenate([values for values, _ in surveys]))
                    check_labels(target, labels, shuffler.dataset.n_samples, model.n_classes)
            done = PerRank([len(own) for own in pushes])
            train = functools.partial(_train, actors, epoch, model, sharing, schedule(number), n_samples, done, arrays)
            worked, parameters = actors.attempt(parameters, train)
            n_samples = shuffler.dataset.n_samples  # the first epoch of a resumed session has fewer
            for own, result in zip(pushes, worked, strict=True):
                own += result.staleness
            recorder.speeds.add(
                [result.rate for result in worked] if rates is None else rates,
                seconds=max(result.seconds for result in worked),
            )
            if not np.isfinite(parameters).all():
                raise diverged(step, number, remedy=REMEDY)
            loss, count = np.sum(actors.results(epoch.map(total_loss, model, parameters, **arrays)), axis=0)
            if not np.isfinite(loss):
                raise diverged(step, number, remedy=REMEDY)
            if recorder.add(parameters, float(loss / count)):
                break
    return recorder.history(parameters, staleness=Staleness.of(pushes), batch_size=sharing.rounded_batch)


def _train(
    actors: Servers,
    epoch: Epoch,
    model: Model,
    sharing: Asynchrony,
    factor: float,
    n_samples: int,
    done: PerRank,
    arrays: Mapping[str, str],
) -> tuple[list[Work], Parameters]:
    """Train one epoch, and return what each worker has done and the new parameters."""
    actors.begin(sharing.worker_step * factor, sharing.n_updates(n_samples))
    futures = epoch.map(work, actors.handles, actors.bounds, model, sharing, done, **arrays)
    worked = actors.results(futures)
    epoch.forget(futures)  # if a worker is lost from here on, its part of the epoch is not trained again
    return worked, actors.parameters()


def without_copies(shuffler: Shuffler, trained: int) -> int:
    """Number of samples among those that workers train on, without the copies of samples that all of them have."""
    sharding, q = shuffler.choices.sharding, shuffler.dataset.n_samples
    broadcast = sharding.n_broadcast if isinstance(sharding, GivenSharding) else 0
    return -(-trained * q // (q + (shuffler.n_workers - 1) * broadcast))


class Work(NamedTuple):
    """Work of a worker in an epoch: the staleness of each push, samples per second, and seconds."""

    staleness: list[int]
    rate: float
    seconds: float


def work(
    partition: Partition,
    servers: Sequence[Any],
    bounds: Sequence[slice],
    model: Model,
    sharing: Asynchrony,
    done: int,
    *,
    features: str,
    target: str,
) -> Work:
    """Train on a worker's mini-batches of an epoch. Runs as a task on each worker."""
    partition.mark_trained(0)
    # A small share among unequal ones is a batch of its own.
    sharing.check_partition(partition.shares[1 if partition.unequal else 0])
    batches = MiniBatches(partition.sample_ids, sharing, rank=partition.rank, epoch=partition.epoch, done=done)
    following = batches.following
    replies: list[Reply] = answers(servers, [server.pull(partition.rank, following) for server in servers])
    staleness: list[int] = []
    samples, waiting, started = 0, 0.0, time.perf_counter()
    while replies[0].more:
        parameters = np.concatenate([reply.parameters for reply in replies]) if len(servers) > 1 else replies[0][0]
        batch = partition.take(batches.take(), (features, target))
        # The client detects values that are not finite at the end of the epoch.
        with np.errstate(over="ignore", invalid="ignore"):
            gradient, _ = model.gradient(parameters, as_rows(batch[features]), batch[target])
        samples, following = samples + following, batches.following
        pushed = [
            server.push(partition.rank, reply.version, gradient[part], following)
            for server, reply, part in zip(servers, replies, bounds, strict=True)
        ]
        pushing_ended = time.perf_counter()
        replies = answers(servers, pushed)
        waiting += time.perf_counter() - pushing_ended
        staleness.append(max(reply.staleness for reply in replies))
    partition.mark_trained()
    partition.note_waiting(waiting)
    seconds = max(time.perf_counter() - started, 1e-9)
    return Work(staleness, samples / seconds, seconds)


def survey(partition: Partition, n_classes: int | None, *, features: str, target: str) -> tuple[NDArray[Any], int]:
    """Return a partition's distinct labels (none if the model has no classes) and its number of samples.

    Runs as a task on each worker.
    """
    labels, first = [], 0
    for batch in partition.batches(EVALUATION_ROWS):
        for parameter, name in (("features", features), ("target", target)):
            check_finite(parameter, name, batch[name], partition.sample_ids[first:])
        labels.append(np.unique(batch[target][: 0 if n_classes is None else None]))
        first += len(batch[target])
    return np.unique(np.concatenate(labels)) if labels else np.empty(0), len(partition)


def total_loss(
    partition: Partition, model: Model, parameters: Parameters, *, features: str, target: str
) -> tuple[float, int]:
    """Return the sum of the losses of a partition's samples, and their number. Runs as a task on each worker."""
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for batch in partition.batches(EVALUATION_ROWS):
            total += model.loss(parameters, as_rows(batch[features]), batch[target]) * len(batch[target])
    return total, len(partition)
