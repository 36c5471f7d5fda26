"""Other workers take the ranks of lost ones, and sessions are closed on those that do not answer at first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from distributed import Scheduler
from distributed.protocol.serialize import ToPickle
from distributed.scheduler import WorkerState

from dshuffle.errors import DShuffleError
from dshuffle.planning import SERVER
from dshuffle.runtime.messages import CloseOrder, MemberState, to_fields, within
from dshuffle.runtime.scheduler.driver import TICK, MachineDriver
from dshuffle.runtime.scheduler.machine import SessionMachine
from dshuffle.runtime.scheduler.members import Candidates
from dshuffle.runtime.scheduler.participants import Participants
from dshuffle.runtime.scheduler.tasks import have_unfinished_tasks
from dshuffle.runtime.session_spec import SessionSpec

logger = logging.getLogger(__name__)


class Closing:
    """Orders to close one session.

    Parameters
    ----------
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

    async def close(self, addresses: Iterable[str], *, keeps: bool = False) -> set[str]:
        """Close the session on workers, and return those that are in the cluster and did not answer.

        With ``keeps``, they keep their partitions as sources, and only the tasks end.
        """
        present = sorted(self._scheduler.workers.keys() & set(addresses))
        turn = self._turn()
        closed = await asyncio.gather(*(self._is_closed(address, turn, keeps=keeps) for address in present))
        return {
            address for address, done in zip(present, closed, strict=True) if not done
        } & self._scheduler.workers.keys()

    async def close_later(self, late: set[str], *, keeps: bool = False) -> None:
        """Close the session on workers that do not answer, until they do or Dask gives them up as well."""
        while late := await self.close(late, keeps=keeps):
            await asyncio.sleep(self._heartbeat)

    def close_given_up(self, address: str) -> Coroutine[Any, Any, None]:
        """Close the session on a worker that was replaced, if it ever answers, unless it gets a rank again."""
        number = self._turn()  # taken now: the next order may give it a rank

        async def close() -> None:
            while address in self.given_up and address in self._scheduler.workers:
                if await self._is_closed(address, number):
                    return
                await asyncio.sleep(self._heartbeat)

        return close()

    async def _is_closed(self, address: str, number: int, *, keeps: bool = False) -> bool:
        rpc: Any = self._scheduler.rpc(address)
        order = CloseOrder(session_id=self._session_id, number=number, keeps=keeps)
        call = rpc.dshuffle_close(**to_fields(order), cause=ToPickle(self._cause()))
        try:
            await within(self._heartbeat, call)
        except OSError:
            return False
        return True


SETTLING = 0.1
"""Seconds before a search. Workers of one host are lost within a moment, and their rows are then read once for all."""


