"""The client's calls to the scheduler plugin: they say what they wait for, and survive a lost connection."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass
from typing import Any, TypeVar

from distributed import Client

from dshuffle.errors import ClusterError, DShuffleError
from dshuffle.runtime.client.cluster_view import limit_of
from dshuffle.runtime.collective import CollectiveId
from dshuffle.runtime.messages import message_in, retrieve, unless, within
from dshuffle.runtime.scheduler.members import SETUP_TIMEOUT
from dshuffle.runtime.scheduler.scheduler_plugin import DShuffleScheduler

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE = 15.0
"""Seconds after which a call says whom it waits for; then after twice that time, and so on."""

RECONNECT = 15.0
"""Seconds that a call waits for the client to be connected again."""

SETUP_MARGIN = 15.0
"""Seconds for the answer of a scheduler that has waited for slow workers as long as it does."""

LEAVE_WITHIN = 4.0
"""Seconds that all calls together wait for a scheduler that does not answer, once a shuffler is being closed."""

LOOK = 0.5
"""Seconds between two looks at the connection while a call waits."""

CLOSE_AGAIN_AFTER = 0.5
"""Seconds between two attempts to close a session in the background."""


@dataclass
class Silence:
    """How long the scheduler has not answered any session of a shuffler.

    Attributes
    ----------
    leaving
        Whether the shuffler is being closed.
    lost
        Whether the client has been without a connection since then.
    """

    leaving: bool = False
    reason: str = ""
    lost: bool = False
    _since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the scheduler was found not to answer; 0 if it answers."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    @property
    def left(self) -> float:
        """Seconds that are left until the scheduler counts as gone."""
        return (LEAVE_WITHIN if self.leaving else RECONNECT) - self.seconds

    def begin(self, since: float, reason: object, *, lost: bool = False) -> None:
        """Note that the scheduler does not answer, since some time at the latest."""
        self.lost |= lost
        if self._since is None:
            self._since, self.reason = since, str(reason) or type(reason).__name__

    def end(self) -> None:
        """Note an answer, or a new connection."""
        self._since, self.lost = None, False


def install_plugin(client: Client) -> None:
    """Install the scheduler plugin, which installs the worker plugin."""
    timeout = max(limit_of(), SETUP_TIMEOUT + SETUP_MARGIN)
    for attempt in (1, 2):
        try:
            client.sync(_answer, client)
        except OSError as error:
            raise ClusterError(_is_gone(client, error)) from error
        try:
            client.sync(_register, client, timeout)
        except _NoAnswer as error:
            raise ClusterError(
                f"the scheduler at {_address(client)} did not set up all workers within {timeout:g} s. End workers "
                "that hang, or wait longer (dshuffle.timeout)"
            ) from error
        except TimeoutError as error:  # the scheduler has raised it, so it does answer
            raise ClusterError(
                f"dshuffle could not be set up on the scheduler {_address(client)} ({type(error).__name__}: {error}). "
                "Its log says more. Try again"
            ) from error
        except OSError as error:  # a worker or a connection was lost
            if attempt == 2:
                raise ClusterError(_is_gone(client, error)) from error
        except Exception as error:  # errors of the scheduler arrive as they were raised there
            raise ClusterError(
                f"dshuffle could not be set up on the scheduler {_address(client)} ({type(error).__name__}: {error}). "
                "Make sure that the same version of dshuffle is installed there and on all workers",
                transient=False,
            ) from error
        else:
            return


async def _answer(client: Client) -> None:
    scheduler: Any = client.scheduler
    await within(RECONNECT, scheduler.identity(n_workers=0))


class _NoAnswer(Exception):
    """The scheduler has not answered in time."""


async def _register(client: Client, seconds: float) -> None:
    plugin = DShuffleScheduler()
    call = client._register_scheduler_plugin(plugin, plugin.name, plugin.idempotent)
    await unless(asyncio.sleep(seconds), call, _NoAnswer())


def _address(client: Client) -> str:
    return str(getattr(client.scheduler, "address", ""))


def _is_gone(client: Client, reason: object) -> str:
    return (
        f"the scheduler at {_address(client)} does not answer ({reason}): it has died, or cannot be reached from here. "
        "Make a new Client and a new Shuffler"
    )


class SessionClient:
    """Calls of one session.

    Parameters
    ----------
    silence
        What earlier sessions of the same shuffler know of the scheduler.
    """

    def __init__(self, client: Client, session_id: str, silence: Silence | None = None) -> None:
        self.client = client
        self.session_id = session_id
        self.silence = Silence() if silence is None else silence
        self._process = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened the session. It has no connection of its own."""
        return os.getpid() != self._process

    @property
    def connected(self) -> bool:
        """Whether the client is connected to the scheduler, or about to be connected again."""
        return not self.forked and self.client.status in ("running", "connecting")

    def check_process(self) -> None:
        """Refuse to go on in a forked process, where no call would ever be answered."""
        if self.forked:
            raise ClusterError(
                f"this Shuffler works only in process {self._process}, which made it, because the connections of its "
                f"Dask client belong to that process. This is process {os.getpid()}, which was forked later. Make a "
                "Client and a Shuffler here, or pass arrays to this process instead",
                transient=False,
            )

    def tell(self, operation: str, **message: Any) -> None:
        """Call an operation of the scheduler that returns nothing, or raise its error."""
        self.ask(type(None), operation, **message)

    def ask(self, kind: type[T], operation: str, **message: Any) -> T:
        """Call an operation of the scheduler, and return the message in its reply, or raise its error."""
        self.check_process()
        started = time.monotonic()
        while True:
            if not self.connected:
                raise ClusterError(f"the Dask client is {self.client.status}. Make a new Client and a new Shuffler")
            if self.silence.leaving and self.silence.left <= 0:  # another call has waited for it
                raise ClusterError(_is_gone(self.client, self.silence.reason))
            try:
                reply = self.client.sync(self._call, operation, message)
            except OSError as error:
                self.silence.begin(time.monotonic(), error, lost=self.client.status != "running")
                if operation == "open" or self.silence.left <= 0:
                    raise ClusterError(_is_gone(self.client, self.silence.reason)) from error
                time.sleep(0.2)  # the client may be connecting again
            else:
                self.silence.end()
                logger.debug("dshuffle: %s took %.3f s", operation, time.monotonic() - started)
                return message_in(reply, kind, "the scheduler")

    def waiting_for(self) -> str:
        """What the session waits for, in words; empty if that is not known."""
        try:
            return str(self.client.sync(self._waiting))
        except DShuffleError:
            return ""
        except OSError as error:
            if self.silence.leaving:
                self.silence.begin(time.monotonic() - LEAVE_WITHIN, error)
                raise ClusterError(_is_gone(self.client, error)) from error
            return ""

    def close_soon(self) -> None:
        """Close the session without waiting: of a shuffler that was dropped, or whose scheduler did not answer.

        A client that is about to be connected again closes it then. Otherwise it would be open until the client leaves.
        """
        if not self.connected:
            return

        async def close() -> None:
            scheduler: Any = self.client.scheduler
            while self.connected:
                try:
                    await scheduler.dshuffle_close(session_id=self.session_id)
                except OSError:
                    logger.debug("dshuffle: session %s could not be closed", self.session_id, exc_info=True)
                    await asyncio.sleep(CLOSE_AGAIN_AFTER)
                else:
                    return

        loop: Any = self.client.loop
        loop.add_callback(close)

    def end_collective(self, collective: CollectiveId, reason: str, *, transient: bool = True) -> None:
        """Fail all ranks that still wait for a mean of a call of :meth:`dshuffle.Epoch.together`.

        ``transient`` says whether another attempt can succeed.
        """
        try:
            call = {"number": collective.number, "reason": reason, "transient": transient}
            self.tell("end_collective", address=collective.address, **call)
        except ClusterError as error:  # the session is closed, or the client is, so nobody waits
            logger.debug("dshuffle: the ranks could not be told that %s: %s", reason, error)

    async def _call(self, operation: str, message: dict[str, Any]) -> Any:
        # A scheduler that is connected and does not answer is busy, or waits for a worker: the log says for which. It
        # counts as gone only while the shuffler is being closed. OSError: it is gone, or away for too long.
        handler = getattr(self.client.scheduler, f"dshuffle_{operation}")
        call = asyncio.ensure_future(handler(session_id=self.session_id, **message))
        call.add_done_callback(retrieve)
        began = heard = time.monotonic()
        patience = PATIENCE
        try:
            while not (await asyncio.wait([call], timeout=LOOK))[0]:
                if self.client.status != "running":  # a call by itself takes half a minute to notice
                    self.silence.begin(time.monotonic(), "its connection was lost", lost=True)
                    if self.silence.left <= 0:
                        raise TimeoutError(self.silence.reason)
                elif self.silence.lost:  # it is connected again, perhaps since an earlier attempt
                    self.silence.end()
                elif self.silence.leaving:
                    await self._check_alive(heard)
                    heard = time.monotonic()
                elif time.monotonic() - began >= patience:
                    patience *= 2
                    await self.say_what_for()
            return call.result()
        finally:
            call.cancel()

    async def _check_alive(self, since: float) -> None:
        # Raises OSError without a sign of life.
        try:
            await self._waiting(round(max(LOOK, LEAVE_WITHIN - (time.monotonic() - since)), 1))
        except DShuffleError:
            self.silence.end()
        except OSError as error:
            self.silence.begin(since, error)
            raise
        else:
            self.silence.end()

    async def say_what_for(self, *, tasks: bool = False) -> None:
        """Log what the session waits for, or what its tasks wait for alone."""
        try:
            reason = await self._waiting(tasks=tasks)
        except (OSError, DShuffleError):
            reason = "waiting for the scheduler, which does not answer"
        if reason:
            logger.warning("dshuffle: %s", reason)

    async def _waiting(self, seconds: float | None = None, *, tasks: bool = False) -> str:
        if seconds is None:
            seconds = LEAVE_WITHIN if self.silence.leaving else PATIENCE
        scheduler: Any = self.client.scheduler
        call = scheduler.dshuffle_waiting(session_id=self.session_id, tasks=tasks)
        return message_in(await within(seconds, call), str, "the scheduler")
