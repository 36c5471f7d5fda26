"""Where the participants of a session are, what they hold, and how orders reach them."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from distributed import Scheduler

from dshuffle.errors import WorkerLost
from dshuffle.planning import SERVER, name_of
from dshuffle.runtime.orders import Together
from dshuffle.runtime.replies import message_in, within
from dshuffle.runtime.session_spec import PartitionSources, SessionSpec, adopted_id

T = TypeVar("T")

logger = logging.getLogger(__name__)

CHOSEN_WITHIN = 3.0
"""Seconds for which a worker that closes waits until another one is chosen to read its partition."""

FOLLOWED_WITHIN = 1.5
"""Seconds in which a client is expected to open another session after a worker has retired; below CHOSEN_WITHIN."""


class ParticipantUnreachable(WorkerLost):
    """A participant does not answer. It may be lost without anybody having noticed, or busy."""


class Participants:
    """The workers of one session.

    Parameters
    ----------
    scheduler
        The Dask scheduler, used for its comms.
    spec
        The session, as it was opened.
    adopted
        Function that returns the ranks whose workers have another rank as well.
    """

    def __init__(self, scheduler: Scheduler, spec: SessionSpec, adopted: Callable[[], Collection[int]]) -> None:
        self.addresses = dict(spec.addresses)
        self._moved: set[int] = set()  # participants that were at another address
        self._packed: bytes | None = None  # the session as all open it together, while nobody moves
        self._snapshot: dict[int, str] | None = None
        self._substitutes: dict[tuple[str, str], str] = {}  # (load, late reader) -> who reads in its place
        self.handed_over: dict[int, tuple[str, str]] = {}  # partitions of workers that retire, until they are taken
        self.retired: dict[str, float] = {}  # when workers have begun to close
        self._scheduler = scheduler
        self._spec = spec
        self._adopted = adopted

    def move(self, participant: int, address: str) -> None:
        """Note that another worker is a participant from now on."""
        if self.retired.pop(address, None) is not None:  # it is a new one, at the address of one that has closed
            self.forget(address)
        self.addresses[participant] = address
        self._moved.add(participant)
        self._packed = self._snapshot = None

    def drop(self, participant: int) -> str:
        """Forget a participant, and return where it was."""
        self._packed = self._snapshot = None
        return self.addresses.pop(participant)

    @property
    def snapshot(self) -> dict[int, str]:
        """The addresses at this moment: one object until somebody moves, so that many epochs can keep it."""
        if self._snapshot is None:
            self._snapshot = dict(self.addresses)
        return self._snapshot

    @property
    def moved(self) -> dict[int, str]:
        """Addresses of the participants that are not where they were when the session was opened."""
        return {participant: self.addresses[participant] for participant in self._moved & self.addresses.keys()}

    def name_of(self, participant: int) -> str:
        """Name and address of a participant."""
        return f"{name_of(participant)} ({self.addresses.get(participant, 'gone')})"

    def ranks_on(self, address: str) -> list[int]:
        """Ranks that a worker has."""
        return [rank for rank, holder in self.addresses.items() if holder == address and rank != SERVER]

    def session_id(self, participant: int) -> str:
        """Id of the session on the worker of a participant."""
        session_id = self._spec.session_id
        return adopted_id(session_id, participant) if participant in self._adopted() else session_id

    def retires(self, address: str, settled: Iterable[int], now: float) -> None:
        """Note that a worker closes, and that its partitions can be read for a while."""
        self.retired.setdefault(address, now)
        held = set(self.ranks_on(address)) & set(settled)
        self.handed_over |= {rank: (address, self.session_id(rank)) for rank in held}

    def is_read(self, address: str, missing: Collection[int], now: float) -> bool:
        """Whether a worker that closes must stay, because another worker reads its partitions or may soon do so.

        ``missing`` are the ranks for which no other worker has been chosen yet.
        """
        ranks = [rank for rank, (holder, _) in self.handed_over.items() if holder == address]
        if any(rank not in missing for rank in ranks):  # the worker that was chosen reads the partition
            return True
        return bool(ranks) and now < self.retired[address] + CHOSEN_WITHIN

    def has_retired(self, rank: int, now: float, *, recently: bool) -> bool:
        """Whether the worker of a rank has begun to close; with ``recently``, whether that was a moment ago."""
        since = self.retired.get(self.addresses[rank])
        return since is not None and (not recently or now < since + FOLLOWED_WITHIN)

    def forget(self, address: str) -> None:
        """Note that the partitions of a worker that closes cannot be read any longer."""
        self.handed_over = {rank: holder for rank, holder in self.handed_over.items() if holder[0] != address}

    def partitions(self, epoch: int, settled: Iterable[int]) -> PartitionSources:
        """The partitions of an epoch, for a session that takes over."""
        holders = {rank: (self.addresses[rank], self.session_id(rank)) for rank in settled if rank != SERVER}
        return PartitionSources(epoch, {**self.handed_over, **holders}, self._spec.shuffle)

    def together(self, ranks: Collection[int]) -> Together:
        """Who loads together if these ranks do: others read the store for them."""
        readers = {address: None for rank, address in sorted(self.addresses.items()) if rank not in ranks}
        by_rank = [rank for rank in sorted(ranks) if rank != SERVER]
        without_server = [address for address in readers if self.ranks_on(address)]
        return Together(ranks=by_rank, readers=without_server or list(readers))

    def reader_for(self, load: str, address: str, missing: Collection[int], reason: str) -> str:
        """The worker that reads in place of one that is late or lost, the same for all who load together.

        Raises
        ------
        WorkerLost
            If no other worker is left.
        """
        if (load, address) not in self._substitutes:
            lost = {self.addresses[rank] for rank in missing if rank in self.addresses}
            late = {late for name, late in self._substitutes if name == load} | {address}
            busy = Counter(reader for (name, _), reader in self._substitutes.items() if name == load)
            others = [self.addresses[rank] for rank in sorted(self.addresses) if rank != SERVER]
            left = [other for other in others if other not in lost | late]
            if not left:
                raise WorkerLost(f"{address} cannot read the store ({reason}), and no other worker can", transient=True)
            chosen = min(left, key=lambda other: busy[other])
            logger.warning("dshuffle: %s reads the store in place of %s (%s)", chosen, address, reason)
            self._substitutes[load, address] = chosen
        return self._substitutes[load, address]

    def packed_spec(self, participant: int, epoch: int | None) -> bytes:
        """The session, as a participant opens it, and as it is sent. See :meth:`spec_of`.

        It has the addresses of all participants. So it is packed once for all that open the session together.
        """
        if epoch is not None or participant in self._adopted():
            return self.spec_of(participant, epoch).packed()
        if self._packed is None:
            self._packed = self.spec_of(participant, None).packed()
        return self._packed

    def spec_of(self, participant: int, epoch: int | None) -> SessionSpec:
        """The session, as a participant opens it.

        ``epoch`` is that of the partition which it reads; None if it opens the session together with all others.
        """
        spec = dataclasses.replace(self._spec, addresses=dict(self.addresses))
        if epoch is not None:
            holder = self.handed_over.get(participant)
            spec = dataclasses.replace(
                spec, former=None if holder is None else PartitionSources(epoch, {participant: holder})
            )
        if participant in self._adopted():
            alone = {participant: self.addresses[participant]}  # it takes part in no exchange
            spec = dataclasses.replace(spec, session_id=self.session_id(participant), addresses=alone)
        return spec

    async def request(self, order: str, participant: int, message: dict[str, Any]) -> Any:
        """Send an order, and return the answer."""
        if order not in ("open", "restore"):
            message["session_id"] = self.session_id(participant)
        order = "open" if order == "restore" else order
        return await getattr(self._scheduler.rpc(self.addresses[participant]), f"dshuffle_{order}")(**message)

    async def ask(self, kind: type[T], order: str, participant: int, **message: Any) -> T:
        """Send an order that is not part of an epoch, and return the message in the reply.

        It must be answered within a heartbeat.

        Raises
        ------
        ParticipantUnreachable
            If the participant does not answer.
        """
        try:
            reply = await within(self._spec.settings.heartbeat, self.request(order, participant, message))
        except OSError as error:
            words = f"{self.name_of(participant)} cannot be reached ({type(error).__name__}: {error})"
            raise ParticipantUnreachable(words) from error
        return message_in(reply, kind, self.name_of(participant))
