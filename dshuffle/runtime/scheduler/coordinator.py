"""A session on the scheduler: its machine gets events, and its instructions are carried out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from distributed import Scheduler
from distributed.metrics import time
from distributed.protocol.serialize import ToPickle, to_serialize

from dshuffle.errors import ClusterError, DatasetChanged, DShuffleError, WorkerLost
from dshuffle.planning import SERVER, AutoDelivery, get_delivery, name_of
from dshuffle.planning.remainder import SampleDigest
from dshuffle.runtime.messages import (
    Answer,
    CommitReply,
    EpochExchange,
    MemberChanges,
    MemberState,
    OpenOrder,
    TaskPlace,
    Together,
    TrainedSamples,
    TrainingTime,
    Vote,
    from_fields,
    message_in,
    place_of_key,
    retrieve,
    to_fields,
    within,
)
from dshuffle.runtime.scheduler import machine as instructions
from dshuffle.runtime.scheduler.machine import ATTEMPTS, STATUS, Instruction, PhaseOrder, Run, SessionMachine
from dshuffle.runtime.scheduler.members import Candidates, member_changes, process_runs, server_role
from dshuffle.runtime.scheduler.snapshot import ExchangeLog, SessionSnapshot, snapshot_of
from dshuffle.runtime.session_spec import PartitionSources, SessionRequest, SessionSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")

TICK = 0.5
"""Seconds between looks at the clock while participants owe answers, and between two searches for other workers."""

SETTLING = 0.1
"""Seconds before a search. Workers of one host are lost within a moment, and their rows are then read once for all."""


class EpochDeliveries:
    """The delivery of each epoch. It is chosen once, because a retry may find the epoch already planned.

    ``auto`` chooses a delivery from the times of those before. The first epoch is read from the store, whatever its
    delivery. Epochs without an exchange have the delivery of the next one, and say nothing about its time.
    """

    def __init__(self, auto: AutoDelivery, spec: SessionSpec) -> None:
        self.has_server = True
        self._auto = auto
        self._first_epoch = spec.shuffle.first_epoch
        self._exchanges = spec.shuffle.choices.exchange_epochs
        self._chosen: dict[int, str] = {}

    def of(self, epoch: int) -> str:
        """Delivery of an epoch."""
        if epoch not in self._chosen:
            self._chosen = {planned: name for planned, name in self._chosen.items() if planned >= epoch - 2}
            self._chosen[epoch] = self._auto.choose()
        name = self._chosen[epoch]
        return name if self.has_server else get_delivery(name).without_server

    def of_run(self, run: Run) -> str:
        """Delivery of a run. The last attempt at an epoch may use another one."""
        name = self.of(run.epoch)
        is_last = run.epoch != self._first_epoch and run.attempt == ATTEMPTS
        return get_delivery(name).last_resort if is_last else name

    def observe(self, run: Run) -> None:
        """Note how long a run took. Repeated runs do not count, because they may have less to receive."""
        name, is_first = self.of(run.epoch), run.epoch == self._first_epoch
        counts = run.attempt == 1 and not is_first and self._exchanges.has_exchange(run.epoch)
        if counts and name == self._chosen[run.epoch]:
            self._auto.observe(name, run.ready_after)


UNFIT_FOR = 5.0
"""Seconds for which a worker that could not take a lost rank is not asked again."""

VACANT_FOR = 10.0
"""Seconds for which the rank of a worker that retires stays vacant. Later its rows may be gone with the worker."""


class Coordinator:
    """Gives the :class:`SessionMachine` of one session its events, and carries out its instructions.

    It calls ``move_tasks`` with itself when another worker takes a lost rank, and again when that holds the partition.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        spec: SessionSpec,
        client_id: str,
        deliveries: AutoDelivery,
        move_tasks: Callable[[Coordinator], None] = lambda _: None,
    ) -> None:
        self.scheduler = scheduler
        self.spec = spec
        self.client_id = client_id
        self.client_reconnected = False  # whether its client has connected again since the session was opened
        self.follower: Coordinator | None = None  # of a session that takes over from this one
        self.source: Coordinator | None = None  # of a session whose partitions this one reads
        self.is_source = False  # whether it has ended, and its workers keep their partitions for a session that follows
        self.client_left = False  # whether the client has closed it since then
        self.outcomes: dict[TaskPlace, str] = {}  # what became of tasks, from the current epoch on
        self.ranks = range(spec.shuffle.n_workers)
        self.tasks: set[asyncio.Task[Any]] = set()  # coroutines that end with the session
        self._loop = asyncio.get_running_loop()
        self.addresses = dict(spec.addresses)  # replaced when somebody moves, so that many epochs can keep it
        self.handed_over: dict[int, str] = {}  # workers that retire, until their partitions are taken
        self.vacant_until = 0.0  # their ranks need no other worker, because another session follows
        self._moved: set[int] = set()  # participants that were at another address
        self._packed: bytes | None = None  # the session as all open it together, while nobody moves
        self._substitutes: dict[tuple[str, str], str] = {}  # (load, late reader) -> who reads in its place
        dedicated = server_role(spec.addresses) == "dedicated"
        participants = [participant for participant in self.addresses if participant != SERVER or dedicated]
        settings = spec.settings
        self.machine = SessionMachine(
            participants,
            first_epoch=spec.shuffle.first_epoch,
            heartbeat=settings.heartbeat,
            timeout=settings.timeout,
            name_of=self.name_of,
            replaceable=() if spec.options.on_loss == "raise" else participants,
            replacement_timeout=settings.replacement_timeout,
            optional=[SERVER],
        )
        self.candidates = Candidates(scheduler, spec)
        self.log = ExchangeLog(len(self.ranks))
        self._deliveries = EpochDeliveries(deliveries, spec)
        self._move_tasks = move_tasks
        self._call: asyncio.Future[None] | None = None  # that of the client, which waits
        self._ticking = False
        self._search: asyncio.Task[Any] | None = None
        self._closed_by_client = False
        self._freed: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._fetched = asyncio.Event()  # set once nobody needs the partitions of the ended session any more

    @property
    def ended(self) -> bool:
        """Whether the session has ended."""
        return self.machine.error is not None

    @property
    def cause(self) -> DShuffleError | None:
        """Why the session has ended, unless its client has closed it."""
        return None if self._closed_by_client else self.machine.error

    @property
    def epoch(self) -> int:
        """The epoch that all participants are on."""
        return self.machine.epoch

    # -- calls of the client and of workers ----------------------------------------------------------------------

    async def open(self) -> None:
        """Open the session on all participants."""
        await self._wait(self.machine.open)

    async def begin(self) -> None:
        """Start the next epoch's exchange unless it has already started."""
        self.check()
        self.run(self.machine.begin)

    async def advance(self, epoch: int) -> EpochExchange:
        """Wait for an epoch's exchange, make all participants swap to it, and return the measurements.

        A client that did not receive the answer may ask for the same epoch again. It gets the same answer without
        another swap.
        """
        self.check()
        if epoch != self.epoch:
            if epoch != self.epoch + 1:
                reason = f"the workers cannot move to epoch {epoch}: the next one is {self.epoch + 1}"
                raise ClusterError(reason, transient=False)
            if self._call is None:
                self.log.client_asked = self._loop.time()
            await self._wait(self.machine.advance)
        return self.log.exchanges[-1]

    def vote(self, participant: int, run_id: int, vote: object) -> None:
        """Pass on the vote of a participant on a run."""
        self.run(self.machine.voted, run_id, participant, from_fields(Vote, vote, self.name_of(participant)))

    def alive(self, participant: int, heard: Mapping[int, float]) -> None:
        """Note a sign of life of a participant, and from which others it had bytes some seconds ago."""
        self.machine.now = self._loop.time()
        for sender, seconds in {**heard, participant: 0.0}.items():
            self.machine.alive(sender, max(0.0, seconds))

    async def training_times(self) -> list[TrainingTime]:
        """Time of training since the last commit, by rank. A rank whose worker is lost counts 0."""
        self.check()

        async def of(rank: int) -> TrainingTime:  # once: the worker counts from 0 again
            lost = rank in self.machine.unsettled
            return TrainingTime() if lost else await self.ask(TrainingTime, "training", rank)

        return await asyncio.gather(*map(of, self.ranks))

    async def trained_samples(self) -> TrainedSamples:
        """The current epoch, how many of its samples each rank has trained on, and the digest of all of these."""
        self.check()
        epoch = self.epoch
        digests = await asyncio.gather(*(self._from(rank, SampleDigest, "trained", epoch=epoch) for rank in self.ranks))
        total = SampleDigest.summed(digest.fields for digest in digests)
        return TrainedSamples(epoch=epoch, counts=tuple(digest.count for digest in digests), digest=total)

    async def _from(self, rank: int, kind: type[T], order: str, **message: Any) -> T:
        """What a rank answers; nothing if its worker is lost, whose task runs again."""
        settings, began = self.spec.settings, self._loop.time()
        while rank not in self.machine.unsettled:
            try:
                return await self.ask(kind, order, rank, **message)
            except WorkerLost:  # perhaps nobody has noticed that it is lost, or a task blocks it
                seconds = self._loop.time() - began
                is_late = seconds >= settings.heartbeat
                if is_late and (seconds >= settings.timeout or not await self.process_runs(rank, seconds)):
                    raise
            await asyncio.sleep(TICK)
            self.check()
        return kind()

    def members(self) -> dict[int, str]:
        """Address of every rank, and of the server."""
        return self.addresses

    def membership(self) -> MemberChanges:
        """How the workers of the cluster differ from the members."""
        self.check()
        return member_changes(self.scheduler, self.spec.choice, self.addresses)

    def end_collective(self, address: str, **call: Any) -> None:
        """Fail the ranks that wait for a mean at rank 0. If rank 0 has left this address, nobody waits there."""
        if self.addresses[0] == address:
            self.spawn(self._tell("end_collective", 0, **call))

    def snapshot(self) -> SessionSnapshot:
        """What the session does at this moment."""
        return snapshot_of(self.spec, self.machine, self.log, self.addresses)

    # -- what the plugin asks and says ---------------------------------------------------------------------------

    def silent_tasks(self) -> list[str]:
        """Which members run tasks and have not answered Dask for a heartbeat, in words."""
        reasons, workers = [], self.scheduler.workers
        for rank, address in self.addresses.items():
            silent = time() - workers[address].last_seen if address in workers and workers[address].processing else 0.0
            if silent >= self.spec.settings.heartbeat:
                reasons.append(
                    f"waiting for tasks on {self.name_of(rank)}, which has not answered for {silent:.0f} "
                    "s: it is stopped or cut off, or a task holds Python's global lock"
                )
        return reasons

    def lose(
        self, address: str, reason: str = "has left the cluster and its partition is lost", *, retires: bool = False
    ) -> None:
        """Replace a worker that is lost, or end the session. A worker that retires can still send rows."""
        machine = self.machine
        lost = [participant for participant in machine.participants if self.addresses[participant] == address]
        if retires and self.epoch >= machine.first_epoch and (self.is_source or not self.ended):
            held = [rank for rank in machine.settled if rank != SERVER and self.addresses[rank] == address]
            self.handed_over |= dict.fromkeys(held, address)
            self.vacant_until = self._loop.time() + VACANT_FOR
        self.run(machine.lost, lost, reason)

    def needs(self, address: str) -> bool:
        """Whether another worker still reads the partition of a worker that retires, or may do so soon."""
        former, loads = self.spec.former, self.epoch < self.machine.first_epoch and not self.machine.is_ready
        if not self.ended and former and loads and any(holder == address for holder, _ in former.holders.values()):
            return True
        follows = self.follower is not None and not self.follower.ended  # then the follower says what it needs
        if follows or address not in self.handed_over.values():
            return False
        # A worker does not wait for a session that may never come.
        return not self.ended or (self.is_source and self.spec.options.elastic and not self.client_left)

    def kept_workers(self) -> list[str]:
        """Workers that an adaptive cluster must not remove now."""
        addresses, workers = self.addresses, self.scheduler.workers
        if not self.spec.options.elastic or self.machine.busy:
            return list(addresses.values())
        fewest = self.spec.options.min_workers
        trains = {address for address in addresses.values() if address in workers and workers[address].processing}
        return [address for participant, address in addresses.items() if participant < fewest or address in trains]

    def partitions(self) -> PartitionSources | None:
        """The partitions on the workers, for a session that takes over; None if there are none."""
        if self.epoch < self.machine.first_epoch or (self.ended and not self.is_source):
            return None
        places = {rank: self.addresses[rank] for rank in self.machine.settled if rank != SERVER}
        present = {rank: address for rank, address in places.items() if address in self.scheduler.workers}
        holders = {rank: (address, self.spec.session_id) for rank, address in (self.handed_over | present).items()}
        return PartitionSources(self.epoch, holders, self.spec.shuffle) if holders or not self.ended else None

    def can_be_read_by(self, request: SessionRequest) -> bool:
        """Whether the session has ended, and its partitions have the rows of the requested one."""
        own, other = self.spec.dataset, request.dataset
        return self.is_source and (own.identity, own.layout) == (other.identity, other.layout)

    def end(self, error: DShuffleError) -> None:
        """End the session, raise the error in all current and future calls, and free the workers that are left."""
        self.run(self.machine.close, error)

    async def close(self) -> None:
        """Close the session on all participants that are still in the cluster, also if they keep partitions."""
        self._closed_by_client = self._closed_by_client or not self.ended
        self.end(ClusterError("this session has been closed", transient=False))
        self.release()
        await self.freed()

    def release(self) -> None:
        """Free the partitions of an ended session, which are not needed as sources any more."""
        self.is_source = False
        self._fetched.set()

    async def freed(self) -> None:
        """Wait until an ended session is closed on all workers that answer."""
        if self._freed is not None:
            await asyncio.shield(self._freed)

    async def process_runs(self, participant: int, silent_seconds: float) -> bool:
        """Whether a participant that has said nothing for some seconds may be busy, and is not lost."""
        worker = self.scheduler.workers.get(self.addresses[participant])
        return worker is not None and await process_runs(self.scheduler, worker, silent_seconds, self.spec.settings)

    def check(self) -> None:
        """Raise the error with which the session has ended."""
        if self.machine.error is not None:
            raise self.machine.error

    # -- what drives the machine ---------------------------------------------------------------------------------

    def run(self, method: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Call a method of the machine, and carry out the instructions that follow."""
        machine = self.machine
        machine.now = self._loop.time()
        try:
            method(*arguments, **options)
            self._carry_out_told()
        except Exception as error:  # a bug: nobody must wait for what does not come
            logger.exception("dshuffle: session %s failed", self.spec.session_id)
            machine.close(ClusterError(f"{type(error).__name__}: {error}"))
            self._carry_out_told()
        if machine.busy and not self._ticking:
            self._ticking = True
            # Time does not count as silence where looks are further apart than a third of the heartbeat.
            self._loop.call_later(min(TICK, machine.heartbeat / 6), self._tick)

    def _carry_out_told(self) -> None:
        told, self.machine.told = self.machine.told, []
        for instruction in told:
            self._carry_out(instruction)

    def _tick(self) -> None:
        self._ticking = False
        self.run(self.machine.tick)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine until it ends, or the session does."""
        task = self._loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _wait(self, method: Callable[..., None]) -> None:
        """Give the machine an event, and wait for the end of the phases that follow."""
        if self._call is None:
            self._call = self._loop.create_future()
            self._call.add_done_callback(retrieve)  # also if nobody waits any more
        call = self._call
        self.run(method)
        await asyncio.shield(call)

    def _answer_client(self, error: Exception | None = None) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.set_result(None) if error is None else call.set_exception(error)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case PhaseOrder():
                self.spawn(self._send(instruction))
            case instructions.CallEnded(error):
                self._answer_client(error)
            case instructions.RunReady(run):
                self._deliveries.observe(run)
                # Not earlier: planning would take cores from participants that are still exchanging.
                plan = {"run_id": run.run_id, "delivery": self._deliveries.of(run.epoch + 1)}
                for participant in self.machine.participants:
                    self.spawn(self._tell("plan_ahead", participant, **plan))
            case instructions.EpochCommitted(run, reports):
                source, self.source = self.source, None
                if source is not None and source.ended:
                    source.release()
                delivery = self._deliveries.of_run(run)
                self.log.add(run, reports, self.machine.participants, delivery, self.addresses)
                self.outcomes = {place: what for place, what in self.outcomes.items() if place.epoch >= run.epoch}
                self._answer_client()
            case instructions.ProcessQuestion():
                self.spawn(self._look_at_process(instruction))
            case instructions.ReplacementSearch():
                if self._search is None or self._search.done():
                    self._search = self.spawn(self._find_all())
            case instructions.RanksRestored(ranks):
                for rank in ranks:
                    self.handed_over.pop(rank, None)
                self._move_tasks(self)
            case instructions.ParticipantDropped(participant):
                words = "dshuffle: no other worker can replace %s; peers send the rows from now on"
                logger.warning(words, self.name_of(participant))
                self._deliveries.has_server = False
                self._close_on({self.addresses[participant]})
                self._packed = None
                self.addresses = {each: place for each, place in self.addresses.items() if each != participant}
            case instructions.SessionEnded(error):
                for task in self.tasks:
                    task.cancel()
                self._answer_client(error)
                # Kept partitions are read from disks.
                is_lost = isinstance(error, WorkerLost) and self.epoch >= self.machine.first_epoch
                self.is_source = is_lost and bool(self.machine.losses) and not self.spec.options.keep_cache
                if self.machine.losses:  # a worker that is stopped never ends its tasks
                    self._loop.call_soon(self._move_tasks, self)
                self._freed = self._loop.create_task(self._free())

    async def _send(self, order: PhaseOrder) -> None:
        """Send an order, and give the machine the answer."""
        machine, participant, name = self.machine, order.participant, order.name
        message, address = self._message_of(order), self.addresses[participant]
        if message is None:
            return
        kind: type[Answer] = {STATUS: MemberState, "commit": CommitReply}.get(name, type(None))
        try:
            call = self.request("open" if name == "restore" else name, participant, message)
            # Questions to a worker that does not answer must not pile up.
            reply = await (within(machine.heartbeat, call) if name == STATUS else call)
            answer = message_in(reply, kind, self.name_of(participant))
        except WorkerLost as error:  # it closes, or has lost its partition
            if machine.is_due(order):
                self.lose(address, f"is lost ({error})")
        except DShuffleError as error:  # before OSError: some are both
            self._refused(order, address, error.raised_by(self.name_of(participant)))
        except OSError as error:
            if name != STATUS:
                machine.unreachable(order, f"{type(error).__name__}: {error}")
        except Exception as error:  # whatever it is, the session must not wait for an answer
            words = f"{self.name_of(participant)}: {type(error).__name__}: {error}"
            self._refused(order, address, ClusterError(words))
        else:
            self.run(machine.answered, order, answer)

    def _message_of(self, order: PhaseOrder) -> dict[str, Any] | None:
        """The message of an order; None if its run has ended."""
        machine, participant, run_id = self.machine, order.participant, order.run_id
        session: dict[str, Any] = {"session_id": self.spec.session_id}
        match order.name:
            case "open" | "restore":
                message = OpenOrder(number=order.turn)
                if order.name == "restore":
                    message = OpenOrder(
                        number=order.turn,
                        last_run=run_id,
                        restore=True,
                        epoch=machine.epoch if machine.epoch >= machine.first_epoch else None,
                        digest=machine.digests.get(participant),
                        together=self.together(machine.newcomers),
                    )
                spec = to_serialize(self.packed_spec(participant, message.epoch))  # as a frame, which is not copied
                return {**to_fields(message), "spec": spec}
            case "members":
                # Of all that have moved since the session was opened: others may not have heard of some.
                moved = {each: self.addresses[each] for each in self._moved & self.addresses.keys()}
                return {**session, "addresses": moved, "number": order.turn}
            case "begin":
                run = machine.run
                if run is None or run.run_id != run_id:
                    return None
                delivery = self._deliveries.of_run(run)
                return {**session, "run_id": run_id, "epoch": run.epoch, "delivery": delivery, "rate": self.log.rate}
            case "status":
                return session
            case _:
                return {**session, "run_id": run_id}

    async def _look_at_process(self, question: instructions.ProcessQuestion) -> None:
        if await self.process_runs(question.participant, question.silent_seconds):
            self.run(self.machine.note_running, question)

    def _refused(self, order: PhaseOrder, address: str, error: DShuffleError) -> None:
        if order.name == "restore":
            logger.warning("dshuffle: a worker cannot take a lost rank: %s", error)
            forever = isinstance(error, DatasetChanged)
            self.candidates.refused[address] = math.inf if forever else self._loop.time() + UNFIT_FOR
        self.run(self.machine.refused, order, error)

    async def _tell(self, order: str, participant: int, **message: Any) -> None:
        """Send an order whose loss is harmless."""
        try:
            await self.ask(type(None), order, participant, **message)
        except DShuffleError as error:  # its worker or the call has ended; the next run plans its epoch itself
            logger.debug("dshuffle: %s could not be told to %s: %s", order, self.name_of(participant), error)

    # -- other workers take lost ranks -----------------------------------------------------------------------------

    async def _find_all(self) -> None:
        await asyncio.sleep(SETTLING)
        while missing := self.machine.missing:
            for participant in sorted(missing, key=SERVER.__eq__):  # ranks first: without them nothing goes on
                try:
                    await self._find(participant)
                except Exception:  # the end of the search would look like a lack of workers
                    words = "dshuffle: the search for another worker for rank %d failed, and goes on"
                    logger.exception(words, participant)
            await asyncio.sleep(TICK)

    async def _find(self, participant: int) -> None:
        machine, lost = self.machine, self.addresses[participant]
        elastic, retired = self.spec.options.elastic, participant in self.handed_over
        vacant = elastic and retired and self._loop.time() < self.vacant_until
        # Another session follows, and reads the rows from the retired worker, unless tasks are left that need them. All
        # ranks are restored together, so those of other ranks count.
        if vacant and not machine.client_waits and not self._has_tasks(machine.unsettled):
            return
        # Not the server beside a lost rank: its worker may answer again.
        members = {self.addresses[rank] for rank in machine.participants if rank not in machine.missing}
        worker = await self.candidates.find(lost, members, serves=participant == SERVER)
        if participant not in machine.missing:
            return
        if worker is not None:
            words = "answers again" if worker.address == lost else f"is replaced by {worker.address}"
            logger.warning("dshuffle: %s %s", self.name_of(participant), words)
            if worker.address != lost and lost not in members and lost not in self.handed_over.values():
                self._close_on({lost})  # it may be stopped, and answer later
            for member, address in self.addresses.items():
                beside = address == lost and member not in machine.participants  # a server beside the rank
                if member == participant or beside:
                    self.move(member, worker.address)
            self.candidates.members[worker.address] = worker
            self.run(machine.replaced, participant)
            self._move_tasks(self)
            return
        # Another session follows at once, with the workers that are left. A worker that retires stays only for a
        # moment. A session that follows another one is opened again before its first epoch.
        former = self.spec.former
        follows = former is not None and not former.kept and self.epoch < machine.first_epoch
        if (elastic and (retired or follows)) or not await self.candidates.may_come(lost):
            words = "has retired" if retired else "is lost, and no other worker can come"
            logger.warning("dshuffle: %s %s", self.name_of(participant), words)
            self.run(machine.not_replaced, [participant])

    def _has_tasks(self, ranks: Collection[int]) -> bool:
        """Whether a task of some ranks waits or runs."""
        return any(
            (place := place_of_key(key)) and place.session_id == self.spec.session_id and place.rank in ranks
            for key, task in self.scheduler.tasks.items()
            if task.state in ("waiting", "queued", "no-worker", "processing")
        )

    # -- where the participants are, and what they are asked -----------------------------------------------------

    def move(self, participant: int, address: str) -> None:
        """Note that another worker is a participant from now on."""
        self.forget(address)  # of one that has closed, and had the same address
        self.addresses = self.addresses | {participant: address}
        self._moved.add(participant)
        self._packed = None

    def name_of(self, participant: int) -> str:
        """Name and address of a participant."""
        return f"{name_of(participant)} ({self.addresses.get(participant, 'gone')})"

    @property
    def places(self) -> dict[str, int]:
        """Rank of every worker that trains, by address."""
        return {address: rank for rank, address in self.addresses.items() if rank != SERVER}

    def forget(self, address: str) -> None:
        """Note that the partitions of a worker that closes cannot be read any longer."""
        self.handed_over = {rank: holder for rank, holder in self.handed_over.items() if holder != address}

    def together(self, ranks: Collection[int]) -> Together:
        """Who loads together if these ranks do: others read the store for them."""
        others = dict.fromkeys(address for rank, address in sorted(self.addresses.items()) if rank not in ranks)
        places = self.places
        training = [address for address in others if address in places]  # in the same order on all workers
        return Together(ranks=[rank for rank in sorted(ranks) if rank != SERVER], readers=training or list(others))

    def substitute_reader(self, load: str, address: str, reason: str) -> str:
        """The worker that reads the store in place of one that is late or lost, the same for all who load together."""
        self.check()
        if (load, address) not in self._substitutes:
            late = {address, *(other for name, other in self._substitutes if name == load)}
            ranks = [rank for rank in sorted(self.machine.settled) if rank != SERVER]
            left = [self.addresses[rank] for rank in ranks if self.addresses[rank] not in late]
            if not left:
                raise WorkerLost(f"{address} cannot read the store ({reason}), and no other worker can", transient=True)
            chosen = self._substitutes[load, address] = left[len(late) % len(left)]
            logger.warning("dshuffle: %s reads the store in place of %s (%s)", chosen, address, reason)
        return self._substitutes[load, address]

    def packed_spec(self, participant: int, epoch: int | None) -> bytes:
        """The session as a participant opens it, with the addresses of all participants.

        ``epoch`` is that of the partition which it reads; None if it opens the session together with all others. It is
        packed once for these.
        """
        spec = dataclasses.replace(self.spec, addresses=self.addresses)
        if epoch is not None:
            holder = self.handed_over.get(participant)
            former = PartitionSources(epoch, {participant: (holder, spec.session_id)}) if holder else None
            return dataclasses.replace(spec, former=former).packed()
        self._packed = self._packed or spec.packed()
        return self._packed

    async def request(self, order: str, participant: int, message: dict[str, Any]) -> Any:
        """Send an order, and return the answer."""
        return await getattr(self.scheduler.rpc(self.addresses[participant]), f"dshuffle_{order}")(**message)

    async def ask(self, kind: type[T], order: str, participant: int, **message: Any) -> T:
        """Send an order that is not part of an epoch, and return the message in the reply.

        It must be answered within a heartbeat.
        """
        message["session_id"] = self.spec.session_id
        try:
            reply = await within(self.spec.settings.heartbeat, self.request(order, participant, message))
        except OSError as error:
            words = f"{self.name_of(participant)} cannot be reached ({type(error).__name__}: {error})"
            raise WorkerLost(words) from error
        return message_in(reply, kind, self.name_of(participant))

    # -- the end -------------------------------------------------------------------------------------------------

    async def _free(self) -> None:
        """Close the ended session on all participants that are still in the cluster.

        After a loss, their partitions are sources of a session that follows. An elastic session opens it itself, once
        the tasks have ended; others are waited for.
        """
        members = set(self.addresses.values())
        if self.is_source:
            sources = {self.addresses[participant] for participant in self.machine.settled}
            sources.update(self.handed_over.values())
            self._close_on(sources, keeps=True)
            self._close_on(members - sources)
            limit = None if self.spec.options.elastic else self.spec.settings.replacement_timeout
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._fetched.wait(), limit)
            self.is_source = False
        if closing := self._close_on(members):
            await asyncio.wait(closing, timeout=self.machine.heartbeat)

    def _close_on(self, addresses: Iterable[str], *, keeps: bool = False) -> set[asyncio.Task[None]]:
        """Close the session on workers, until they answer or Dask gives them up. They may get a rank again meanwhile.

        With ``keeps``, they keep their partitions as sources, and only the tasks end.
        """
        # A worker does not obey if it has been given a rank since.
        order = {"session_id": self.spec.session_id, "number": self.machine.turn, "keeps": keeps}

        async def close(address: str) -> None:
            while address in self.scheduler.workers:
                rpc: Any = self.scheduler.rpc(address)
                try:  # tasks that come later raise the cause
                    await within(self.machine.heartbeat, rpc.dshuffle_close(**order, cause=ToPickle(self.cause)))
                except OSError:
                    await asyncio.sleep(self.machine.heartbeat)
                else:
                    return

        tasks = {self._loop.create_task(close(address), name=address) for address in sorted(addresses)}
        self._closing |= tasks
        for task in tasks:
            task.add_done_callback(self._closing.discard)
        return tasks
