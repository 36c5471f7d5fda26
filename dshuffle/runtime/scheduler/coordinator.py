"""A session on the scheduler: its machine gets events, and its instructions are carried out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from distributed import Scheduler
from distributed.protocol.serialize import to_serialize

from dshuffle.errors import ClusterError, DatasetChanged, DShuffleError, WorkerLost
from dshuffle.planning import SERVER, AutoDelivery
from dshuffle.runtime.messages import (
    AbortOrder,
    Answer,
    BeginOrder,
    CommitOrder,
    CommitReply,
    EpochExchange,
    MembersOrder,
    MemberState,
    OpenOrder,
    PlanOrder,
    SessionOrder,
    Together,
    Vote,
    from_fields,
    message_in,
    to_fields,
)
from dshuffle.runtime.scheduler import machine_state as instructions
from dshuffle.runtime.scheduler.driver import MachineDriver, Waiters
from dshuffle.runtime.scheduler.machine import STATUS, SessionMachine
from dshuffle.runtime.scheduler.machine_state import Instruction, Phase, PhaseOrder, Run
from dshuffle.runtime.scheduler.members import Candidates, Members, process_runs
from dshuffle.runtime.scheduler.participants import EpochDeliveries, ExchangeLog, Participants
from dshuffle.runtime.scheduler.replacements import Closing, Replacements
from dshuffle.runtime.scheduler.tasks import TaskOutcomes
from dshuffle.runtime.session_spec import PartitionSources, SessionRequest, WorkerChoice
from dshuffle.runtime.settings import Settings
from dshuffle.units import human_bytes, human_rate

logger = logging.getLogger(__name__)


ANSWERS: dict[str, type[Answer]] = {"status": MemberState, "commit": CommitReply}
"""Orders whose answers say something, and what. To all other orders, participants only answer that they obey."""


def answer_type(order: PhaseOrder) -> type[Answer]:
    """The type of the answer to an order."""
    return ANSWERS.get(order.name, type(None))


def message_of(
    order: PhaseOrder,
    machine: SessionMachine,
    participants: Participants,
    deliveries: EpochDeliveries,
    rate: float | None,
) -> dict[str, Any] | None:
    """The message of an order; None if its run has ended."""
    participant, run_id = order.participant, order.run_id
    match order.name:
        case "open" | "restore":
            restore = order.name == "restore"
            epoch = machine.epoch if machine.epoch >= machine.first_epoch else None
            digest = machine.digests.get(participant) if restore else None
            together = participants.together(machine.newcomers - machine.kept) if restore else Together()
            message = OpenOrder(
                number=order.turn,
                last_run=run_id,
                restore=restore,
                epoch=epoch,
                digest=digest,
                together=together,
            )
            spec = participants.packed_spec(participant, epoch if restore else None)
            return {**to_fields(message), "spec": to_serialize(spec)}  # as a frame, which is not copied
        case "members":
            return to_fields(MembersOrder(addresses=participants.moved, number=order.turn))
        case "begin":
            run = machine.run
            if run is None or run.run_id != run_id:
                return None
            delivery = deliveries.of_run(run)
            return to_fields(BeginOrder(run_id=run_id, epoch=run.epoch, delivery=delivery, rate=rate))
        case "commit":
            return to_fields(CommitOrder(session_id=participants.session_id, run_id=run_id))
        case "abort":
            return to_fields(AbortOrder(run_id=run_id))
        case "status":
            return to_fields(SessionOrder(session_id=participants.session_id))
    raise AssertionError(order.name)


class Coordinator:
    """Gives the :class:`SessionMachine` of one session its events, and carries out its instructions.

    Parameters
    ----------
    scheduler
        The Dask scheduler, used for its comms.
    members
        Ranks and server of the session.
    client_id
        Client that owns the session.
    deliveries
        Chooses the delivery of each epoch.
    move_tasks
        Called with this coordinator when another worker takes a lost rank, and again when it holds the partition.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        members: Members,
        client_id: str,
        deliveries: AutoDelivery,
        move_tasks: Callable[[Coordinator], None] = lambda _: None,
    ) -> None:
        self.scheduler = scheduler
        self.members = members
        self.client_id = client_id
        self.client_reconnected = False  # whether its client has connected again since the session was opened
        self.follower: Coordinator | None = None  # of a session that takes over from this one
        self.source: Coordinator | None = None  # of a session whose partitions this one reads
        self.is_source = False  # whether it has ended, and its workers keep their partitions for a session that follows
        self.client_left = False  # whether the client has closed it since then
        self.outcomes = TaskOutcomes()
        self._spec = spec = members.spec
        self.ranks = range(spec.shuffle.n_workers)
        self._loop = asyncio.get_running_loop()
        self.participants = Participants(scheduler, spec)
        dedicated = members.server_role == "dedicated"
        participants = [participant for participant in self.addresses if participant != SERVER or dedicated]
        self.machine = SessionMachine(
            participants,
            first_epoch=spec.shuffle.first_epoch,
            heartbeat=spec.settings.heartbeat,
            timeout=spec.settings.timeout,
            name_of=self.participants.name_of,
            replaceable=() if spec.options.on_loss == "raise" else participants,
            replacement_timeout=spec.settings.replacement_timeout,
            optional=[SERVER],
        )
        self.driver = MachineDriver(self.machine, self._carry_out, spec.session_id, spec.settings.heartbeat)
        self.log = ExchangeLog(self.participants, len(self.ranks))
        self._deliveries = EpochDeliveries(deliveries, spec.shuffle.first_epoch, spec.shuffle.choices.exchange_epochs)
        self._waiters = Waiters()
        self._move_tasks = move_tasks
        self._status_queries: set[str] = set()  # addresses of workers whose answer about their state is due
        self._closed_by_client = False
        self._closing = Closing(scheduler, spec, lambda: self.machine.turn, lambda: self.cause)
        self._freed: asyncio.Task[None] | None = None
        self._fetched = asyncio.Event()  # set once nobody needs the partitions of the ended session any more
        self._candidates = Candidates(
            scheduler, self.addresses.values(), spec.choice, new_workers=spec.settings.new_workers
        )
        self._replacements = Replacements(
            scheduler,
            spec,
            self.participants,
            self._candidates,
            self.machine,
            self.driver,
            self._closing,
            is_followed=lambda: self.follower is not None and not self.follower.ended,
            move_tasks=lambda: move_tasks(self),
        )

    @property
    def addresses(self) -> dict[int, str]:
        """Address of every rank, and of the server."""
        return self.participants.addresses

    @property
    def ended(self) -> bool:
        """Whether the session has ended."""
        return self.machine.error is not None

    @property
    def cause(self) -> DShuffleError | None:
        """Why the session has ended, unless its client has closed it."""
        return None if self._closed_by_client else self.machine.error

    @property
    def replacing(self) -> bool:
        """Whether lost workers are being replaced."""
        return bool(self.machine.unsettled)

    @property
    def new_ranks(self) -> frozenset[int]:
        """Ranks whose new workers do not hold their partitions yet, or that are lost for good."""
        lost = self.machine.losses if self.ended else ()
        return frozenset(self.machine.newcomers - self.machine.kept) | frozenset(lost)

    @property
    def paused_timeout(self) -> float:
        """Seconds that a task may wait for a paused worker."""
        return self._spec.settings.paused_timeout

    @property
    def choice(self) -> WorkerChoice:
        """The workers that may be members of the session."""
        return self._spec.choice

    @property
    def settings(self) -> Settings:
        """Time limits of the session."""
        return self._spec.settings

    @property
    def epoch(self) -> int:
        """The epoch that all participants are on."""
        return self.machine.epoch

    def waiting_for(self) -> str:
        """Whom the session waits for, and how much of the dataset is loaded, in words; empty if it does not wait."""
        machine, words = self.machine, self.machine.waiting_for()
        if machine.phase is not Phase.EXCHANGING or machine.run is None or machine.epoch >= machine.first_epoch:
            return words
        shuffle = self._spec.shuffle
        total = shuffle.n_samples * self._spec.dataset.layout.nbytes
        arrived = [machine.answers.arrived.get(rank) if machine.owes_rows(rank) else 1.0 for rank in self.ranks]
        loaded = int(total * sum(fraction or 0.0 for fraction in arrived) / len(arrived))
        rate = human_rate(loaded / max(1e-3, self._loop.time() - machine.run.started))
        return f"{words}; {human_bytes(loaded)} of {human_bytes(total)} loaded, {rate}"

    async def open(self) -> None:
        """Open the session on all participants."""
        await self._wait(self.machine.open)

    async def begin(self) -> None:
        """Start the next epoch's exchange unless it has already started."""
        self.check()
        self.driver.run(self.machine.begin)

    async def advance(self, epoch: int) -> EpochExchange:
        """Wait for an epoch's exchange, make all participants swap to it, and return the measurements.

        A client that did not receive the answer may ask for the same epoch again. It gets the same answer without
        another swap.
        """
        self.check()
        if epoch == self.epoch:
            return self.log.exchanges[-1]
        if epoch != self.epoch + 1:
            raise ClusterError(
                f"the workers cannot move to epoch {epoch}: the next one is {self.epoch + 1}",
                transient=False,
            )
        if not self._waiters:
            self.log.client_asked = self._loop.time()
        await self._wait(self.machine.advance)
        return self.log.exchanges[-1]

    def vote(self, participant: int, run_id: int, secret: str, vote: object) -> None:
        """Pass on the vote of a participant on a run. Votes without the session's secret are refused."""
        if secret != self._spec.secret or participant not in self.machine.participants:
            raise ClusterError(
                f"session {self._spec.session_id} refused a vote: it does not come from one of its workers",
                transient=False,
            )
        checked = from_fields(Vote, vote, self.participants.name_of(participant))
        self.driver.run(self.machine.voted, run_id, participant, checked)

    def alive(self, participant: int, secret: str, heard: Mapping[int, float]) -> None:
        """Note a sign of life of a participant, and from which others it had bytes some seconds ago."""
        now = self._loop.time()
        if secret == self._spec.secret and participant in self.machine.participants:
            self.machine.alive(participant, now)
            for sender, seconds in heard.items():
                self.machine.alive(sender, now - max(0.0, seconds))

    def lose(
        self, address: str, reason: str = "has left the cluster and its partition is lost", *, retires: bool = False
    ) -> None:
        """Replace a worker that is lost, or end the session. A worker that retires can still send rows."""
        lost = [participant for participant in self.machine.participants if self.addresses[participant] == address]
        if retires:
            self._candidates.retire(address)
            if self.epoch >= self.machine.first_epoch and (self.is_source or not self.ended):
                self.participants.retires(address, self.machine.settled, self._loop.time())
        self.driver.run(self.machine.lost, lost, reason, retires=retires)

    def needs(self, address: str) -> bool:
        """Whether another worker still reads the partition of a worker that retires, or may do so in a moment."""
        former, machine = self._spec.former, self.machine
        if self.ended:  # a worker does not wait for a session that may never come
            is_followed = self.follower is not None and not self.follower.ended
            follows = self.is_source and (is_followed or (self._spec.options.elastic and not self.client_left))
            return follows and any(holder == address for holder, _ in self.participants.handed_over.values())
        loads = self.epoch < machine.first_epoch and machine.phase not in (Phase.READY, Phase.COMMITTING)
        if loads and former is not None and address in {holder for holder, _ in former.holders.values()}:
            return True
        return self.participants.is_read(address, machine.missing, self._loop.time())

    def kept_workers(self) -> list[str]:
        """Workers that an adaptive cluster must not remove now."""
        idle = self.machine.phase in (Phase.IDLE, Phase.READY)
        if not (self._spec.options.elastic and idle):
            return list(self.addresses.values())
        fewest, workers = self._spec.options.min_workers, self.scheduler.workers
        trains = {address for address in self.addresses.values() if address in workers and workers[address].processing}
        return [address for participant, address in self.addresses.items() if participant < fewest or address in trains]

    def partitions(self) -> PartitionSources | None:
        """The partitions on the workers, for a session that takes over; None if there are none."""
        if self.epoch < self.machine.first_epoch or (self.ended and not self.is_source):
            return None
        present = [rank for rank in self.machine.settled if self.addresses[rank] in self.scheduler.workers]
        sources = self.participants.partitions(self.epoch, present)
        return sources if sources.holders or not self.ended else None

    def can_be_read_by(self, request: SessionRequest) -> bool:
        """Whether the session has ended, and its partitions have the rows of the requested one."""
        own, other = self._spec.dataset, request.dataset
        return self.is_source and (own.identity, own.layout) == (other.identity, other.layout)

    def end(self, error: DShuffleError) -> None:
        """End the session, raise the error in all current and future calls, and free the workers that are left."""
        self.driver.run(self.machine.close, error)

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
        return worker is not None and await process_runs(self.scheduler, worker, silent_seconds, self.settings)

    def check(self) -> None:
        """Raise the error with which the session has ended."""
        if self.machine.error is not None:
            raise self.machine.error

    async def _wait(self, method: Callable[..., list[Instruction]]) -> None:
        """Give the machine an event, and wait for the end of the phases that follow."""
        waiter = self._waiters.add()
        self.driver.run(method)
        await waiter

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case PhaseOrder():
                self.driver.spawn(self._send(instruction))
            case instructions.SessionOpened():
                self._waiters.release()
            case instructions.RunReady(run):
                self._plan_ahead(run)
            case instructions.EpochCommitted(run, reports):
                source, self.source = self.source, None
                if source is not None and source.ended:
                    source.release()
                delivery = self._deliveries.of_run(run)
                self.log.add(run, reports, self.machine.participants, delivery)
                self.outcomes.begin(run.epoch)
                self._waiters.release()
            case instructions.EpochFailed(error):
                self._waiters.release(error)
            case instructions.ProcessQuestion():
                self.driver.spawn(self._look_at_process(instruction))
            case instructions.ReplacementSearch():
                self._replacements.search()
            case instructions.RanksRestored(ranks):
                for rank in ranks:
                    self.participants.handed_over.pop(rank, None)
                self._move_tasks(self)
            case instructions.ParticipantDropped(participant):
                self._deliveries.lose_server()
                self._replacements.drop(participant)
            case instructions.SessionEnded(error):
                self.driver.cancel_all()
                self._waiters.release(error)
                # Kept partitions are read from disks.
                is_lost = isinstance(error, WorkerLost) and self.epoch >= self.machine.first_epoch
                self.is_source = is_lost and bool(self.machine.losses) and not self._spec.options.keep_cache
                if self.is_source:  # a worker that is stopped never ends its tasks
                    self._loop.call_soon(self._move_tasks, self)
                self._freed = self._loop.create_task(self._free())

    async def _send(self, order: PhaseOrder) -> None:
        """Send an order, and give the machine the answer."""
        machine, participant = self.machine, order.participant
        message = message_of(order, machine, self.participants, self._deliveries, self.log.rate)
        address = self.addresses[participant]
        if message is None or (order.name == STATUS and address in self._status_queries):
            return
        if order.name == STATUS:  # questions to a worker that does not answer must not pile up
            self._status_queries.add(address)
        try:
            reply = await self.participants.request(order.name, participant, message)
            answer: Answer = message_in(reply, answer_type(order), self.participants.name_of(participant))
        except WorkerLost as error:  # it closes, or has lost its partition
            if machine.is_due(order):
                self.lose(address, f"is lost ({error})")
        except DShuffleError as error:  # before OSError: some are both
            self._refused(order, address, error.raised_by(self.participants.name_of(participant)))
        except OSError as error:
            machine.unreachable(order, f"{type(error).__name__}: {error}")
        except Exception as error:  # whatever it is, the session must not wait for an answer
            words = f"{self.participants.name_of(participant)}: {type(error).__name__}: {error}"
            self._refused(order, address, ClusterError(words))
        else:
            self.driver.run(machine.answered, order, answer)
        finally:
            if order.name == STATUS:
                self._status_queries.discard(address)

    async def _look_at_process(self, question: instructions.ProcessQuestion) -> None:
        if await self.process_runs(question.participant, question.silent_seconds):
            self.driver.run(self.machine.note_running, question)

    def _refused(self, order: PhaseOrder, address: str, error: DShuffleError) -> None:
        if order.name == Phase.RESTORING.value:
            logger.warning("dshuffle: a worker cannot take a lost rank: %s", error)
            # Another worker may see the dataset as it was; this one will not.
            self._replacements.refuse(order.participant, address, for_good=isinstance(error, DatasetChanged))
        self.driver.run(self.machine.refused, order, error)

    def _plan_ahead(self, run: Run) -> None:
        """Let all participants plan the epoch after the one for which they are ready."""
        self._deliveries.observe(run)
        # Not earlier: planning would take cores from participants that are still exchanging.
        delivery = self._deliveries.of(run.epoch + 1)

        async def plan_ahead(participant: int) -> None:
            fields = to_fields(PlanOrder(run_id=run.run_id, delivery=delivery))
            try:
                await self.participants.ask(type(None), "plan_ahead", participant, **fields)
            except DShuffleError as error:  # harmless: the next run plans its epoch if no plan exists
                logger.debug("dshuffle: planning ahead failed after run %d: %s", run.run_id, error)

        for participant in self.machine.participants:
            self.driver.spawn(plan_ahead(participant))

    async def _free(self) -> None:
        """Close the ended session on all participants that are still in the cluster.

        After a loss, their partitions are sources of a session that follows. An elastic session opens it itself, once
        the tasks have ended; others are waited for.
        """
        if self.is_source:
            sources = {self.addresses[participant] for participant in self.machine.settled}
            sources |= {address for address, _ in self.participants.handed_over.values()}
            lost = {*self.addresses.values(), *self._closing.given_up} - sources
            self.driver.spawn(self._closing.close_later(sources, keeps=True))
            self.driver.spawn(self._closing.close_later(lost))
            limit = None if self._spec.options.elastic else self.settings.replacement_timeout
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._fetched.wait(), limit)
            self.is_source = False
        late = await self._closing.close({*self.addresses.values(), *self._closing.given_up})
        if late:
            logger.warning("dshuffle: session %s is not closed yet on %s", self._spec.session_id, ", ".join(late))
            self.driver.spawn(self._closing.close_later(late))
