"""How far a session has come, as the client knows it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dshuffle.planning import Choices, Remainder, WorkerHistory
from dshuffle.planning.sample_digest import SampleDigest
from dshuffle.runtime.client.epoch_tasks import EpochTasks
from dshuffle.runtime.client.session_state import SessionState, pickled, unpickled
from dshuffle.store import Dataset

logger = logging.getLogger(__name__)

NOTHING = SampleDigest()


class SessionPosition:
    """The current epoch of a session, and the state from which another session can continue.

    Parameters
    ----------
    dataset, choices
        The session's dataset and way of shuffling.
    start
        The first epoch, and what earlier sessions have trained on in it.
    history
        Returns the workers of the session.
    resumed
        State of the session that this one continues, if any.
    """

    def __init__(
        self,
        dataset: Dataset,
        choices: Choices,
        start: Remainder,
        history: Callable[[], WorkerHistory],
        resumed: SessionState | None = None,
    ) -> None:
        self._dataset = dataset
        self._choices = choices
        self._start = start
        self._history = history
        self.tasks: EpochTasks | None = None  # of the current epoch
        self.ended = False  # whether the current epoch has ended, and the next one has not begun
        self.next_epoch = start.epoch
        self._pickled = None if resumed is None else resumed.attached
        self._attached: Any = None
        self._attached_in: int | None = None  # epoch in which a value was attached
        self._has_warned = False

    def begin(self, tasks: EpochTasks) -> None:
        """Make an epoch the current one."""
        self.tasks, self.ended = tasks, False

    @property
    def attached(self) -> Any:
        """The value that travels with the state."""
        if self._pickled is not None:
            self._attached, self._pickled = unpickled(self._pickled), None
        return self._attached

    @attached.setter
    def attached(self, value: Any) -> None:
        self._attached, self._pickled = value, None
        self._attached_in = -1 if self.tasks is None else self.tasks.epoch

    def state(self, counts: tuple[int, ...] = (), digest: SampleDigest = NOTHING) -> dict[str, Any]:
        """The state, as :meth:`dshuffle.Shuffler.state_dict` returns it.

        Parameters
        ----------
        counts
            For each rank, the number of samples of the current epoch that it has trained on in this session.
        digest
            Digest of these samples.
        """
        epoch = self.next_epoch if self.tasks is None else self.tasks.epoch
        if any(counts) and not (self._attached_in == epoch or self._has_warned):
            self._has_warned = True
            logger.warning(
                "dshuffle: the state says that %d samples of epoch %d were trained on, and no model was attached in "
                "this epoch. A session that resumes does not train on them again. Attach the model of this moment "
                "(shuffler.attach), or save it yourself",
                sum(counts),
                epoch,
            )
        text = self._pickled
        if text is None and self._attached is not None:
            text = pickled(self._attached)  # every time, since it may have been changed in place
        return SessionState.of(
            self._dataset, self._choices, self._history(), self._remainder(counts, digest), text
        ).to_dict()

    def _remainder(self, counts: tuple[int, ...], digest: SampleDigest) -> Remainder:
        if self.tasks is None:
            return self._start
        if self.ended:
            return Remainder(self.tasks.epoch + 1, ())
        earlier = self._start if self._start.epoch == self.tasks.epoch else Remainder(self.tasks.epoch, ())
        return earlier.followed_by(counts, digest, self._history().weights) if any(counts) else earlier
