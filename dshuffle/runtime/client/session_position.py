"""How far a session has come, as the client knows it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dshuffle.checks import as_integer
from dshuffle.errors import InvalidParameter
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
        # The last epoch whose results the attached value has, as far as the loop has said.
        self._covered = start.epoch - 1
        self._histories: dict[int, WorkerHistory] = {}  # of the epochs from the next one that is not covered
        self._has_warned = False

    def begin(self, tasks: EpochTasks) -> None:
        """Make an epoch the current one."""
        self.tasks, self.ended = tasks, False
        self._histories[tasks.epoch] = self._history()

    @property
    def attached(self) -> Any:
        """A copy of the value that travels with the state."""
        return None if self._pickled is None else unpickled(self._pickled)

    def attach(self, value: Any, epoch: int | None) -> None:
        """Keep a value, and the last epoch whose results it has. See :meth:`dshuffle.Shuffler.attach`."""
        first, tasks = self._start.epoch, self.tasks
        latest = first - 1 if tasks is None else tasks.epoch
        if epoch is None:
            epoch = latest if tasks is None or self.ended or tasks.any_call_done else latest - 1
            if self._covered < epoch - 1:
                missing = f"nothing was attached in epoch {epoch - 1}, so its results may be missing"
                hint = "Give the last epoch whose results the value has: shuffler.attach(value, epoch)."
                raise InvalidParameter.because("epoch", missing, hint)
        elif not first - 1 <= as_integer("epoch", epoch) <= latest:
            raise InvalidParameter.of("epoch", epoch, f"in [{first - 1}, {latest}], the epochs that have begun")
        # At once: what is changed in place later belongs to another position.
        self._pickled, self._covered = None if value is None else pickled(value), epoch
        self._histories = {number: history for number, history in self._histories.items() if number > epoch}

    def state(self, counts: tuple[int, ...] = (), digest: SampleDigest = NOTHING) -> dict[str, Any]:
        """The state, as :meth:`dshuffle.Shuffler.state_dict` returns it.

        Parameters
        ----------
        counts
            For each rank, the number of samples of the current epoch that it has trained on in this session.
        digest
            Digest of these samples.
        """
        reached, history = self._remainder(counts, digest), self._history()
        if self._pickled is None:
            if any(counts) and self._covered < reached.epoch:  # None is attached where the caller keeps the model
                self._warn(
                    "dshuffle: the state says that %d samples of epoch %d were trained on, and no model was attached. "
                    "A session that resumes does not train on them again. Attach the model of this moment "
                    "(shuffler.attach), or save it yourself",
                    sum(counts),
                    reached.epoch,
                )
        elif reached.epoch > self._covered:  # what the value does not have is trained on again
            if reached.epoch > self._covered + 2:
                self._warn(
                    "dshuffle: the state stays at the start of epoch %d, although epoch %d has begun, because the "
                    "attached value has the results before it alone. Attach the model after each epoch "
                    "(shuffler.attach)",
                    self._covered + 1,
                    reached.epoch,
                )
            first = self._covered + 1
            reached = self._start if first == self._start.epoch else Remainder(first, ())
            history = self._histories.get(first, history)
        return SessionState.of(self._dataset, self._choices, history, reached, self._pickled).to_dict()

    def _warn(self, text: str, *values: object) -> None:
        """Warn once in a session."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(text, *values)

    def _remainder(self, counts: tuple[int, ...], digest: SampleDigest) -> Remainder:
        if self.tasks is None:
            return self._start
        if self.ended:
            return Remainder(self.tasks.epoch + 1, ())
        earlier = self._start if self._start.epoch == self.tasks.epoch else Remainder(self.tasks.epoch, ())
        return earlier.followed_by(counts, digest, self._history().weights) if any(counts) else earlier
