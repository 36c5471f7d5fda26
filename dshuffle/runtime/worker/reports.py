"""What a worker tells the others: votes, signs of life, and where the participants are."""

from __future__ import annotations

import asyncio
import bisect
import logging
from collections.abc import Callable, Iterator, Mapping

from distributed import Worker

from dshuffle.errors import DShuffleError
from dshuffle.runtime.messages import Vote, message_in, to_fields

logger = logging.getLogger(__name__)


class MemberAddresses(Mapping[int, str]):
    """Address of each participant.

    Parameters
    ----------
    addresses
        Addresses of the ranks, and of the server.
    """

    def __init__(self, addresses: Mapping[int, str]) -> None:
        self._addresses = dict(addresses)
        self._changed = asyncio.Event()
        self._closed = False

    def __getitem__(self, participant: int) -> str:
        return self._addresses[participant]

    def __iter__(self) -> Iterator[int]:
        return iter(self._addresses)

    def __len__(self) -> int:
        return len(self._addresses)

    def change(self, addresses: Mapping[int, str]) -> None:
        """Use the addresses of workers that have taken lost ranks."""
        self._addresses.update(addresses)
        self._wake()

    def close(self) -> None:
        """Note that the session is closed on this worker, so that nobody waits for other addresses."""
        self._closed = True
        self._wake()

    async def until_left(self, participant: int, address: str) -> None:
        """Wait until a participant is not at an address any more, or the session is closed."""
        while not self._closed and self._addresses.get(participant) == address:
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class ReportSender:
    """Sends the reports of one participant of a session.

    Parameters
    ----------
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


MOST_HEARD = 64
"""Number of others that a sign of life names. If all named all, the scheduler would read n squared names."""


class SignsOfLife:
    """Tells the scheduler every third of a heartbeat that this worker is alive, while the scheduler waits for it.

    Parameters
    ----------
    reports
        Sends what this worker reports.
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
