"""Signs of life of a session on one worker, which the scheduler gets without asking.

An answer to a question of the scheduler crosses the worker's link twice. If rows fill the queues in front of a slow
link, that may take longer than a heartbeat. A sign of life crosses it once. It also says from which other participants
bytes arrive: these are alive, although their own signs may still wait behind the rows that they send.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable

from dshuffle.runtime.worker.reports import ReportSender

MOST_HEARD = 64
"""Number of others that a sign of life names. If all named all, the scheduler would read n squared names."""


class SignsOfLife:
    """Tells the scheduler every third of a heartbeat that this worker is alive, while the scheduler waits for it.

    Parameters
    ----------
    reports
        Sends what this worker reports.
    heartbeat
        Seconds.
    look
        Returns participant -> seconds since bytes came from it, or None if the scheduler does not wait for this worker.
    """

    def __init__(self, reports: ReportSender, heartbeat: float, look: Callable[[], dict[int, float] | None]) -> None:
        self._reports = reports
        self._every = heartbeat / 3
        self._look = look
        self._next = reports.participant  # from whom on the next sign names others; not the same on all workers
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
        self._timer = asyncio.get_running_loop().call_later(self._every, self._give)

    def _give(self) -> None:
        ages = self._look()
        if ages is not None and (self._sending is None or self._sending.done()):
            heard = self._named(ages)
            self._sending = asyncio.get_running_loop().create_task(self._reports.send_sign_of_life(heard))
        self._wait()

    def _named(self, ages: dict[int, float]) -> dict[int, float]:
        """Those that were heard in the last heartbeat. If they are too many, signs name them in turn."""
        recent = sorted(participant for participant, age in ages.items() if age < 3 * self._every)
        if len(recent) > MOST_HEARD:
            first = bisect.bisect_left(recent, self._next)
            recent = [*recent[first:], *recent[:first]][:MOST_HEARD]
            self._next = recent[-1] + 1
        return {participant: ages[participant] for participant in recent}
