"""The state machine of a session: a table that says what each event does in each phase.

It uses no comm, clock or task: whoever drives it passes the time in, and carries out the instructions. Tests take it
through any order of events. An epoch has two phases. First every participant receives rows into free slots and votes.
Once all are ready and the client waits for the epoch, all are ordered to swap. If a run fails, it is aborted
everywhere, and all participants stay on the previous epoch.

Every wait for an answer has a limit. A participant that owes an answer is asked for its state every third of a
heartbeat, in case a vote or an order was lost on the way. A participant that says nothing for a heartbeat is lost,
unless its process is known to run.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from dshuffle.errors import ClusterError, DShuffleError, ExchangeError, WorkerLost
from dshuffle.planning.remainder import SAME_BUILD, SampleDigest
from dshuffle.runtime.messages import Answer, Counts, MemberState, Report, Vote

ATTEMPTS = 3
"""Runs of one epoch before its exchange counts as failed."""

MOST_LOSSES = 10
"""How often a participant may be lost in one epoch. Each time, the task of a rank runs again."""

MOST_NAMES = 3
"""Number of participants that are named when a session says whom it waits for."""

STATUS = "status"
"""Name of the order that asks a participant for its state."""


class Phase(enum.Enum):
    """Phase of a session. The value is the name of the order that begins it, if there is one."""

    OPENING = "open"
    IDLE = "idle"
    EXCHANGING = "begin"  # until the client moves on, also when all are ready
    COMMITTING = "commit"
    ABORTING = "abort"
    RESTORING = "restore"  # waits for workers that take lost ranks, then for their partitions
    ENDED = "ended"


PURPOSE = {
    Phase.OPENING: "to open the session",
    Phase.EXCHANGING: "for the samples of epoch {}",
    Phase.COMMITTING: "to begin epoch {}",
    Phase.ABORTING: "to stop an exchange",
    Phase.RESTORING: "for replacements of lost workers to load their partitions",
}
"""What the session waits for in a phase, in words."""


Event = Literal[
    "begin",  # the client prefetches the next epoch
    "advance",  # the client waits for the next epoch
    "answered",  # all participants have carried out the order of the phase
    "failed",  # a run has failed
    "refused",  # a participant cannot carry out the order of the phase
    "lost",  # participants are lost that other workers can replace
    "lost for good",  # participants are lost that no other worker can replace, or all are lost
    "replaced",  # another worker takes a lost rank
    "unreplaced",  # no other worker comes for lost participants
    "closed",
]


@dataclass(slots=True)
class Run:
    """One attempt at an epoch's exchange, and what participants counted that are ready."""

    run_id: int
    epoch: int
    started: float
    attempt: int
    votes: dict[int, Counts] = field(default_factory=dict)
    ready_after: float = 0.0


@dataclass(frozen=True, slots=True)
class PhaseOrder:
    """Give a participant an order, and report the answer.

    The turn is that of the phase: an answer may come when the phase has ended, and perhaps has begun again.
    """

    name: str
    participant: int
    run_id: int
    turn: int = field(default=0, compare=False)


class CallEnded(NamedTuple):
    """Answer the client: the session is open, or an epoch has failed and the client may ask again."""

    error: DShuffleError | None = None


class RunReady(NamedTuple):
    """All participants are ready for the run's epoch."""

    run: Run


class EpochCommitted(NamedTuple):
    """All participants have swapped to the run's epoch; what they report."""

    run: Run
    reports: Mapping[int, Report]


class ProcessQuestion(NamedTuple):
    """Find out whether the process of a silent participant runs, and report it: `SessionMachine.note_running`."""

    participant: int
    silent_seconds: float
    turn: int


class ReplacementSearch(NamedTuple):
    """Find workers for these ranks, and report them with :meth:`SessionMachine.replaced`."""

    ranks: tuple[int, ...]


