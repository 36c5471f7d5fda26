"""Where the participants of a session are, what they measured, and the delivery of each epoch."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from distributed import Scheduler

from dshuffle.errors import WorkerLost
from dshuffle.planning import SERVER, AutoDelivery, ExchangeEpochs, get_delivery, name_of
from dshuffle.records import Measures
from dshuffle.runtime.messages import EpochExchange, Report, Together, TrainingTime, message_in, within
from dshuffle.runtime.scheduler.machine import ATTEMPTS, Totals
from dshuffle.runtime.scheduler.machine_state import Run
from dshuffle.runtime.session_spec import PartitionSources, SessionSpec

logger = logging.getLogger(__name__)


T = TypeVar("T")


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
    """

    def __init__(self, scheduler: Scheduler, spec: SessionSpec) -> None:
        self.session_id = spec.session_id
        self.addresses = dict(spec.addresses)
        self._moved: set[int] = set()  # participants that were at another address
        self._packed: bytes | None = None  # the session as all open it together, while nobody moves
        self._snapshot: dict[int, str] | None = None
        self._substitutes: dict[tuple[str, str], str] = {}  # (load, late reader) -> who reads in its place
        self.handed_over: dict[int, tuple[str, str]] = {}  # partitions of workers that retire, until they are taken
        self.retired: dict[str, float] = {}  # when workers have begun to close
        self._scheduler = scheduler
        self._spec = spec

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

    @property
    def places(self) -> dict[str, int]:
        """Rank of every worker that trains, by address."""
        return {address: rank for rank, address in self.addresses.items() if rank != SERVER}

    def retires(self, address: str, settled: Iterable[int], now: float) -> None:
        """Note that a worker closes, and that its partitions can be read for a while."""
        self.retired.setdefault(address, now)
        held = [rank for rank in settled if rank != SERVER and self.addresses[rank] == address]
        self.handed_over |= dict.fromkeys(held, (address, self.session_id))

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
        holders = {rank: (self.addresses[rank], self.session_id) for rank in settled if rank != SERVER}
        return PartitionSources(epoch, {**self.handed_over, **holders}, self._spec.shuffle)

    def together(self, ranks: Collection[int]) -> Together:
        """Who loads together if these ranks do: others read the store for them."""
        readers = {address: None for rank, address in sorted(self.addresses.items()) if rank not in ranks}
        by_rank = [rank for rank in sorted(ranks) if rank != SERVER]
        places = self.places
        without_server = [address for address in readers if address in places]  # in the same order on all workers
        return Together(ranks=by_rank, readers=without_server or list(readers))

    def reader_for(self, load: str, address: str, missing: Collection[int], reason: str) -> str:
        """The worker that reads in place of one that is late or lost, the same for all who load together."""
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
        if epoch is not None:
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
        return spec

    async def request(self, order: str, participant: int, message: dict[str, Any]) -> Any:
        """Send an order, and return the answer."""
        if order not in ("open", "restore"):
            message["session_id"] = self.session_id
        order = "open" if order == "restore" else order
        return await getattr(self._scheduler.rpc(self.addresses[participant]), f"dshuffle_{order}")(**message)

    async def ask(self, kind: type[T], order: str, participant: int, **message: Any) -> T:
        """Send an order that is not part of an epoch, and return the message in the reply.

        It must be answered within a heartbeat.
        """
        try:
            reply = await within(self._spec.settings.heartbeat, self.request(order, participant, message))
        except OSError as error:
            words = f"{self.name_of(participant)} cannot be reached ({type(error).__name__}: {error})"
            raise ParticipantUnreachable(words) from error
        return message_in(reply, kind, self.name_of(participant))


class EpochDeliveries:
    """The delivery of each epoch. It is chosen once, because a retry may find the epoch already planned.

    Parameters
    ----------
    auto
        Chooses a delivery from the times of those before.
    first_epoch
        Number of the first epoch. It is read from the store, whatever its delivery.
    exchanges
        Which epochs have an exchange. The others have the delivery of the next one, and say nothing about its time.
    """

    def __init__(self, auto: AutoDelivery, first_epoch: int, exchanges: ExchangeEpochs) -> None:
        self._auto = auto
        self._first_epoch = first_epoch
        self._exchanges = exchanges
        self._chosen: dict[int, str] = {}
        self._has_server = True

    def lose_server(self) -> None:
        """Use deliveries that need no server from now on."""
        self._has_server = False

    def of(self, epoch: int) -> str:
        """Delivery of an epoch."""
        if epoch not in self._chosen:
            self._chosen = {planned: name for planned, name in self._chosen.items() if planned >= epoch - 2}
            self._chosen[epoch] = self._auto.choose()
        name = self._chosen[epoch]
        return name if self._has_server else get_delivery(name).without_server

    def of_run(self, run: Run) -> str:
        """Delivery of a run. The last attempt at an epoch may use another one."""
        name = self.of(run.epoch)
        last = run.epoch != self._first_epoch and run.attempt == ATTEMPTS
        return get_delivery(name).last_resort if last else name

    def observe(self, run: Run) -> None:
        """Note how long a run took. Repeated runs do not count, because they may have less to receive."""
        if not self._exchanges.has_exchange(run.epoch):
            return
        chosen = self._chosen.get(run.epoch)
        if run.epoch != self._first_epoch and run.attempt == 1 and chosen is not None and chosen == self.of(run.epoch):
            self._auto.observe(chosen, run.ready_after)


