"""When the shares of a session change, from the records of its epochs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dshuffle.planning.share_sizes import Weights
from dshuffle.planning.shares import ShareBounds
from dshuffle.records import EpochRecord
from dshuffle.runtime.client.open_session import OpenSession

logger = logging.getLogger(__name__)


class ShareChanges:
    """Proposes other shares for the ranks of a session, as its policy says."""

    def __init__(self) -> None:
        self._fixed: str | None = None  # id of the session whose shares cannot change

    def proposed(self, session: OpenSession, records: Sequence[EpochRecord]) -> Weights | None:
        """Other weights for the ranks of a session; None if they stay.

        Parameters
        ----------
        session
            The session that trains now.
        records
            All epochs that were recorded, in order.
        """
        if session.request.session_id == self._fixed:
            return None
        choices, start = session.request.choices, session.request.start.epoch
        epochs = [record.rank_training_seconds for record in records if record.first_epoch == start]
        n_samples, n_workers = session.request.dataset.n_samples, session.n_workers
        bounds = ShareBounds.of(choices.assignment, choices.cache_fraction, n_samples, n_workers)
        now = session.history.weights
        weights = choices.shares.following(now, epochs, bounds)
        return None if weights == now else weights

    def fix(self, session: OpenSession) -> None:
        """Let the shares of a session stay.

        Measured weights differ a little in every epoch, so others would fail like those that have failed.
        """
        self._fixed = session.request.session_id
