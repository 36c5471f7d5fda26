"""Signs of life of a session on one worker, which the scheduler gets without asking.

An answer to a question of the scheduler crosses the worker's link twice. If rows fill the queues in front of a slow
link, that may take longer than a heartbeat. A sign of life crosses it once. It also says from which other participants
bytes arrive: these are alive, although their own signs may still wait behind the rows that they send.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from distributed import Worker

from dshuffle.runtime.session_spec import SessionSpec

logger = logging.getLogger(__name__)


class SignsOfLife:
    """Tells the scheduler every third of a heartbeat that this worker is alive, while the scheduler waits for it.

    Parameters
    ----------
    worker
        The Dask worker.
    spec
        The session.
    participant
        Participant as which this worker votes.
    look
        Returns participant -> seconds since bytes came from it, or None if the scheduler does not wait for this worker.
    """

    def __init__(
        self, worker: Worker, spec: SessionSpec, participant: int, look: Callable[[], dict[int, float] | None]
    ) -> None:
        self._worker = worker
        self._spec = spec
        self._participant = participant
        self._look = look
        self._sending: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wait()

    def close(self) -> None:
        """Give no more signs."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._look = lambda: None

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._spec.settings.heartbeat / 3, self._give)

    def _give(self) -> None:
        heard = self._look()
        if heard is not None and (self._sending is None or self._sending.done()):
            self._sending = asyncio.get_running_loop().create_task(self._send(heard))
        self._wait()

    async def _send(self, heard: dict[int, float]) -> None:
        try:
            await self._worker.scheduler.dshuffle_alive(
                session_id=self._spec.session_id,
                participant=self._participant,
                secret=self._spec.secret,
                heard=heard,
                reply=False,
            )
        except (OSError, RuntimeError) as error:  # the scheduler still asks, or this worker is closing
            logger.debug("dshuffle: a sign of life did not reach the scheduler: %s", error)
