"""The client's calls to the scheduler plugin: they say what they wait for, and survive a lost connection."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any

from distributed import Client

from dshuffle.errors import ClusterError, DShuffleError
from dshuffle.runtime.collective import CollectiveId
from dshuffle.runtime.replies import Reply, unwrap, within
from dshuffle.runtime.scheduler.scheduler_plugin import DShuffleScheduler

logger = logging.getLogger(__name__)

PATIENCE = 15.0
"""Seconds after which a call says whom it waits for; then after twice that time, and so on."""

RECONNECT = 15.0
"""Seconds that a call waits for the client to be connected again."""


def install_plugin(client: Client) -> None:
    """Install the scheduler plugin, which installs the worker plugin.

    Raises
    ------
    ClusterError
        If that fails, for instance because dshuffle is not installed on the scheduler. After a lost connection it is
        tried twice.
    """
    for attempt in (1, 2):
        try:
            client.register_plugin(DShuffleScheduler())
        except Exception as error:  # errors of the scheduler arrive as they were raised there
            if isinstance(error, OSError) and attempt == 1:  # a worker or a connection was lost
                continue
            where = getattr(client.scheduler, "address", "")
            raise ClusterError(
                f"dshuffle could not be set up on the scheduler {where} ({type(error).__name__}: {error}). Make sure "
                "that the same version of dshuffle is installed there and on all workers"
            ) from error
        return


class SessionClient:
    """Calls of one session.

    Parameters
    ----------
    client
        The Dask client.
    session_id
        Id of the session.
    """

    def __init__(self, client: Client, session_id: str) -> None:
        self.client = client
        self.session_id = session_id
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
        """Refuse to go on in a forked process, where no call would ever be answered.

        Raises
        ------
        ClusterError
            If this is another process than the one that opened the session.
        """
        if self.forked:
            raise ClusterError(
                f"this Shuffler works only in process {self._process}, which made it, because the connections of its "
                f"Dask client belong to that process. This is process {os.getpid()}, which was forked later. Make a "
                "Client and a Shuffler here, or pass arrays to this process instead"
            )

    def ask(self, op: str, **message: Any) -> Reply:
        """Call a handler of the scheduler plugin, and return its reply, or raise its error.

        Raises
        ------
        ClusterError
            If the client is closed, or the scheduler cannot be reached.
        """
        self.check_process()
        started = time.perf_counter()
        repeatable, failed = op != "dshuffle_open", 0.0
        while True:
            if not self.connected:
                raise ClusterError(f"the Dask client is {self.client.status}. Make a new Client and a new Shuffler")
            try:
                reply = self.client.sync(self._patiently, op, message)
            except OSError as error:
                failed = failed or time.perf_counter()
                if not repeatable or time.perf_counter() - failed > RECONNECT:
                    raise ClusterError(
                        f"the scheduler cannot be reached: {error}. Make a new Client and a new Shuffler"
                    ) from error
                time.sleep(0.2)  # the client may be connecting again
            else:
                logger.debug("dshuffle: %s took %.3f s", op, time.perf_counter() - started)
                return unwrap(reply, "the scheduler")

    def session(self, op: str, **message: Any) -> Reply:
        """Call a handler for this session."""
        return self.ask(f"dshuffle_{op}", session_id=self.session_id, **message)

    def waiting_for(self) -> str:
        """What the session waits for, in words; empty if that is not known."""
        try:
            return str(self.client.sync(self._waiting))
        except (OSError, TimeoutError, DShuffleError):
            return ""

    def close_soon(self) -> None:
        """Close the session without waiting; for a shuffler that was dropped."""
        if not self.connected:
            return

        async def close() -> None:
            scheduler: Any = self.client.scheduler
            try:
                await scheduler.dshuffle_close(session_id=self.session_id)
            except OSError:
                logger.debug("dshuffle: session %s could not be closed", self.session_id, exc_info=True)

        loop: Any = self.client.loop
        loop.add_callback(close)

    def end_collective(self, collective: CollectiveId, reason: str) -> None:
        """Fail all ranks that still wait for a mean of a call of :meth:`dshuffle.Epoch.together`."""
        if not self.connected:
            return
        message = {
            "op": "dshuffle_end_collective",
            "session_id": collective.session_id,
            "number": collective.number,
            "reason": reason,
        }

        async def proxy() -> None:
            scheduler: Any = self.client.scheduler
            await within(PATIENCE, scheduler.proxy(worker=collective.address, msg=message))

        try:
            self.client.sync(proxy)
        except (OSError, TimeoutError) as error:  # rank 0's worker is gone, so nobody waits there
            logger.debug("dshuffle: %s could not be told that %s: %s", collective.address, reason, error)

    async def _patiently(self, op: str, message: dict[str, Any]) -> Any:
        call = asyncio.ensure_future(getattr(self.client.scheduler, op)(**message))
        try:
            patience = PATIENCE
            while not (await asyncio.wait([call], timeout=patience))[0]:
                patience *= 2
                try:
                    reason = await self._waiting()
                except (OSError, TimeoutError, DShuffleError):
                    reason = "waiting for the scheduler, which does not answer"
                if reason:
                    logger.warning("dshuffle: %s", reason)
            return call.result()
        finally:
            call.cancel()

    async def _waiting(self) -> str:
        scheduler: Any = self.client.scheduler
        call = scheduler.dshuffle_waiting(session_id=self.session_id)
        reply = unwrap(await within(PATIENCE, call), "the scheduler")
        return str(reply["waiting_for"])
