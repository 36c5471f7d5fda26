"""The Dask actors that are the parameter servers of a fit."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from distributed import Future, as_completed, get_worker
from distributed.utils import sync

from dshuffle.errors import ClusterError, PeerFailed, WorkerLost
from dshuffle.runtime import Shuffler, gathered
from dshuffle.runtime.client.cluster_view import cluster_info
from dshuffle.runtime.session_spec import WorkerFacts
from dshuffle.training.parameter_server.models import Parameters
from dshuffle.training.parameter_server.slices import OrderedSlice, ParameterSlice

PATIENCE = 60.0
"""Seconds after which an actor that does not answer the client counts as lost."""
PERIOD = 2.0
"""Seconds after which a waiting task checks that its actor still exists."""
ATTEMPTS = 3
"""Attempts at an epoch in which workers are lost."""
LOST = "Worker holding Actor was lost"
"""Dask's error message for a lost actor."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Servers:
    """Actors that hold the parameters, one slice each.

    Parameters
    ----------
    shuffler
        Shuffler whose workers train. Servers are placed in turn on other workers of the cluster, if there are any.
    parameters
        Initial parameters.
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

    Raises
    ------
    ClusterError
        An actor cannot be made or reached, on entering or in any call.
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
        """Train an epoch; again, with new servers and from the same parameters, if a worker is lost meanwhile.

        Raises
        ------
        WorkerLost, PeerFailed
            A worker was lost in every attempt, or the session has ended.
        """
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
    """Return the result of an actor call from the client, or of a task that depends on an actor.

    Raises
    ------
    WorkerLost
        The actor is lost.
    """
    try:
        return call.result(timeout=PATIENCE)
    except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
        if isinstance(error, ClusterError) or not (isinstance(error, OSError) or LOST in str(error)):
            raise
        raise _lost(error) from error


def answers(servers: Sequence[Any], calls: Iterable[Any]) -> list[Any]:
    """Return the results of concurrent actor calls from a task, one call per server.

    Parameters
    ----------
    servers
        Actors.
    calls
        Calls of the actors' methods, in the same order.

    Raises
    ------
    WorkerLost
        An actor is lost.
    """
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
