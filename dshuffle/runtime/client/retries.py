"""Train through the loss of clusters: open a session again, on whatever workers there are, and go on."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from distributed import Client, KilledWorker
from distributed.comm.core import CommClosedError

from dshuffle.checks import as_integer
from dshuffle.errors import CheckpointError, DShuffleError, what_happened
from dshuffle.planning import Choices
from dshuffle.runtime.client.checkpoints import find_checkpoint
from dshuffle.runtime.client.cluster_view import wait_for_workers
from dshuffle.runtime.client.session_state import CHOOSING, SessionState
from dshuffle.runtime.client.shuffler import Shuffler
from dshuffle.runtime.dataset_inputs import resolved
from dshuffle.runtime.session_spec import OPTION_NAMES, SessionOptions
from dshuffle.runtime.settings import as_seconds
from dshuffle.store import Dataset, Place, as_dataset

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOSSES = (CommClosedError, KilledWorker, CancelledError)
"""Dask's errors after which another session may succeed. Those of dshuffle say it themselves."""

TOTAL_ATTEMPTS = 10
"""Limit for all failed attempts together, as a multiple of ``attempts``."""


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
        epoch has ended, or that more of its samples were trained on (:meth:`Shuffler.save`). In all, ten times as many
        attempts may fail. An error that another attempt cannot help (:attr:`DShuffleError.transient`) is raised at
        once.
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
        If the checkpoint is damaged, one of another dataset or way of shuffling, or cannot be read or written in time.
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
    as_integer("min_workers", min_workers, 1)
    checkpoint_file = _Checkpoint(checkpoint, as_dataset(dataset), as_seconds("patience", patience))
    reached = checkpoint_file.reached(options)
    failed, in_a_row = 0, 0
    while True:
        try:
            with (
                _client(make_client()) as client,
                _shuffler(client, checkpoint_file, options, min_workers, patience) as shuffler,
            ):
                return train(shuffler)
        except (DShuffleError, *LOSSES) as error:
            if isinstance(error, DShuffleError) and not error.transient:
                raise
            failed, before, reached = failed + 1, reached, max(reached, checkpoint_file.reached(options))
            in_a_row = 0 if reached > before else in_a_row + 1
            if in_a_row >= attempts or failed >= TOTAL_ATTEMPTS * attempts:
                raise
            reason = what_happened(error)
            logger.warning(
                "dshuffle: training continues in epoch %d (%s: %s)", reached[0], type(error).__name__, reason
            )


@dataclasses.dataclass
class _Checkpoint:
    """The checkpoint of a training, which may be away for a moment once it was written."""

    place: str | os.PathLike[str]
    dataset: Dataset
    patience: float
    was_written: bool = False

    def state(self) -> dict[str, Any] | None:
        """The state in it; None if there is none yet."""
        state = find_checkpoint(self.place, self.dataset, patience=self.patience, was_written=self.was_written)
        self.was_written = state is not None
        return state

    def reached(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """The first epoch that has not ended, and how many of its samples were trained on."""
        state = self.state()
        if state is None:
            return options.get("first_epoch", 0), 0
        remainder = SessionState.from_dict(state, self.dataset).next
        return remainder.epoch, remainder.total


def _client(made: Client | AbstractContextManager[Client]) -> AbstractContextManager[Client]:
    # The user's client stays open.
    return contextlib.nullcontext(made) if isinstance(made, Client) else made


@contextlib.contextmanager
def _shuffler(
    client: Client,
    checkpoint: _Checkpoint,
    options: Mapping[str, Any],
    min_workers: int,
    patience: str | float,
) -> Iterator[Shuffler]:
    options = {**options, "min_workers": min_workers}
    chosen = SessionOptions(**{name: value for name, value in options.items() if name in OPTION_NAMES})
    wait_for_workers(client, chosen.awaited_workers, patience, choice=chosen.choice)
    state = checkpoint.state()
    shuffler = new_or_resumed(client, checkpoint.dataset, checkpoint.place, state, options)
    checkpoint.was_written = True
    with shuffler:
        yield shuffler


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
    choices = SessionState.from_dict(state, dataset).choices
    hint = "Ask for the same, or remove the checkpoint to begin again"
    check_alike(choices, dataset, options, f"checkpoint {checkpoint}", hint)
    keywords = {name: value for name, value in options.items() if name not in CHOOSING}
    return Shuffler.resume(client, dataset, checkpoint, **keywords)


def check_alike(choices: Choices, dataset: Dataset, options: Mapping[str, Any], origin: str, hint: str) -> None:
    """Refuse to go on with another way of shuffling than the one that is asked for."""
    names = {field.name for field in dataclasses.fields(Choices)} & CHOOSING & options.keys()
    asked = resolved(dataset, Choices(**{name: options[name] for name in names})).to_dict()
    saved = choices.to_dict()
    for name in sorted(names):
        if asked[name] != saved[name]:
            raise CheckpointError(
                f"the {origin} has {name}={saved[name]!r}, and {name}={asked[name]!r} is asked for. {hint}"
            )