CPU_BOUND = 0.2
"""With a smaller share of idle processors, the time of an exchange says nothing about the links."""

TIMED_NBYTES = 256 * 2**10
"""Bytes that a worker must have received for its rate to say something about its link."""

NOTHING = Report(measures=Measures(wire_sent_bytes=(0,), wire_received_bytes=(0,)))
"""The report of a participant that was lost."""


@dataclass(frozen=True, slots=True)
class Reports:
    """What participants reported with a commit: measurements of each and of all, and times of training."""

    measured: list[Measures]
    measures: Measures
    training: list[TrainingTime]


def combined_reports(reports: Mapping[int, Report], participants: Iterable[int]) -> Reports:
    """Combine the reports with a commit, in the order of the participants. One that was lost has measured nothing."""
    in_order = [reports.get(participant, NOTHING) for participant in participants]
    measured = [report.measures for report in in_order]
    return Reports(measured, Measures.combined(measured), [report.training for report in in_order])


def next_rate(before: float | None, measured: float | None) -> float | None:
    """The rate for the next exchange. It falls by half at most, so that one slow exchange does not decide."""
    if before is None or measured is None:
        return measured or before
    return measured if math.isinf(before) else max(measured, before / 2)


def rate_of(measured: Iterable[Measures], cpu_idle: float) -> float | None:
    """Median rate of messages into a worker, in bytes per second; None if next to nothing was sent.

    If processors were the limit, links may be faster, and messages should be long: each of them costs processor time.
    """
    rates = [
        sum(measures.wire_received_bytes) / measures.transfer_seconds
        for measures in measured
        if sum(measures.wire_received_bytes) > TIMED_NBYTES and measures.transfer_seconds > 0
    ]
    if not rates:
        return None
    return statistics.median(rates) if cpu_idle >= CPU_BOUND else math.inf


KEPT = 200
"""Epochs that a session keeps measurements of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """What one participant received from another one in an exchange, from its first request to the last answer."""

    receiver: str
    sender: str
    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds if self.seconds else 0.0


class ExchangeLog:
    """The last exchanges of a session.

    Parameters
    ----------
    participants
        The workers of the session.
    """

    def __init__(self, participants: Participants, n_workers: int) -> None:
        self.exchanges: deque[EpochExchange] = deque(maxlen=KEPT)
        self.links: tuple[LinkFigures, ...] = ()  # of the last exchange
        self.n_held: dict[int, int] = {}  # samples that each rank holds
        self.rate: float | None = None  # of links into workers, in bytes per second
        self.client_asked = 0.0  # when the client began to wait for the epoch
        self._participants = participants
        self._n_workers = n_workers

    def add(
        self, run: Run, reports: Mapping[int, Report], participants: tuple[int, ...], delivery: str
    ) -> EpochExchange:
        """Add the exchange of a run, from the reports of the participants that have swapped to its epoch."""
        combined = combined_reports(reports, participants)
        self.links = tuple(
            LinkFigures(receiver=name_of(receiver), sender=name_of(sender), nbytes=nbytes, seconds=seconds)
            for receiver, report in sorted(reports.items())
            for sender, (nbytes, seconds) in sorted(report.links.items())
        )
        self.n_held = {rank: report.held for rank, report in reports.items() if rank != SERVER}
        if not get_delivery(delivery).needs_server:
            self.rate = next_rate(self.rate, rate_of(combined.measured, combined.measures.cpu_idle))
        totals = Totals.of(run.votes.values())
        exchange = EpochExchange(
            epoch=run.epoch,
            run_id=run.run_id,
            delivery=delivery,
            needed=totals.needed,
            packets=totals.packets,
            components=totals.expected,
            exchange_seconds=run.ready_after,
            waited_seconds=max(0.0, run.started + run.ready_after - self.client_asked),
            measures=combined.measures,
            addresses=self._participants.snapshot,
            training_before=tuple(combined.training[: self._n_workers]),
        )
        self.exchanges.append(exchange)
        return exchange