class RanksRestored(NamedTuple):
    """These ranks have new workers, which hold their partitions. Their tasks can run."""

    ranks: tuple[int, ...]


class ParticipantDropped(NamedTuple):
    """The session goes on without a participant that was lost, because no other worker can come for it."""

    participant: int


class SessionEnded(NamedTuple):
    """Tell the client that the session has ended, and free the participants that are left."""

    error: DShuffleError


Instruction = (
    PhaseOrder | CallEnded | RunReady | EpochCommitted | ProcessQuestion | ReplacementSearch | RanksRestored
    | ParticipantDropped | SessionEnded
)  # fmt: skip


def total_of(counts: Collection[Counts], name: str) -> int:
    """The sum of a count over workers that planned their own parts, else what all of them found."""
    first = next(iter(counts))
    return sum(getattr(member, name) for member in (counts if first.leaving is not None else [first]))


def check_votes(epoch: int, counts: Collection[Counts]) -> str | None:
    """What is wrong with the counts of all participants, or None.

    They must have the same plan, together train on every sample that is due exactly once, and have all their rows.
    """
    if len({member.digest for member in counts}) > 1:
        return f"epoch {epoch}: the workers made different plans. {SAME_BUILD}"
    drew = SampleDigest.summed(member.drawn.fields for member in counts if member.drawn is not None)
    due = SampleDigest.summed(member.due.fields for member in counts if member.due is not None)
    if drew != due:
        return (
            f"epoch {epoch}: the workers drew {drew.count} samples, which are not the {due.count} that are due. Some "
            f"would be trained on twice, or not at all, because builds of dshuffle differ. {SAME_BUILD}"
        )
    expected = total_of(counts, "expected")
    arrived = sum(member.rows for member in counts)
    if arrived != expected:
        return f"epoch {epoch}: {arrived} rows arrived, but {expected} were expected"
    return None


@dataclass(slots=True)
class Debt:
    """What is known of a participant that owes an answer.

    ``heard``, ``asked`` and ``seen_running`` are times: when it last said something, was last given an order, and when
    its process was last seen to run. ``unreachable`` and ``busy`` are reasons why it has not carried the order out, and
    ``repeats`` says that it must get the order again. ``arrived`` is the fraction of its rows that it has.
    """

    heard: float
    asked: float
    seen_running: float = -math.inf
    unreachable: str = ""
    busy: str = ""
    repeats: bool = False
    arrived: float | None = None

    @property
    def has(self) -> float:
        """The fraction of its rows that it has; 1 if that is not known."""
        return 1.0 if self.arrived is None else self.arrived

    @property
    def reason(self) -> str:
        """Why the answer is due, if that is known."""
        runs = self.seen_running > self.heard
        return self.busy or ("no answer, but its process runs: a task may hold Python's global lock" if runs else "")

    def in_words(self, name: str) -> str:
        """Who owes the answer, and why or how far it is."""
        if self.reason:
            return f"{name}: {self.reason}"
        return name if self.arrived is None else f"{name} has {self.arrived:.0%}"


