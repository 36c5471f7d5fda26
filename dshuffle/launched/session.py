"""The session of a job, in the process of rank 0."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from typing import Any

from distributed import Client, Future, Security
from distributed.client import ClosedClientError

from dshuffle.errors import ClusterError, InvalidParameter
from dshuffle.launched.mailbox import hold_partition, mark_batches
from dshuffle.planning.shares import Shares, parse_shares
from dshuffle.runtime import Shuffler
from dshuffle.runtime.client.checkpoints import find_checkpoint, write_checkpoint
from dshuffle.runtime.client.retries import check_alike, new_or_resumed
from dshuffle.runtime.client.session_state import CHOOSING, SessionState
from dshuffle.store import Dataset

CLOSE_WITHIN = 5.0
"""Seconds that the client has to close."""


def check_shares(shares: Shares) -> None:
    """Refuse shares that follow from measured times of training, or from names, which a job does not have."""
    policy = parse_shares(shares)
    if policy.not_in_jobs:
        hint = "Give 'even', or numbers, one for each rank."
        raise InvalidParameter.because(f"shares={str(policy)!r}", policy.not_in_jobs, hint)


class JobSession:
    """A :class:`dshuffle.Shuffler` on the workers of a job, whose tasks hold the partitions for the loops of the ranks.

    Parameters
    ----------
    address, security
        Address of the scheduler, and TLS certificates.
    checkpoint
        Where the position is written, if anywhere. If there is a checkpoint, the session continues it.
    state
        A state from which the session continues, in place of the checkpoint.
    options
        Other parameters of the shuffler.
    """

    def __init__(
        self,
        address: str,
        security: Security,
        dataset: Dataset,
        world_size: int,
        checkpoint: str | os.PathLike[str] | None,
        state: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> None:
        self.dataset, self._checkpoint = dataset, checkpoint
        self._futures: list[Future[Any]] = []
        self._is_closing = False
        if state is not None:
            choices = SessionState.from_dict(state, dataset).choices
            check_alike(choices, dataset, options, "state", "Ask for the same")
            check_shares(options.get("shares", choices.shares))
        self._client = Client(address, security=security, set_as_default=False)
        try:
            # All ranks have come. With their names, the session does not wait for a rank that was lost since then.
            options = {**options, "on_loss": "raise", "workers": [str(rank) for rank in range(world_size)]}
            self.shuffler = self._opened(checkpoint, state, options)
        except BaseException:
            self._client.close()
            raise

    def _opened(
        self,
        checkpoint: str | os.PathLike[str] | None,
        state: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> Shuffler:
        if state is not None:
            remaining = {name: value for name, value in options.items() if name not in CHOOSING}
            return Shuffler.resume(self._client, self.dataset, state, checkpoint=checkpoint, **remaining)
        if checkpoint is not None:
            saved_state = find_checkpoint(checkpoint, self.dataset)
            if saved_state is not None:
                check_shares(options.get("shares", SessionState.from_dict(saved_state, self.dataset).choices.shares))
            return new_or_resumed(self._client, self.dataset, checkpoint, saved_state, options)
        return Shuffler(self._client, self.dataset, **options)

    @property
    def is_rest(self) -> bool:
        """Whether another session has trained on a part of the first epoch. Call it before that begins."""
        return bool(self.shuffler.state_dict()["trained"])

    def begin_epoch(self, count: int, on_failure: Callable[[str, str], None]) -> None:
        """Wait until all ranks have given their partitions back, and hand out those of the next epoch."""
        epoch = next(self.shuffler.epochs(count))
        self._futures = epoch.map(hold_partition)
        for address, future in zip(self.shuffler.addresses, self._futures, strict=True):
            future.add_done_callback(functools.partial(self._call_if_failed, on_failure, address))

    def cancel(self) -> None:
        """Cancel the tasks of the current epoch, so that nobody waits for those of a rank that is gone."""
        with contextlib.suppress(CancelledError, OSError, ClosedClientError):  # the client may be closed meanwhile
            self._client.cancel(self._futures)

    def end_epoch(self) -> None:
        """Wait until all ranks have given their partitions back, and write the last checkpoint."""
        for _ in self.shuffler.epochs(0):
            pass

    def state_dict(
        self, states: Mapping[str, Any], n_batches: int, *, is_complete: bool, has_model: bool
    ) -> dict[str, Any]:
        """The state of the session, after a number of batches of the current epoch on every rank."""
        shuffler = self.shuffler
        if states or has_model:
            shuffler.attach(dict(states) or shuffler.attached, shuffler.epoch)
        if shuffler.epoch is not None and n_batches:
            answers = self._client.run(mark_batches, shuffler.epoch, n_batches, workers=list(shuffler.addresses))
            for error in filter(None, answers.values()):
                raise ClusterError(error, transient=False)
        state = shuffler.state_dict()
        if not is_complete or shuffler.epoch is None:
            return state
        started = {name: value for name, value in state.items() if name != "trained_digest"}
        return {**started, "epoch": shuffler.epoch + 1, "trained": []}

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a state to the checkpoint."""
        assert self._checkpoint is not None
        write_checkpoint(self._checkpoint, state, self.dataset, was_written=True)

    def close(self) -> None:
        """Close the session on all ranks."""
        self._is_closing = True
        self.shuffler.close()
        self._close_client()

    def drop(self, error: BaseException) -> None:
        """Let go of the session after an error. All workers and the scheduler are about to close."""
        self._is_closing = True
        self._close_client()  # first, so that the shuffler does not wait for workers that are gone
        self.shuffler.__exit__(type(error), error, error.__traceback__)

    def _call_if_failed(self, on_failure: Callable[[str, str], None], address: str, future: Future[Any]) -> None:
        if self._is_closing:  # a callback that comes late sees a future that closing has cancelled
            return
        if future.status == "error":
            on_failure(address, repr(future.exception()))
        elif future.status != "finished":
            on_failure(address, f"its task was {future.status}")

    def _close_client(self) -> None:
        with contextlib.suppress(OSError):  # TimeoutError among them
            self._client.close(timeout=CLOSE_WITHIN)
