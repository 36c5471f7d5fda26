"""One session on the scheduler: sends the orders of its state machine, and reports the answers back to it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from distributed import Scheduler
from distributed.protocol.serialize import ToPickle
from distributed.scheduler import WorkerState

from dshuffle.errors import ClusterError, DShuffleError, WorkerLost
from dshuffle.planning import SERVER, AutoDelivery, get_delivery, name_of
from dshuffle.planning.sample_digest import SampleDigest
from dshuffle.runtime.message_fields import from_fields, to_fields
from dshuffle.runtime.messages import (
    Answer,
    CommitReply,
    EpochExchange,
    MemberChanges,
    MemberState,
    Report,
    TrainedSamples,
    UnfinishedTask,
    Vote,
)
from dshuffle.runtime.replies import message_in
from dshuffle.runtime.scheduler.closing import Closing
from dshuffle.runtime.scheduler.deliveries import EpochDeliveries
from dshuffle.runtime.scheduler.instructions import (
    Adopt,
    AllReady,
    Committed,
    Ended,
    EpochFailed,
    GoesOnWithout,
    Instruction,
    Opened,
    Phase,
    Replace,
    Replaced,
    Run,
    Tell,
)
from dshuffle.runtime.scheduler.member_choice import Members
from dshuffle.runtime.scheduler.metrics import count
from dshuffle.runtime.scheduler.outcomes import TaskOutcomes
from dshuffle.runtime.scheduler.participants import Participants
from dshuffle.runtime.scheduler.replacements import Candidates
from dshuffle.runtime.scheduler.session_machine import SessionMachine
from dshuffle.runtime.scheduler.snapshot import KEPT, EpochFigures, LinkFigures, links_of
from dshuffle.runtime.scheduler.training_workers import membership
from dshuffle.runtime.scheduler.unrunnable import have_unfinished_tasks
from dshuffle.runtime.scheduler.votes import Totals, combined_reports, next_rate, rate_of
from dshuffle.runtime.scheduler.waiters import Waiters
from dshuffle.runtime.session_spec import PartitionSources, adopted_id

logger = logging.getLogger(__name__)

ANSWERS: dict[str, type[Answer]] = {"status": MemberState, "commit": CommitReply}
"""Orders whose answers say something, and what. To all other orders, participants only answer that they obey."""

TICK = 0.5
"""Seconds between looks at the clock while participants owe answers."""


class Coordinator:
    """Driver of the :class:`SessionMachine` of one session.

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
        self.members = members
        self.client_id = client_id
        self.client_reconnected = False  # whether its client has connected again since the session was opened
        self._scheduler = scheduler
        self._spec = members.spec
        self._ranks = range(self._spec.shuffle.n_workers)
        self.participants = Participants(scheduler, members.spec, lambda: self.machine.adopted)
        self._candidates = Candidates(scheduler, self.addresses.values(), new_workers=self._spec.settings.new_workers)
        self._loop = asyncio.get_running_loop()
        dedicated = members.server_role == "dedicated"
        participants = [who for who in self.addresses if who != SERVER or dedicated]
        self.machine = SessionMachine(
            participants,
            first_epoch=self._spec.shuffle.first_epoch,
            heartbeat=self._spec.settings.heartbeat,
            timeout=self._spec.settings.timeout,
            who_is=self.participants.name_of,
            replaceable=() if self._spec.options.on_loss == "raise" else participants,
            replacement_timeout=self._spec.settings.replacement_timeout,
            optional=[SERVER],
            shrinks=self._spec.options.on_loss == "shrink",
        )
        self._deliveries = EpochDeliveries(deliveries, self._spec.shuffle.first_epoch)
        self._move_tasks = move_tasks
        self._rate: float | None = None
        self.log: deque[EpochExchange] = deque(maxlen=KEPT)
        self.links: tuple[LinkFigures, ...] = ()  # of the last exchange
        self.held: dict[int, int] = {}  # samples that each rank holds
        self.outcomes = TaskOutcomes()
        self._asked_at = 0.0
        self._waiters = Waiters()
        self.follower: Coordinator | None = None  # of a session that takes over from this one
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ticking = False
        self._closed = False  # by the client
        self._closing = Closing(scheduler, self._spec, lambda: self.machine.turn, lambda: self.cause)
        self._freed: asyncio.Task[None] | None = None
        self._finding: asyncio.Task[None] | None = None

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
        return None if self._closed else self.machine.error

    @property
    def replacing(self) -> bool:
        """Whether lost workers are being replaced."""
        return bool(self.machine.unsettled)

    @property
    def new_ranks(self) -> frozenset[int]:
        """Ranks whose new workers do not hold their partitions yet."""
        return self.machine.new

    def kept_workers(self) -> list[str]:
        """Workers that an adaptive cluster must not remove now."""
        idle = self.machine.phase in (Phase.IDLE, Phase.READY) and not self.machine.adopted
        if not (self._spec.options.elastic and idle):
            return list(self.addresses.values())
        return [address for who, address in self.addresses.items() if who < self._spec.options.min_workers]

    @property
    def paused_timeout(self) -> float:
        """Seconds that a task may wait for a paused worker."""
        return self._spec.settings.paused_timeout

    @property
    def epoch(self) -> int:
        """The epoch that all participants are on."""
        return self.machine.epoch

    async def open(self) -> None:
        """Open the session on all participants."""
        await self._wait(self.machine.open(self._loop.time()))

    async def begin(self) -> None:
        """Start the next epoch's exchange unless it has already started."""
        self.check()
        self._perform(self.machine.begin(self._loop.time()))

    async def advance(self, epoch: int) -> EpochExchange:
        """Wait for an epoch's exchange, make all participants swap to it, and return the measurements.

        A client that did not receive the answer may ask for the same epoch again. It gets the same answer without
        another swap.

        Raises
        ------
        ExchangeError
            If the exchange failed, or tasks of the previous epoch do not end. Another call tries again.
        WorkerLost
            If a worker is lost and no other worker takes its rank. This ends the session.
        ClusterError
            If the epoch is not the next one, or the session has ended.
        """
        self.check()
        if epoch == self.epoch:
            return self.log[-1]
        if epoch != self.epoch + 1:
            raise ClusterError(
                f"the workers are on epoch {self.epoch} and cannot move to epoch {epoch}, which is not the next one",
                transient=False,
            )
        if not self._waiters:
            self._asked_at = self._loop.time()
        await self._wait(self.machine.advance(self._loop.time()))
        return self.log[-1]

    def vote(self, participant: int, run_id: int, secret: str, vote: object) -> None:
        """Pass on the vote of a participant on a run. Votes without the session's secret are refused."""
        if secret != self._spec.secret or participant not in self.machine.participants:
            raise ClusterError(
                f"session {self._spec.session_id} refused a vote: it does not come from one of its workers",
                transient=False,
            )
        read = from_fields(Vote, vote, self.participants.name_of(participant))
        self._perform(self.machine.voted(run_id, participant, read, self._loop.time()))

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
        who = [one for one in self.machine.participants if self.addresses[one] == address]
        if retires:
            self._candidates.retire(address)
            if self.epoch >= self.machine.first_epoch and not self.ended:
                self.participants.retires(address, self.machine.settled, self._loop.time())
        self._perform(self.machine.lost(who, reason, self._loop.time()))

    def needs(self, address: str) -> bool:
        """Whether another worker still reads the partition of a worker that retires, or may do so in a moment."""
        former, machine = self._spec.former, self.machine
        if self.ended:
            return False
        loads = self.epoch < machine.first_epoch and machine.phase not in (Phase.READY, Phase.COMMITTING)
        if loads and former is not None and address in {where for where, _ in former.holders.values()}:
            return True
        return self.participants.is_read(address, machine.missing, self._loop.time())

    def joined(self, who: int, worker: WorkerState, *, adopted: bool = False) -> None:
        """Let a worker take a lost rank; ``adopted`` if it has another one."""
        before = self.addresses[who]
        how = "answers again" if before == worker.address else f"is replaced by {worker.address}"
        if adopted:
            beside = name_of(min(self.participants.ranks_on(worker.address)))
            how = f"is taken by {worker.address}, which has {beside} as well, until the epoch ends"
        logger.warning("dshuffle: %s %s", self.participants.name_of(who), how)
        if before in {self.addresses[one] for one in self.machine.participants if one not in self.machine.missing}:
            self._spawn(self._closing.close_adopted(before, adopted_id(self._spec.session_id, who)))
        elif before != worker.address and before not in self.participants.retired:
            self._give_up(before)
        self._closing.given_up.discard(worker.address)
        for one, where in self.addresses.items():
            if one == who or (where == before and one not in self.machine.participants):  # a server beside the rank
                self.addresses[one] = worker.address
        self._candidates.remember(worker)
        self._perform(self.machine.replaced(who, self._loop.time(), adopted=adopted))
        self._move_tasks(self)

    def end(self, error: DShuffleError) -> None:
        """End the session, raise the error in all current and future calls, and free the workers that are left."""
        self._perform(self.machine.end(error))

    async def training_seconds(self) -> list[float]:
        """Seconds of training since the last commit, by rank. A rank whose worker is lost counts 0."""
        self.check()

        async def of(rank: int) -> float:
            if rank in self.machine.unsettled:
                return 0.0
            return await self.participants.ask(float, "training", rank)

        return await asyncio.gather(*map(of, self._ranks))

    async def trained(self) -> TrainedSamples:
        """The current epoch, how many of its samples each rank has trained on, and the digest of all of these.

        Raises
        ------
        ClusterError
            If a worker does not answer.
        """
        self.check()
        epoch = self.epoch
        digests = await asyncio.gather(*(self._trained(rank, epoch) for rank in self._ranks))
        counts = tuple(digest.count for digest in digests)
        return TrainedSamples(
            epoch=epoch, counts=counts, digest=SampleDigest.summed(digest.fields for digest in digests)
        )

    async def _trained(self, rank: int, epoch: int) -> SampleDigest:
        """Digest of the samples that a rank has trained on; of none if its worker is lost, as its task runs again.

        A worker that cannot be reached may be lost without anybody having noticed.
        """
        deadline = self._loop.time() + self._spec.settings.heartbeat
        while rank not in self.machine.unsettled:
            try:
                return await self.participants.ask(SampleDigest, "trained", rank, epoch=epoch)
            except WorkerLost:
                if self._loop.time() >= deadline:
                    raise
            await asyncio.sleep(TICK)
            self.check()
        return SampleDigest()

    def unfinished(self, epoch: int, calls: list[int]) -> list[UnfinishedTask]:
        """The tasks of some calls in an epoch that did not finish, each with its outcome."""
        return self.outcomes.unfinished(epoch, calls, len(self._ranks))

    def end_collective(self, address: str, **call: Any) -> None:
        """Fail the ranks that wait for a mean at rank 0. If rank 0 has left this address, nobody waits there."""
        if self.addresses[0] == address:
            self._spawn(self._end_collective(**call))

    async def _end_collective(self, reason: str, **call: Any) -> None:
        try:
            await self.participants.ask(type(None), "end_collective", 0, reason=reason, **call)
        except ClusterError as error:  # its worker or the call has ended
            logger.debug("dshuffle: rank 0 could not be told that %s: %s", reason, error)

    def member_addresses(self) -> dict[int, str]:
        """Address of every rank, and of the server."""
        return dict(self.addresses)

    def membership(self) -> MemberChanges:
        """How the workers of the cluster differ from the members."""
        self.check()
        return membership(self._scheduler, self.addresses, self.machine.adopted)

    def partitions(self) -> PartitionSources | None:
        """The partitions on the workers, for a session that takes over; None before the first epoch."""
        begun = self.epoch >= self.machine.first_epoch
        return self.participants.partitions(self.epoch, self.machine.settled) if begun else None

    def places(self) -> dict[str, int]:
        """Rank of every worker that trains, by address; of a worker with two ranks, its own one."""
        own = [rank for rank in self._ranks if rank not in self.machine.adopted]
        return {self.addresses[rank]: rank for rank in own}

    async def close(self) -> None:
        """Close the session on all participants that are still in the cluster."""
        self._closed = self._closed or not self.ended
        self.end(ClusterError("this session has been closed", transient=False))
        await self.freed()

    async def freed(self) -> None:
        """Wait until an ended session is closed on all workers that answer."""
        if self._freed is not None:
            await asyncio.shield(self._freed)

    def check(self) -> None:
        """Raise the error with which the session has ended."""
        if self.machine.error is not None:
            raise self.machine.error

    async def _wait(self, instructions: list[Instruction]) -> None:
        """Carry out instructions, and wait for the end of the phases that follow."""
        waiter = self._waiters.add()
        self._perform(instructions)
        await waiter

    def _perform(self, instructions: list[Instruction]) -> None:
        try:
            self._carry_out(instructions)
        except Exception as error:  # a bug: nobody must wait for what does not come
            logger.exception("dshuffle: session %s failed", self._spec.session_id)
            self._carry_out(self.machine.end(ClusterError(f"{type(error).__name__}: {error}")))

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Tell():
                    self._spawn(self._tell(instruction))
                case AllReady(run):
                    self._all_ready(run)
                case Opened():
                    self._waiters.release()
                case Replace():
                    if self._finding is None or self._finding.done():
                        self._finding = self._loop.create_task(self._find_replacements())
                case Replaced(ranks):
                    for rank in ranks:
                        self.participants.handed_over.pop(rank, None)
                    self._move_tasks(self)
                case Adopt(ranks):
                    for rank in ranks:
                        self._adopt(rank)
                case GoesOnWithout(who):
                    self._go_on_without(who)
                case Committed(run, reports):
                    self.log.append(self._exchange_of(run, reports))
                    self.outcomes.begin(run.epoch)
                    self._waiters.release()
                    count(EpochFigures.of(self.log[-1]))
                case EpochFailed(error):
                    self._waiters.release(error)
                case Ended(error):
                    for task in self._tasks:
                        task.cancel()
                    self._waiters.release(error)
                    self._freed = self._loop.create_task(self._free())
        if self.machine.busy and not self._ticking:
            self._ticking = True
            # Time does not count as silence where looks are further apart than a third of the heartbeat.
            self._loop.call_later(min(TICK, self._spec.settings.heartbeat / 6), self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._perform(self.machine.tick(self._loop.time()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, tell: Tell) -> None:
        machine, order, who, run_id = self.machine, tell.order, tell.who, tell.run_id
        message: dict[str, Any] = {}
        if order in ("open", "restore"):
            epoch = self.epoch if self.epoch >= machine.first_epoch else None
            spec = self.participants.spec_of(who, epoch if order == "restore" else None)
            message = {"spec": ToPickle(spec), "number": tell.turn, "last_run": run_id, "epoch": epoch}
            message["restore"] = order == "restore"
            if message["restore"]:
                message["drawn"] = None if (drawn := machine.drawn.get(who)) is None else to_fields(drawn)
        elif order == "members":
            message |= {"addresses": dict(self.addresses), "number": tell.turn}
        elif order != "status":
            message["run_id"] = run_id
        if order == "begin":
            if (run := machine.run) is None or run.run_id != run_id:
                return
            message |= {"epoch": run.epoch, "delivery": self._deliveries.of_run(run), "rate": self._rate}
        address = self.addresses[who]
        try:
            reply = await self.participants.request(order, who, message)
            answer: Answer = message_in(reply, ANSWERS.get(order, type(None)), self.participants.name_of(who))
        except WorkerLost as error:  # it closes, or has lost its partition
            if machine.is_due(tell):
                self.lose(address, f"is lost ({error})")
        except DShuffleError as error:  # before OSError: some are both
            self._refused(tell, address, error.raised_by(self.participants.name_of(who)))
        except OSError as error:
            machine.unreachable(tell, f"{type(error).__name__}: {error}")
        except Exception as error:  # whatever it is, the session must not wait for an answer
            self._refused(
                tell, address, ClusterError(f"{self.participants.name_of(who)}: {type(error).__name__}: {error}")
            )
        else:
            self._perform(machine.answered(tell, answer, self._loop.time()))

    def _refused(self, tell: Tell, address: str, error: DShuffleError) -> None:
        if tell.order == "restore":
            logger.warning("dshuffle: a worker cannot take a lost rank: %s", error)
            self._candidates.refuse(address)
        self._perform(self.machine.refused(tell, error, self._loop.time()))

    def _all_ready(self, run: Run) -> None:
        self._deliveries.observe(run)
        # Not earlier: planning would take cores from participants that are still exchanging.
        delivery = self._deliveries.of(run.epoch + 1)
        for who in self.machine.participants:
            self._spawn(self._plan_ahead(who, run.run_id, delivery))

    async def _plan_ahead(self, who: int, run_id: int, delivery: str) -> None:
        try:
            await self.participants.ask(type(None), "plan_ahead", who, run_id=run_id, delivery=delivery)
        except DShuffleError as error:  # harmless: the next run plans its epoch if no plan exists
            logger.debug("dshuffle: planning ahead failed after run %d: %s", run_id, error)

    async def _free(self) -> None:
        """Close the ended session on all participants that are still in the cluster."""
        late = await self._closing.close({*self.addresses.values(), *self._closing.given_up})
        if late:
            logger.warning("dshuffle: session %s is not closed yet on %s", self._spec.session_id, ", ".join(late))
            self._spawn(self._closing.close_later(late))

    def _give_up(self, address: str) -> None:
        """Free a worker that was replaced. It may be stopped, and answer later."""
        if address in self._scheduler.workers:
            self._closing.given_up.add(address)
            self._spawn(self._closing.close_given_up(address))

    def _go_on_without(self, who: int) -> None:
        logger.warning(
            "dshuffle: no other worker can replace %s; peers send the rows from now on", self.participants.name_of(who)
        )
        self._deliveries.lose_server()
        self._give_up(self.addresses.pop(who))

    async def _find_replacements(self) -> None:
        """Find workers for all lost ranks, until there are enough or waiting is of no use."""
        while missing := self.machine.missing:
            for who in sorted(missing, key=lambda who: who == SERVER):  # ranks first: without them nothing goes on
                try:
                    await self._find_replacement(who)
                except Exception:  # the end of the search would look like a lack of workers
                    logger.exception("dshuffle: the search for another worker for rank %d failed, and goes on", who)
            await asyncio.sleep(TICK)

    async def _find_replacement(self, who: int) -> None:
        if self._is_idle(who):
            return
        # Not the server beside a lost rank: its worker may answer again.
        members = {self.addresses[rank] for rank in self.machine.participants if rank not in self.machine.missing}
        found = await self._candidates.find(self.addresses[who], members, serves=who == SERVER)
        if who not in self.machine.missing:
            return
        if self._candidates.why_unfit:
            self.machine.unfit(who, self._candidates.why_unfit)
        if found is not None:
            self.joined(who, found)
        elif self._need_not_wait(who) or not await self._candidates.may_come(self.addresses[who]):
            what = "has retired" if who in self.participants.handed_over else "is lost, and no other worker can come"
            logger.warning("dshuffle: %s %s", self.participants.name_of(who), what)
            self._perform(self.machine.not_replaced([who], self._loop.time()))

    def _need_not_wait(self, who: int) -> bool:
        """Whether nobody need come for a rank: its worker was retired, or the client can open another session."""
        follows = self._spec.former is not None and not self._spec.former.kept
        opens_another = follows and self.epoch < self.machine.first_epoch
        return self._spec.options.on_loss == "shrink" and (who in self.participants.handed_over or opens_another)

    def _is_idle(self, who: int) -> bool:
        """Whether nobody needs the partition of a worker that has retired: its tasks have ended, and a session follows.

        That session reads the rows from the worker that retires. They would be sent twice if the rank were adopted.
        """
        if not self._spec.options.elastic or who == SERVER:
            return False
        if self.epoch < self.machine.first_epoch or self.machine.wanted:
            return False
        follows = self.follower is not None and not self.follower.ended
        if not (self.participants.has_retired(who, self._loop.time(), moments=not follows)):
            return False
        # Other lost ranks are restored together with this one.
        return not have_unfinished_tasks(self.machine.unsettled, self._spec.session_id, self._scheduler)

    def _adopt(self, who: int) -> None:
        """Let the worker of another rank take a lost one, preferably a worker that has not adopted any."""
        ranks = [one for one in self._ranks if one not in {*self.machine.unsettled, *self.machine.adopted}]
        held = Counter(self.addresses[one] for one in self._ranks if one not in self.machine.missing)
        able = [self.addresses[one] for one in ranks if not self._candidates.is_refused(self.addresses[one])]
        able = [address for address in able if address in self._scheduler.workers]
        if able:
            address = min(able, key=lambda one: held[one])
            self.joined(who, self._scheduler.workers[address], adopted=True)
        else:
            self._perform(self.machine.not_adopted())

    def _exchange_of(self, run: Run, reports: Mapping[int, Report]) -> EpochExchange:
        combined = combined_reports(reports, self.machine.participants)
        self.links = links_of(reports)
        self.held = {who: report.held for who, report in reports.items() if who != SERVER}
        delivery = self._deliveries.of_run(run)
        if get_delivery(delivery).shows_link_rates:
            self._rate = next_rate(self._rate, rate_of(combined.measured, combined.measures.cpu_idle))
        totals = Totals.of(run.votes.values())
        return EpochExchange(
            epoch=run.epoch,
            run_id=run.run_id,
            delivery=delivery,
            needed=totals.needed,
            packets=totals.packets,
            components=totals.expected,
            exchange_seconds=run.ready_after,
            waited_seconds=max(0.0, run.started + run.ready_after - self._asked_at),
            measures=combined.measures,
            addresses=dict(self.addresses),
            training_seconds_before=tuple(combined.training_seconds[: len(self._ranks)]),
        )