class SessionMachine:
    """The phase of a session, who owes an answer, and which participants are lost.

    Methods ignore messages that are out of date. Of the others they make events, and the table below says what an event
    does. All return instructions.
    """

    def __init__(
        self,
        participants: Iterable[int],
        *,
        first_epoch: int,
        heartbeat: float,
        timeout: float,
        name_of: Callable[[int], str],
        replaceable: Iterable[int] = (),
        replacement_timeout: float = 60.0,
        optional: Iterable[int] = (),
    ) -> None:
        self.first_epoch = first_epoch
        # Seconds of silence after which a participant that owes an answer is lost, unless its process is known to run.
        # Until then it is asked every third of a heartbeat.
        self.heartbeat = heartbeat
        # Seconds after which a call of the client fails if the commit still waits for tasks of the previous epoch. The
        # commit goes on. A participant that says nothing for so long is lost although its process runs.
        self.timeout = timeout
        self.name_of = name_of  # name and address of a participant, for errors
        self.replaceable = frozenset(replaceable)
        self.replacement_timeout = replacement_timeout  # seconds to wait for replacements
        self.optional = frozenset(optional)  # without them the session can go on if no other worker replaces them

        self.participants = tuple(participants)  # all ranks, and the server if it is dedicated. Each has one vote.
        self.epoch = first_epoch - 1
        self.phase = Phase.OPENING
        self.now = 0.0
        self.told: list[Instruction] = []
        self.turn = 0  # number of the phases in which participants owe answers
        self.owing: dict[int, Debt] = {}
        self.reports: dict[int, Report] = {}  # of participants that have swapped
        self.error: DShuffleError | None = None  # with which the session has ended
        self._asked = False  # whether answers have not been dealt with, also if none is due any more
        self._since = self._ticked = 0.0

        self.client_waits = False  # for the next epoch
        self.unreported: DShuffleError | None = None  # an epoch failed while the client did not wait for it
        self.n_runs = 0
        self.run: Run | None = None
        self._failure: tuple[DShuffleError, bool] | None = None  # of a run, and whether another one can succeed
        self._repeats_run = False  # whether a run was aborted because of a lost worker
        self.digests: dict[int, SampleDigest] = {}  # of the samples that each rank trains on in the epoch

        self.losses: dict[int, str] = {}  # lost participants, and how they were lost
        self._loss_counts: Counter[int] = Counter()  # how often each rank was lost in the epoch
        self.newcomers: set[int] = set()  # replacements that do not hold their partitions yet, or are not known to all
        self._search_began = math.inf

    @property
    def unsettled(self) -> set[int]:
        """Participants that are lost and being replaced, or whose new workers do not hold their partitions yet."""
        return self.newcomers.union(self.losses)

    @property
    def settled(self) -> list[int]:
        """Participants that hold their partitions, or serve."""
        unsettled = self.unsettled
        return [participant for participant in self.participants if participant not in unsettled]

    @property
    def missing(self) -> tuple[int, ...]:
        """Lost participants that wait for a replacement now."""
        return tuple(sorted(self.losses)) if self.phase is Phase.RESTORING else ()

    @property
    def busy(self) -> bool:
        """Whether participants owe answers, so that time matters."""
        return bool(self.owing or self.missing)

    @property
    def is_ready(self) -> bool:
        """Whether all participants are ready for the next epoch, and the client does not wait for it yet."""
        return self.phase is Phase.EXCHANGING and not self.owing

    def owes_rows(self, participant: int) -> bool:
        """Whether a participant still exchanges rows of the next epoch."""
        return self.phase is Phase.EXCHANGING and participant in self.owing

    def waiting_for(self) -> str:
        """Whom the session waits for, in words; empty if it does not wait."""
        if self.missing:
            return f"waiting for other workers to replace {', '.join(map(self.name_of, self.missing))}"
        if not self.owing:
            return ""
        purpose = PURPOSE[self.phase].format(self.epoch + 1)
        # Those with a reason first, then those with the fewest rows.
        owing = sorted(self.owing.items(), key=lambda owed: (not owed[1].reason, owed[1].has, owed[0]))
        names = ", ".join(debt.in_words(self.name_of(participant)) for participant, debt in owing[:MOST_NAMES])
        more = f" and {len(owing) - MOST_NAMES} more" if len(owing) > MOST_NAMES else ""
        return f"waiting {purpose}: {names}{more}"

    # -- what happens --------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the session on all participants."""
        self._enter(Phase.OPENING)

    def begin(self) -> None:
        """Start the next epoch's exchange unless it has already started."""
        self.take("begin")

    def advance(self) -> None:
        """Let all participants swap to the next epoch once they are ready for it."""
        error, self.unreported = self.error or self.unreported, None
        if error is not None:
            self.told.append(CallEnded(error))
        else:
            self.client_waits = True
            self.take("advance")

    def alive(self, participant: int, seconds: float = 0.0) -> None:
        """Note that a participant was alive some seconds ago: it says so, or bytes of it arrived at another one."""
        if (debt := self.owing.get(participant)) is not None:
            debt.heard = max(self.now - seconds, debt.heard)

    def voted(self, run_id: int, participant: int, vote: Vote) -> None:
        """Record the vote of a participant on a run. It may come twice: by itself, and as an answer."""
        self.alive(participant)
        run = self.run
        if run is None or run.run_id != run_id or not self.owes_rows(participant):
            return
        if vote.reason is not None or vote.counts is None:
            words = f"epoch {run.epoch} could not be exchanged: {self.name_of(participant)}: {vote.reason}"
            self.take("failed", ExchangeError(words), participant, vote.again)
        else:
            run.votes[participant] = vote.counts
            self._answered(participant)

    def note_running(self, question: ProcessQuestion) -> None:
        """Note that the process of a silent participant runs. So the participant may be busy, and is not lost."""
        if (debt := self._debt(question)) is not None:
            debt.seen_running = self.now

    def answered(self, order: PhaseOrder, answer: Answer) -> None:
        """Record that a participant has carried out an order, or what it says of its state."""
        participant, debt = order.participant, self._debt(order)
        if debt is None:
            return
        self.alive(participant)
        debt.unreachable = ""
        if isinstance(answer, MemberState):
            self._described(participant, answer)
        elif answer is not None and answer.busy is not None:
            debt.busy, debt.repeats = answer.busy, True
        elif self.phase is not Phase.EXCHANGING:  # participants answer the order to begin by votes
            if answer is not None and answer.report is not None:
                self.reports[participant] = answer.report
            self._answered(participant)

    def _described(self, participant: int, state: MemberState) -> None:
        """Use a participant's description of its state: it may contain a vote, or show that it missed an order."""
        if not state.open:
            if self.phase is not Phase.OPENING and participant not in self.newcomers:
                self.lost([participant], "no longer has the session open")
        elif self.run is not None and self.phase is Phase.EXCHANGING:
            if state.run_id != self.run.run_id:
                self._order(participant)
                return
            self.owing[participant].arrived = state.arrived
            if state.vote is not None:
                self.voted(state.run_id, participant, state.vote)

    def refused(self, order: PhaseOrder, error: DShuffleError) -> None:
        """Record that a participant cannot carry out an order."""
        if self.is_due(order):
            self.take("refused", error, order.participant)

    def unreachable(self, order: PhaseOrder, reason: str) -> None:
        """Record that an order may not have reached a participant. It is sent again at a later :meth:`tick`."""
        if (debt := self._debt(order)) is not None:
            debt.unreachable, debt.repeats = reason, True

    def is_due(self, order: PhaseOrder) -> bool:
        """Whether an order was given in this phase, and has not been answered."""
        return order.name != STATUS and self._debt(order) is not None

    def _debt(self, order: PhaseOrder | ProcessQuestion) -> Debt | None:
        return self.owing.get(order.participant) if order.turn == self.turn else None

    def lost(self, participants: Iterable[int], reason: str) -> None:
        """Replace participants that have left the cluster or do not answer, or end the session."""
        clauses = {each: f"{self.name_of(each)} {reason}" for each in participants if each not in self.losses}
        self._loss_counts.update(clauses.keys())
        often = [each for each in clauses if self._loss_counts[each] > MOST_LOSSES]
        for each in often:
            times = f"for the {self._loss_counts[each]}th time in one epoch"
            clauses[each] += f", {times}. Perhaps a task blocks or ends its worker"
        nobody_is_left = {*self.losses, *clauses} >= set(self.participants)
        for_good = often or nobody_is_left or not self.replaceable.issuperset(clauses)
        if clauses:
            self.take("lost for good" if for_good else "lost", clauses)

    def replaced(self, participant: int) -> None:
        """Record that another worker takes a lost rank."""
        if participant in self.missing:
            self.take("replaced", participant)

    def not_replaced(self, participants: Iterable[int]) -> None:
        """Go on without lost participants, or end the session, because no other worker can come for them."""
        if missing := set(self.missing) & set(participants):
            self.take("unreplaced", missing)

    def close(self, error: DShuffleError) -> None:
        """End the session."""
        self.take("closed", error)

    def tick(self) -> None:
        """Let time pass. Participants that owe an answer are asked, and silent participants are given up."""
        now, gap, self._ticked = self.now, self.now - self._ticked, self.now
        if gap >= self.heartbeat / 3:  # it does not count: nobody read the answers that came
            self._since, self._search_began = self._since + gap, self._search_began + gap
            for debt in self.owing.values():
                debt.heard, debt.asked, debt.seen_running = debt.heard + gap, debt.asked + gap, debt.seen_running + gap
        if now - self._search_began >= self.replacement_timeout:
            self.not_replaced(self.missing)
        for participant, debt in sorted(self.owing.items()):
            silent, runs = now - debt.heard, now - debt.seen_running < self.heartbeat
            if silent >= self.heartbeat and (silent >= self.timeout or not runs):
                limit = "dshuffle.timeout), although its process runs" if runs else "dshuffle.heartbeat)"
                words = f"has not answered for {silent:.3g} s ({limit}"
                self.lost([participant], words + (f" ({debt.unreachable})" if debt.unreachable else ""))
                return
            if now - debt.asked >= self.heartbeat / 3:
                repeats, debt.asked, debt.repeats = debt.repeats, now, False
                if repeats:
                    self._order(participant)
                if not repeats or self.phase is Phase.EXCHANGING:  # a vote may have been lost as well
                    self._order(participant, STATUS)
                if silent >= self.heartbeat / 3:
                    self.told.append(ProcessQuestion(participant, silent, self.turn))
        if self.phase is Phase.COMMITTING and self.client_waits and now - self._since >= self.timeout:
            self._answer_client(ExchangeError(f"the next epoch cannot begin: {self.waiting_for()}"))

    # -- the table -----------------------------------------------------------------------------------------------

    def take(self, event: Event, *details: Any) -> None:
        """Let an event happen, and then what follows from it: that nobody owes an answer any longer."""
        self.TRANSITIONS[self.phase][event](self, *details)  # a KeyError is a bug
        self._answered()

    def _answered(self, *participants: int) -> None:
        for participant in participants:
            self.owing.pop(participant, None)
        if self._asked and not self.owing:
            self._asked = False
            self.take("answered")

    def _order(self, participant: int, name: str = "") -> None:
        """Give a participant an order: by default that of the present phase."""
        restores = self.phase is Phase.RESTORING
        if not name:
            name = "members" if restores and participant not in self.newcomers else self.phase.value
        # A worker that takes a rank must refuse all runs so far: orders to begin them may arrive late.
        run_id = self.n_runs if restores else 0 if self.run is None else self.run.run_id
        self.told.append(PhaseOrder(name, participant, run_id, self.turn))

    def _answer_client(self, error: DShuffleError | None = None) -> None:
        self.client_waits = False
        self.told.append(CallEnded(error))

    def _enter(self, phase: Phase) -> None:
        """Enter a phase in which participants owe an answer, and give its order to all."""
        self.phase, self.turn, self._asked, self.reports = phase, self.turn + 1, True, {}
        self._since = self._ticked = self.now
        self.owing = {each: Debt(self.now, self.now) for each in self.participants if each not in self.losses}
        for participant in self.owing:
            self._order(participant)

    def _begin_run(self, attempt: int = 1) -> None:
        """Begin an attempt at the exchange of the next epoch. Its run has a new id, so old messages can be refused."""
        self.n_runs += 1
        self.run = Run(self.n_runs, self.epoch + 1, self.now, attempt)
        self._enter(Phase.EXCHANGING)

    def _become_idle(self) -> None:
        """Become idle, or begin the next run at once if it is waited for or was interrupted by a loss."""
        self.phase, self.run, self._search_began = Phase.IDLE, None, math.inf
        repeats_run, self._repeats_run = self._repeats_run, False
        if self.client_waits or repeats_run:
            self._begin_run()

    def _seek(self) -> None:
        """Wait for other workers that take the lost ranks."""
        self._search_began, self._ticked = min(self._search_began, self.now), self.now
        self.phase, self.run, self.owing, self._asked = Phase.RESTORING, None, {}, False
        self.told.append(ReplacementSearch(self.missing))

    def _ignore(self, *details: Any) -> None:
        """The event comes too late, or asks for what the session does already."""

    def _opened(self) -> None:
        self.phase = Phase.IDLE
        self._answer_client()

    def _prefetch(self) -> None:
        if self.unreported is None:  # else the client hears of it first
            self._begin_run()

    def _commit(self) -> None:
        if self.is_ready:
            self._enter(Phase.COMMITTING)

    def _wait_again(self) -> None:
        """An earlier call failed because tasks were still running."""
        self._since = self.now

    def _compare_votes(self) -> None:
        """All participants are ready. Abort the run if what they counted does not fit together."""
        run = self.run
        assert run is not None
        run.ready_after = self.now - run.started
        if (mismatch := check_votes(run.epoch, run.votes.values())) is not None:
            self._abort(ExchangeError(mismatch, transient=False))
            return
        self.told.append(RunReady(run))
        if self.client_waits:
            self._commit()

    def _abort(self, error: DShuffleError, participant: int | None = None, again: bool = False) -> None:
        self._failure = error, again
        self._enter(Phase.ABORTING)

    def _leave_aborted(self) -> None:
        """All have aborted the run: replace those that are lost, try again, or say why the epoch failed."""
        run, failure, self._failure = self.run, self._failure, None
        if self.losses:
            self._repeats_run = True
            self._seek()
            return
        assert run is not None
        assert failure is not None
        error, again = failure
        if again and run.attempt < ATTEMPTS:
            self._begin_run(run.attempt + 1)
            return
        self.phase, self.run = Phase.IDLE, None
        if self.client_waits:
            self._answer_client(error)
        else:
            self.unreported = error

    def _committed(self) -> None:
        run = self.run
        assert run is not None
        self.phase, self.epoch, self.run, self.client_waits = Phase.IDLE, run.epoch, None, False
        self.digests = {rank: counts.drawn for rank, counts in run.votes.items() if counts.drawn is not None}
        self._loss_counts.clear()
        self.told.append(EpochCommitted(run, self.reports))
        if self.losses:
            self._seek()

    def _end_commit(self, error: DShuffleError, participant: int) -> None:
        """Some participants have swapped, and one cannot."""
        words = f"all workers were ready for epoch {self.epoch + 1}, but the commit failed: {error}"
        self._end(ClusterError(words, transient=error.transient))

    def _end(self, error: DShuffleError, participant: int | None = None) -> None:
        self.phase, self.error, self.run, self.owing, self._asked = Phase.ENDED, error, None, {}, False
        self.told.append(SessionEnded(error))

    def _end_lost(self, clauses: Mapping[int, str], replacing: str = "") -> None:
        self._excuse(clauses)
        hint = "The session has ended, and the dataset is unchanged. Make a new Shuffler on the remaining workers"
        self._end(WorkerLost(f"{'; '.join(clauses.values())}. {replacing}{hint}"))

    def _excuse(self, clauses: Mapping[int, str]) -> None:
        """Let the phase end without the answers of lost participants."""
        self.losses |= clauses
        self.newcomers -= clauses.keys()
        for participant in clauses:
            self.owing.pop(participant, None)

    def _replace(self, clauses: Mapping[int, str]) -> None:
        """Search for other workers: nothing is under way that has to end first."""
        self._excuse(clauses)
        self._seek()

    def _abort_lost(self, clauses: Mapping[int, str]) -> None:
        """Abort the run before other workers are searched for. It is repeated with them."""
        self._excuse(clauses)
        self._enter(Phase.ABORTING)

    def _take_rank(self, participant: int) -> None:
        """Let another worker take a lost rank. Once all ranks are taken, they are restored together."""
        del self.losses[participant]
        self.newcomers.add(participant)
        if not self.losses:
            self._enter(Phase.RESTORING)

    def _go_without(self, participants: Collection[int]) -> None:
        """Drop lost participants that are optional, or end the session."""
        if not self.optional.issuperset(participants):
            self._end_lost(self.losses, "No other worker could take the rank. ")
            return
        self.participants = tuple(each for each in self.participants if each not in participants)
        for participant in participants:
            self.told.append(ParticipantDropped(participant))
            del self.losses[participant]
        if self.newcomers and not self.losses:
            self._enter(Phase.RESTORING)
        elif not self.losses:
            self._become_idle()

    def _search_again(self, error: DShuffleError, participant: int) -> None:
        """Search for another worker, because the one that was to take a rank cannot."""
        if participant not in self.newcomers:
            self._end(error)
            return
        self._replace({participant: f"{self.name_of(participant)} cannot take a lost rank ({error})"})

    def _restored(self) -> None:
        """The newcomers hold their partitions, and all others know the new addresses."""
        self.told.append(RanksRestored(tuple(sorted(self.newcomers))))
        self.newcomers = set()
        self._become_idle()

    LATE: ClassVar[dict[Event, Callable[..., None]]] = {"begin": _ignore, "advance": _ignore}
    ALWAYS: ClassVar[dict[Event, Callable[..., None]]] = {"lost for good": _end_lost, "closed": _end}

    TRANSITIONS: ClassVar[dict[Phase, dict[Event, Callable[..., None]]]] = {
        Phase.OPENING: LATE | ALWAYS | {
            "answered": _opened,  # IDLE
            "refused": _end,  # ENDED
            "lost": _end_lost,  # ENDED
        },
        Phase.IDLE: ALWAYS | {
            "begin": _prefetch,  # EXCHANGING
            "advance": _become_idle,  # EXCHANGING
            "lost": _replace,  # RESTORING
        },
        Phase.EXCHANGING: LATE | ALWAYS | {
            "advance": _commit,  # COMMITTING once all are ready
            "answered": _compare_votes,  # COMMITTING if the client waits; or ABORTING
            "failed": _abort,  # ABORTING
            "refused": _abort,  # ABORTING
            "lost": _abort_lost,  # ABORTING
        },
        Phase.COMMITTING: LATE | ALWAYS | {
            "advance": _wait_again,
            "answered": _committed,  # IDLE, or RESTORING if some are lost
            "refused": _end_commit,  # ENDED
            "lost": _excuse,
        },
        Phase.ABORTING: LATE | ALWAYS | {
            "answered": _leave_aborted,  # EXCHANGING, IDLE, or RESTORING if some are lost
            "refused": _end,  # ENDED
            "lost": _excuse,
        },
        Phase.RESTORING: LATE | ALWAYS | {
            "answered": _restored,  # IDLE, or EXCHANGING if a run is due
            "refused": _search_again,
            "lost": _replace,
            "replaced": _take_rank,
            "unreplaced": _go_without,  # ENDED, or IDLE or EXCHANGING without a server
        },
        Phase.ENDED: {"begin": _ignore, "lost": _ignore, "lost for good": _ignore, "closed": _ignore},
    }  # fmt: skip
    """What an event does in each phase, and the phases that may follow."""
