"""Close a session on workers, also on those that do not answer at first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from distributed import Scheduler
from distributed.protocol.serialize import ToPickle

from dshuffle.errors import DShuffleError
from dshuffle.runtime.message_fields import to_fields
from dshuffle.runtime.orders import CloseOrder
from dshuffle.runtime.replies import within
from dshuffle.runtime.session_spec import SessionSpec


class Closing:
    """Orders to close one session.

    Parameters
    ----------
    scheduler
        The Dask scheduler.
    spec
        The session.
    turn
        Function that returns the number of the session's current phase. Orders carry it, so that a worker that is
        given a rank again does not obey an earlier order to close.
    cause
        Function that returns the error with which the session has ended, if it has. Tasks that come later raise it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        spec: SessionSpec,
        turn: Callable[[], int],
        cause: Callable[[], DShuffleError | None] = lambda: None,
    ) -> None:
        self.given_up: set[str] = set()  # workers that did not answer and were replaced
        self._scheduler = scheduler
        self._session_id = spec.session_id
        self._heartbeat = spec.settings.heartbeat
        self._turn = turn
        self._cause = cause

    async def close(self, addresses: Iterable[str]) -> set[str]:
        """Close the session on workers, and return those that are in the cluster and did not answer."""
        present = sorted(self._scheduler.workers.keys() & set(addresses))
        turn = self._turn()
        closed = await asyncio.gather(*(self._is_closed(address, self._session_id, turn) for address in present))
        return {
            address for address, done in zip(present, closed, strict=True) if not done
        } & self._scheduler.workers.keys()

    async def close_later(self, late: set[str]) -> None:
        """Close the session on workers that do not answer, until they do or Dask gives them up as well."""
        while late := await self.close(late):
            await asyncio.sleep(self._heartbeat)

    def close_given_up(self, address: str) -> Coroutine[Any, Any, None]:
        """Close the session on a worker that was replaced, if it ever answers, unless it gets a rank again."""
        number = self._turn()  # taken now: the next order may give it a rank

        async def close() -> None:
            while address in self.given_up and address in self._scheduler.workers:
                if await self._is_closed(address, self._session_id, number):
                    return
                await asyncio.sleep(self._heartbeat)

        return close()

    def close_adopted(self, address: str, session_id: str) -> Coroutine[Any, Any, None]:
        """Free a rank that a worker had adopted. If that fails, it is freed with the session."""
        number = self._turn()  # taken now: the worker may adopt the rank again

        async def close() -> None:
            await self._is_closed(address, session_id, number)

        return close()

    async def _is_closed(self, address: str, session_id: str, number: int) -> bool:
        rpc: Any = self._scheduler.rpc(address)
        order = CloseOrder(session_id=session_id, number=number)
        call = rpc.dshuffle_close(**to_fields(order), cause=ToPickle(self._cause()))
        try:
            await within(self._heartbeat, call)
        except OSError:
            return False
        return True
