"""The parameter servers of a fit: Dask actors, where they are, and what becomes of them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from distributed import Future, as_completed

from dshuffle.errors import ClusterError
from dshuffle.runtime import Shuffler
from dshuffle.runtime.clients import cluster_info
from dshuffle.training.models import Parameters
from dshuffle.training.slices import OrderedSlice, ParameterSlice

PATIENCE = 60.0
"""Seconds after which an actor that gives no sign counts as lost."""


class Servers:
    """Actors that hold the parameters, each a slice of them.

    Parameters
    ----------
    shuffler
        Whose workers train. Servers are on other workers of the cluster, if there are any, in turn.
    parameters
        Where training starts.
    count
        Slices, at most as many as parameters.
    speeds
        Of emulated workers; None for real ones.

    Attributes
    ----------
    handles
        Of the actors, to be passed to tasks.
    bounds
        The parameters of each.

    Raises
    ------
    ClusterError
        On entering, or by any call: an actor cannot be made or reached.
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
        client = self._shuffler.client
        training = self._shuffler.addresses
        places = sorted(cluster_info(client)["workers"].keys() - set(training)) or list(training)
        for number, part in enumerate(self._slices):
            made = (ParameterSlice, part) if self._speeds is None else (OrderedSlice, part, self._speeds)
            place = [places[number % len(places)]]
            future = client.submit(*made, actor=True, workers=place, allow_other_workers=False, pure=False)
            self._futures.append(future)
        self.handles = [reached(future) for future in self._futures]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            # Tasks that train must end, also those that wait for another worker's turn.
            for handle in self.handles:
                with contextlib.suppress(Exception):
                    handle.abort()
        for future in self._futures:
            future.release()

    def begin(self, step: float, n_updates: int | None) -> None:
        """Start an epoch."""
        for call in [handle.begin(step, n_updates) for handle in self.handles]:
            reached(call)

    def parameters(self) -> Parameters:
        """All of them, as they are now."""
        return np.concatenate([reached(call) for call in [handle.parameters() for handle in self.handles]])

    def results(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """The results of tasks, or the first error as soon as there is one."""
        for future in as_completed(futures):
            if future.status != "finished":
                for handle in self.handles:
                    with contextlib.suppress(Exception):
                        handle.abort()
                future.result()
        return [future.result() for future in futures]


def reached(call: Any) -> Any:
    """The result of an actor's call, or of its making.

    Raises
    ------
    ClusterError
        The actor is lost.
    """
    try:
        return call.result(timeout=PATIENCE)
    except ClusterError:
        raise
    except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
        raise ClusterError(f"a parameter server is lost, with its part of the parameters: {error}") from error
