"""What a participant reports to the scheduler by itself: its votes, and signs of life."""

from __future__ import annotations

import logging

from distributed import Worker

from dshuffle.errors import DShuffleError
from dshuffle.runtime.message_fields import to_fields
from dshuffle.runtime.messages import Vote
from dshuffle.runtime.replies import message_in

logger = logging.getLogger(__name__)


class ReportSender:
    """Sends the reports of one participant of a session.

    Parameters
    ----------
    worker
        Its Dask worker.
    session_id, participant
        The session, and the participant as which this worker votes.
    secret
        Random word of the session. The scheduler refuses a report without it.
    """

    def __init__(self, worker: Worker, session_id: str, participant: int, secret: str) -> None:
        self.participant = participant
        self._worker = worker
        self._sender = {"session_id": session_id, "participant": participant, "secret": secret}

    async def send_vote(self, run_id: int, vote: Vote) -> None:
        """Report whether this worker is ready. If that fails, the scheduler asks for the vote."""
        try:
            reply = await self._worker.scheduler.dshuffle_report(**self._sender, run_id=run_id, vote=to_fields(vote))
            message_in(reply, type(None), "the scheduler")
        except (OSError, DShuffleError) as error:
            logger.warning("dshuffle: the vote on run %d did not reach the scheduler: %s", run_id, error)

    async def send_sign_of_life(self, ages: dict[int, float]) -> None:
        """Report that this worker is alive, and how long ago bytes came from others."""
        try:
            await self._worker.scheduler.dshuffle_alive(**self._sender, heard=ages, reply=False)
        except (OSError, RuntimeError) as error:  # the scheduler still asks, or this worker is closing
            logger.debug("dshuffle: a sign of life did not reach the scheduler: %s", error)
