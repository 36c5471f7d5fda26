"""Train through the loss of clusters: open a session again, on whatever workers there are, and go on."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from distributed import Client, KilledWorker
from distributed.comm.core import CommClosedError

from dshuffle.checks import as_integer
from dshuffle.errors import CheckpointError, ClusterError, ExchangeError
from dshuffle.planning import Choices
from dshuffle.runtime.dataset_inputs import resolved
from dshuffle.runtime.session_state import CHOOSING, SessionState, find_checkpoint
from dshuffle.runtime.shuffler import Shuffler
from dshuffle.runtime.waiting import as_seconds, wait_for_workers
from dshuffle.store import Dataset, Place, as_dataset

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOSSES = (ClusterError, ExchangeError, CommClosedError, KilledWorker, CancelledError)
"""Errors of a cluster, after which another session may succeed. Errors of the user's own code are others."""


def retrying(
    train: Callable[[Shuffler], T],
    make_client: Callable[[], Client | AbstractContextManager[Client]],
    dataset: Dataset | Place,
    *,
    checkpoint: str | os.PathLike[str],
    attempts: int = 3,
    min_workers: int = 1,
    patience: str | float = "5m",
    **options: Any,
) -> T:
    """Train with a :class:`Shuffler`, and again from its checkpoint if the session or the cluster is lost.

    If there is a checkpoint from the beginning, training goes on from it. So a job script that a queue starts again
    needs nothing but this call.

    Parameters
    ----------
    train
        Function that trains, and returns when training is done. It is called with a new shuffler in every attempt.
    make_client
        Function that returns a Dask client, or a context manager that yields one; called before every attempt. A client
        stays open, and may be the same every time. A context manager is left after the attempt, so that a cluster that
        it has started is closed before another one is started.
    dataset
        A dataset, or the URL of one.
    checkpoint
        File or object of the state, as for :class:`Shuffler`.
    attempts
        Attempts in a row that may fail without reaching another epoch or saving a checkpoint.
    min_workers
        Number of workers to wait for before an attempt. A session has as many workers as there are when it opens. With
        the option ``elastic``, their number may change later.
    patience
        Time to wait for them: seconds, or text such as ``"5m"``.
    **options
        Other parameters of :class:`Shuffler`.

    Returns
    -------
    object
        What ``train`` returned.

    Raises
    ------
    CheckpointError
        If the checkpoint is damaged, or one of another dataset or way of shuffling.
    ClusterError, ExchangeError
        If the last attempt failed as well, or there were not enough workers in time.

    Examples
    --------
    >>> import numpy as np, dshuffle, tempfile
    >>> from distributed import Client
    >>> dataset = dshuffle.create_dataset("memory://doc-retrying", {"x": np.arange(10.0)}, overwrite=True)
    >>> tries = iter([True, False])
    >>> def train(shuffler):
    ...     for epoch in shuffler.epochs(3 - shuffler.next_epoch):
    ...         if epoch.number == 1 and next(tries):
    ...             raise dshuffle.ClusterError("the cluster is gone")
    ...     return epoch.number
    >>> with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
    ...     dshuffle.retrying(train, lambda: client, dataset, checkpoint="memory://doc-retrying-state/run.json")
    2
    """
    as_integer("attempts", attempts, 1)
    as_integer("min_workers", min_workers, 1)
    as_seconds("patience", patience)
    opened = as_dataset(dataset)
    failed, before = 0, find_checkpoint(checkpoint, opened)
    while True:
        try:
            with (
                _client(make_client()) as client,
                _shuffler(client, opened, checkpoint, options, min_workers, patience) as shuffler,
            ):
                return train(shuffler)
        except LOSSES as error:
            now = find_checkpoint(checkpoint, opened)
            failed = 1 if now != before else failed + 1
            before = now
            if failed >= attempts:
                raise
            reason = str(error).partition(". ")[0]  # what to do about it comes after this
            what = "begins again" if now is None else "continues from the checkpoint"
            logger.warning("dshuffle: training %s (%s: %s)", what, type(error).__name__, reason)


def _client(made: Client | AbstractContextManager[Client]) -> AbstractContextManager[Client]:
    """A context manager that leaves a client open, and closes anything else."""
    return contextlib.nullcontext(made) if isinstance(made, Client) else made


def _shuffler(
    client: Client,
    dataset: Dataset,
    checkpoint: str | os.PathLike[str],
    options: Mapping[str, Any],
    min_workers: int,
    patience: str | float,
) -> Shuffler:
    """A new session, or one that goes on from the checkpoint."""
    wait_for_workers(client, min_workers, patience)
    state = find_checkpoint(checkpoint, dataset)
    if state is None:
        return Shuffler(client, dataset, checkpoint=checkpoint, min_workers=min_workers, **options)
    _check_alike(SessionState.from_dict(state, dataset).choices, dataset, options, checkpoint)
    others = {name: value for name, value in options.items() if name not in CHOOSING}
    return Shuffler.resume(client, dataset, checkpoint, min_workers=min_workers, **others)


def _check_alike(
    choices: Choices, dataset: Dataset, options: Mapping[str, Any], checkpoint: str | os.PathLike[str]
) -> None:
    """Refuse to go on with another way of shuffling than the one that is asked for."""
    names = {field.name for field in dataclasses.fields(Choices)} & CHOOSING & options.keys()
    asked = resolved(dataset, Choices(**{name: options[name] for name in names})).to_dict()
    found = choices.to_dict()
    for name in sorted(names):
        if asked[name] != found[name]:
            raise CheckpointError(
                f"the checkpoint {checkpoint} has {name}={found[name]!r}, and {name}={asked[name]!r} is asked for. Ask "
                "for the same, or remove the checkpoint to begin again"
            )