class Replacements:
    """The search for workers that take the lost ranks of one session.

    Parameters
    ----------
    candidates
        Workers that may take lost ranks.
    machine, driver
        Its state machine, and what drives that.
    closing
        Closes the session on workers that are given up.
    is_followed
        Function that returns whether another session that takes over is open.
    move_tasks
        Function that moves the tasks of ranks to their new workers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        spec: SessionSpec,
        participants: Participants,
        candidates: Candidates,
        machine: SessionMachine,
        driver: MachineDriver,
        closing: Closing,
        is_followed: Callable[[], bool],
        move_tasks: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._spec = spec
        self._participants = participants
        self._candidates = candidates
        self._machine = machine
        self._driver = driver
        self._closing = closing
        self._is_followed = is_followed
        self._move_tasks = move_tasks
        self._refusals: dict[int, str] = {}  # address of the last worker that could not take a lost rank
        self._search: asyncio.Task[None] | None = None

    def search(self) -> None:
        """Find workers for all lost ranks, unless the search is under way."""
        if self._search is None or self._search.done():
            self._search = asyncio.get_running_loop().create_task(self._find_all())

    def refuse(self, rank: int, address: str, *, for_good: bool) -> None:
        """Note that a worker could not take a rank, and whether it never can."""
        self._refusals[rank] = address
        self._candidates.refuse(address, for_good=for_good)

    def drop(self, participant: int) -> None:
        """Go on without a participant that no other worker can replace."""
        words = "dshuffle: no other worker can replace %s; peers send the rows from now on"
        logger.warning(words, self._participants.name_of(participant))
        self._give_up(self._participants.drop(participant))

    async def _find_all(self) -> None:
        await asyncio.sleep(SETTLING)
        while missing := self._machine.missing:
            for participant in sorted(missing, key=SERVER.__eq__):  # ranks first: without them nothing goes on
                try:
                    await self._find(participant)
                except Exception:  # the end of the search would look like a lack of workers
                    words = "dshuffle: the search for another worker for rank %d failed, and goes on"
                    logger.exception(words, participant)
            await asyncio.sleep(TICK)

    async def _find(self, participant: int) -> None:
        if self._stays_vacant(participant):
            return
        machine, addresses = self._machine, self._participants.addresses
        # Not the server beside a lost rank: its worker may answer again.
        members = {addresses[rank] for rank in machine.participants if rank not in machine.missing}
        worker = await self._candidates.find(addresses[participant], members, serves=participant == SERVER)
        if participant not in machine.missing:
            return
        if self._candidates.why_unfit:
            machine.note_unfit(participant, self._candidates.why_unfit)
        if worker is not None:
            kept = await self._has_kept(participant, worker)
            if participant in machine.missing:
                self._join(participant, worker, kept=kept)
        elif self._stops_waiting(participant) or not await self._candidates.may_come(addresses[participant]):
            retired = participant in self._participants.handed_over
            words = "has retired" if retired else "is lost, and no other worker can come"
            logger.warning("dshuffle: %s %s", self._participants.name_of(participant), words)
            self._driver.run(machine.not_replaced, [participant])

    async def _has_kept(self, participant: int, worker: WorkerState) -> bool:
        """Whether a worker is the lost one, and still has the partition of the present epoch.

        Then its tasks go on, and their results count. It was only silent: stopped, or cut from the network. A worker
        that was given up may have an order to close on the way.
        """
        machine = self._machine
        if worker.address != self._participants.addresses[participant] or worker.address in self._closing.given_up:
            return False
        try:
            state = await self._participants.ask(MemberState, "status", participant)
        except DShuffleError as error:
            logger.debug("dshuffle: %s does not say what it has: %s", worker.address, error)
            return False
        return state.open and state.epoch is not None and state.epoch == machine.epoch

    def _stops_waiting(self, participant: int) -> bool:
        """Whether another session follows at once, with the workers that are left."""
        if not self._spec.options.elastic:
            return False
        # A worker that retires stays only for a moment, in which others can read its partition.
        if participant in self._participants.handed_over:
            return True
        # Before its first epoch, a session that follows another one is opened again with the workers that are left.
        former = self._spec.former
        return former is not None and not former.kept and self._machine.epoch < self._machine.first_epoch

    def _stays_vacant(self, participant: int) -> bool:
        """Whether the rank of a retired worker needs no other worker, because another session follows.

        That session reads the rows from the retired worker. They would be sent twice if another worker took the rank.
        """
        machine = self._machine
        if not self._spec.options.elastic or participant == SERVER:
            return False
        if machine.epoch < machine.first_epoch or machine.client_waits:
            return False
        now = asyncio.get_running_loop().time()
        # A session that does not follow yet is expected for a moment only.
        if not self._participants.has_retired(participant, now, recently=not self._is_followed()):
            return False
        # Tasks that are left need the partition. Those of other lost ranks count: all ranks are restored together.
        return not have_unfinished_tasks(machine.unsettled, self._spec.session_id, self._scheduler)

    def _join(self, participant: int, worker: WorkerState, *, kept: bool) -> None:
        """Let a worker take a lost rank; ``kept`` if it still has the partition."""
        machine, addresses = self._machine, self._participants.addresses
        before = addresses[participant]
        words = self._joining_words(participant, worker.address)
        logger.warning("dshuffle: %s %s", self._participants.name_of(participant), words)
        members = {addresses[rank] for rank in machine.participants if rank not in machine.missing}
        if before != worker.address and before not in {*members, *self._participants.retired}:
            self._give_up(before)
        self._closing.given_up.discard(worker.address)
        for member, address in list(addresses.items()):
            beside = address == before and member not in machine.participants  # a server beside the rank
            if member == participant or beside:
                self._participants.move(member, worker.address)
        self._candidates.remember(worker)
        self._driver.run(machine.replaced, participant, kept=kept)
        self._move_tasks()

    def _joining_words(self, participant: int, address: str) -> str:
        """How a worker takes a lost rank, for the log."""
        refused = self._refusals.pop(participant, None) == address
        if address != self._participants.addresses[participant]:
            return f"is replaced by {address}"
        return "could not take the rank before, and tries again" if refused else "answers again"

    def _give_up(self, address: str) -> None:
        """Free a worker that was replaced. It may be stopped, and answer later."""
        if address in self._scheduler.workers:
            self._closing.given_up.add(address)
            self._driver.spawn(self._closing.close_given_up(address))
