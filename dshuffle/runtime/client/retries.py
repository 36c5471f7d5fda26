"""Train through the loss of clusters: open a session again, on whatever workers there are, and go on."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from distributed import Client, KilledWorker
from distributed.comm.core import CommClosedError

from dshuffle.checks import as_integer
from dshuffle.errors import DShuffleError, what_happened
from dshuffle.runtime.client.checkpoints import Checkpoint, SessionState
from dshuffle.runtime.client.cluster_view import wait_for_workers
from dshuffle.runtime.client.shuffler import Shuffler
from dshuffle.runtime.session_spec import OPTION_NAMES, SessionOptions
from dshuffle.runtime.settings import as_seconds
from dshuffle.store import Dataset, Place, as_dataset

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOSSES = (CommClosedError, KilledWorker, CancelledError)
"""Dask's errors after which another session may succeed. Those of dshuffle say it themselves."""


def run_with_retries(
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
        Attempts in a row that may fail without progress of training. There is progress if the checkpoint says that an
        epoch has ended, or that more of its samples were trained on (:meth:`Shuffler.save`). An error that another
        attempt cannot help (:attr:`DShuffleError.transient`) is raised at once.
    min_workers
        Number of workers to wait for before an attempt. A session has as many workers as there are when it opens. With
        the option ``elastic``, their number may change later.
    patience
        Time to wait for them, and for a checkpoint that cannot be read for the moment: seconds, or text such as
        ``"5m"``.
    **options
        Other parameters of :class:`Shuffler`.

    Returns
    -------
    object
        What ``train`` returned.

    Raises
    ------
    CheckpointError
        If the checkpoint is damaged, one of another dataset, or cannot be read or written in time.
    InvalidParameter
        If an option contradicts the checkpoint.
    ClusterError, ExchangeError
        If the last attempt failed as well, or there were not enough workers in time.
    DShuffleError
        If another attempt cannot help.

    Examples
    --------
    >>> import numpy as np, dshuffle, tempfile
    >>> from distributed import Client
    >>> dataset = dshuffle.create_dataset("memory://doc-retries", {"x": np.arange(10.0)}, overwrite=True)
    >>> tries = iter([True, False])
    >>> def train(shuffler):
    ...     for epoch in shuffler.epochs(3 - shuffler.next_epoch):
    ...         if epoch.number == 1 and next(tries):
    ...             raise dshuffle.ClusterError("the cluster is gone")
    ...     return epoch.number
    >>> with Client(n_workers=2, processes=False, dashboard_address=":0") as client:
    ...     dshuffle.run_with_retries(train, lambda: client, dataset, checkpoint="memory://doc-retries-state/run.json")
    2
    """
    as_integer("attempts", attempts, 1)
    options["min_workers"] = as_integer("min_workers", min_workers, 1)
    chosen = SessionOptions(**{name: options[name] for name in OPTION_NAMES & options.keys()})
    opened, seconds = as_dataset(dataset), as_seconds("patience", patience)
    saved = Checkpoint(checkpoint, opened)

    def progress() -> tuple[int, int]:
        """The first epoch that has not ended, and how many of its samples were trained on."""
        if (state := saved.read(seconds)) is None:
            return options.get("first_epoch", 0), 0
        remainder = SessionState.from_dict(state, opened).next
        return remainder.epoch, remainder.total

    reached, in_a_row = progress(), 0
    while True:
        try:
            with contextlib.ExitStack() as attempt:
                made = make_client()  # a client of the user stays open
                client = made if isinstance(made, Client) else attempt.enter_context(made)
                wait_for_workers(client, chosen.awaited_workers, seconds, choice=chosen.choice)
                shuffler = new_or_resumed(client, opened, checkpoint, saved.read(seconds), options)
                saved.was_used = True  # it may be away for a moment from now on
                return train(attempt.enter_context(shuffler))
        except (DShuffleError, *LOSSES) as error:
            if isinstance(error, DShuffleError) and not error.transient:
                raise
            before, reached = reached, max(reached, progress())
            in_a_row = 0 if reached > before else in_a_row + 1
            if in_a_row >= attempts:
                raise
            text = "dshuffle: training continues in epoch %d (%s: %s)"
            logger.warning(text, reached[0], type(error).__name__, what_happened(error))


def new_or_resumed(
    client: Client,
    dataset: Dataset,
    checkpoint: str | os.PathLike[str],
    state: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Shuffler:
    """Open a new session, or one that goes on from its checkpoint if there is a ``state`` in it."""
    if state is None:
        return Shuffler(client, dataset, checkpoint=checkpoint, **options)
    later = {name: value for name, value in options.items() if name != "first_epoch"}
    return Shuffler.resume(client, dataset, checkpoint, **later)
