"""The state machine of a session, as its driver uses it.

It uses no comm, clock or task: whoever drives it passes the time in, and carries out the instructions. Tests take it
through any order of events. An epoch has two phases. First every participant receives rows into free slots and votes.
Once all are ready and the client waits for the epoch, all are ordered to swap. If a run fails, it is aborted
everywhere, and all participants stay on the previous epoch.

The methods of :class:`SessionMachine` ignore messages that are out of date. Of the others they make events, and
:data:`TRANSITIONS` says what an event does in each phase.

Every wait for an answer has a limit. A participant that owes an answer is asked for its state every third of a
heartbeat, in case a vote or an order was lost on the way. A participant that says nothing for a heartbeat is lost,
unless its process is known to run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from dshuffle.errors import ClusterError, DShuffleError, ExchangeError, WorkerLost
from dshuffle.planning.remainder import SAME_BUILD, SampleDigest
from dshuffle.runtime.messages import Answer, Counts, MemberState, Vote
from dshuffle.runtime.scheduler import machine_state as events
from dshuffle.runtime.scheduler.machine_state import (
    OWING,
    PURPOSE,
    EpochCommitted,
    EpochFailed,
    Instruction,
    ParticipantDropped,
    Phase,
    PhaseOrder,
    ProcessQuestion,
    RanksRestored,
    RunReady,
    SessionOpened,
    SessionState,
)


@dataclass(frozen=True, slots=True)
class Totals:
    """Samples that had to move in an epoch, packets that carried them, and rows in these packets."""

    needed: int
    packets: int
    expected: int

    @classmethod
    def of(cls, counts: Collection[Counts]) -> Self:
        """Sums over workers that planned their own parts, else what all of them found."""
        first = next(iter(counts))
        summed = counts if first.leaving is not None else [first]
        return cls(*(sum(getattr(member, field.name) for member in summed) for field in dataclasses.fields(cls)))


def check_votes(epoch: int, counts: Collection[Counts]) -> str | None:
    """What is wrong with the counts of all participants, or None.

    They must have the same plan, together train on every sample that is due exactly once, and have all their rows.
    """
    if len({member.digest for member in counts}) > 1:
        return f"epoch {epoch}: the workers made different plans. {SAME_BUILD}"
    drew = SampleDigest.summed(member.drawn.fields for member in counts if member.drawn is not None)
    due = SampleDigest.summed(member.due.fields for member in counts if member.due is not None)
    if drew != due:
        samples = f"as many samples as are due ({due.count}), but not the same ones"
        if drew.count != due.count:
            samples = f"{drew.count} samples, but {due.count} are due"
        return (
            f"epoch {epoch}: the workers drew {samples}. Some samples would be trained on twice, or not at all. "
            f"Workers draw differently if their builds of dshuffle differ. {SAME_BUILD}"
        )
    expected = Totals.of(counts).expected
    arrived = sum(member.rows for member in counts)
    if arrived != expected:
        return f"epoch {epoch}: {arrived} rows arrived, but {expected} were expected"
    leaving = sum(member.leaving or 0 for member in counts)
    arriving = sum(member.arriving or 0 for member in counts)
    if leaving != arriving:
        return f"epoch {epoch}: the workers planned to send {leaving} rows and to receive {arriving}. {SAME_BUILD}"
    return None


ATTEMPTS = 3
"""Runs of one epoch before its exchange counts as failed."""


def open_members(state: SessionState, event: events.OpenCall, now: float) -> list[Instruction]:
    """Let all participants open the session."""
    return state.enter(Phase.OPENING, now)


def be_open(state: SessionState, event: events.AllAnswers, now: float) -> list[Instruction]:
    """All participants have opened the session."""
    state.phase = Phase.IDLE
    return [SessionOpened()]


def prefetch(state: SessionState, event: events.BeginCall, now: float) -> list[Instruction]:
    """Begin the exchange of the next epoch before the client waits for it."""
    # If the last prefetch has failed, the client hears of it first.
    return [] if state.unreported is not None else state.begin_run(now, 1)


def fetch(state: SessionState, event: events.AdvanceCall, now: float) -> list[Instruction]:
    """Begin the exchange of the next epoch, for which the client waits."""
    return state.become_idle(now)


def commit(state: SessionState, event: events.AdvanceCall, now: float) -> list[Instruction]:
    """Let all participants swap to the epoch, because all are ready."""
    return state.enter(Phase.COMMITTING, now)


def wait_for_commit(state: SessionState, event: events.AdvanceCall, now: float) -> list[Instruction]:
    """Let the client wait for a commit once more. An earlier call failed because tasks were still running."""
    state.silence.extend(now)
    return []


def compare_votes(state: SessionState, event: events.AllVotes, now: float) -> list[Instruction]:
    """All participants are ready. Abort the run if what they counted does not fit together."""
    run = state.run
    assert run is not None
    run.ready_after = now - run.started
    mismatch = check_votes(run.epoch, run.votes.values())
    if mismatch is not None:
        return abort(state, events.RunFailure(ExchangeError(mismatch, transient=False), again=False), now)
    state.phase = Phase.READY
    ready: list[Instruction] = [RunReady(run)]
    return ready + state.enter(Phase.COMMITTING, now) if state.client_waits else ready


def abort(state: SessionState, event: events.RunFailure, now: float) -> list[Instruction]:
    """Abort a run that has failed. All participants stay on the previous epoch."""
    state.failure = event
    return state.enter(Phase.ABORTING, now)


def abort_refused(state: SessionState, event: events.Refusal, now: float) -> list[Instruction]:
    """Abort a run that a participant cannot begin."""
    return abort(state, events.RunFailure(event.error, again=False), now)


def leave_aborted(state: SessionState, event: events.AllAnswers, now: float) -> list[Instruction]:
    """All participants have aborted the run: replace those that are lost, try again, or say why the epoch failed."""
    run, failure = state.run, state.failure
    if state.losses:
        state.failure, state.repeats_run = None, True
        return state.search(now)
    assert run is not None
    assert failure is not None
    state.failure = None
    if failure.again and run.attempt < ATTEMPTS:
        return state.begin_run(now, run.attempt + 1)
    state.phase, state.run = Phase.IDLE, None
    if not state.client_waits:
        state.unreported = failure.error
        return []
    state.client_waits = False
    return [EpochFailed(failure.error)]


def complete_commit(state: SessionState, event: events.AllAnswers, now: float) -> list[Instruction]:
    """All participants are on the next epoch."""
    run = state.run
    assert run is not None
    state.phase, state.epoch, state.run, state.client_waits = Phase.IDLE, run.epoch, None, False
    state.digests = {rank: counts.drawn for rank, counts in run.votes.items() if counts.drawn is not None}
    state.loss_counts.clear()
    committed: list[Instruction] = [EpochCommitted(run, state.answers.reports)]
    return committed + (state.search(now) if state.losses else [])


def end_commit(state: SessionState, event: events.Refusal, now: float) -> list[Instruction]:
    """End the session: some participants have swapped, and one cannot."""
    words = f"all workers were ready for epoch {state.epoch + 1}, but the commit failed: {event.error}"
    return state.end(ClusterError(words, transient=event.error.transient))


def end_session(state: SessionState, event: events.Refusal | events.Closure, now: float) -> list[Instruction]:
    """End the session with the error of the event."""
    return state.end(event.error)


def end_lost(state: SessionState, event: events.Loss | events.FinalLoss, now: float) -> list[Instruction]:
    """End the session, because it cannot go on without a participant that is lost."""
    error = worker_lost(event.clauses.values(), searched=bool(state.losses))
    _note(state, event)
    return state.end(error)


def search_at_once(state: SessionState, event: events.Loss, now: float) -> list[Instruction]:
    """Search for other workers: nothing is under way that has to end first."""
    _note(state, event)
    return state.search(now)


def abort_lost(state: SessionState, event: events.Loss, now: float) -> list[Instruction]:
    """Abort the run before other workers are searched for. It is repeated with them."""
    _note(state, event)
    state.failure, state.repeats_run = None, True
    return state.enter(Phase.ABORTING, now)


def excuse_lost(state: SessionState, event: events.Loss, now: float) -> list[Instruction]:
    """Let the phase end without the answers of lost participants."""
    _note(state, event)
    state.answers.owing -= event.clauses.keys()
    return []


def _note(state: SessionState, event: events.Loss | events.FinalLoss) -> None:
    state.losses |= event.clauses
    state.newcomers -= event.clauses.keys()
    state.kept -= event.clauses.keys()


def take_rank(state: SessionState, event: events.Replacement, now: float) -> list[Instruction]:
    """Let another worker take a lost rank. Once all ranks are taken, they are restored together."""
    rank = event.participant
    del state.losses[rank]
    state.newcomers.add(rank)
    if event.kept:
        state.kept.add(rank)
    return [] if state.losses else state.enter(Phase.RESTORING, now)


def go_without(state: SessionState, event: events.NoReplacement, now: float) -> list[Instruction]:
    """Drop lost participants that are optional, or end the session."""
    if set(event.participants) - state.optional:
        return state.end(worker_lost(loss_clauses(state), searched=True))
    dropped: list[Instruction] = [ParticipantDropped(participant) for participant in event.participants]
    state.participants = tuple(rank for rank in state.participants if rank not in event.participants)
    for participant in event.participants:
        del state.losses[participant]
    if state.losses:
        return dropped
    if state.newcomers:
        return dropped + state.enter(Phase.RESTORING, now)
    state.search_began = math.inf
    return dropped + state.become_idle(now)


def search_again(state: SessionState, event: events.Refusal, now: float) -> list[Instruction]:
    """Search for another worker, because the one that was to take a rank cannot."""
    rank = event.participant
    state.newcomers.discard(rank)
    state.kept.discard(rank)
    state.losses[rank] = f"{state.name_of(rank)} cannot take a lost rank ({event.error})"
    state.unfit_reasons[rank] = state.losses[rank]
    return state.search(now)


def inform(state: SessionState, event: events.AllAnswers, now: float) -> list[Instruction]:
    """The newcomers hold their partitions. Tell all others the new addresses, if there are any others."""
    if len(state.newcomers) < len(state.participants):
        return state.enter(Phase.INFORMING, now)
    return complete_replacement(state, event, now)


def complete_replacement(state: SessionState, event: events.AllAnswers, now: float) -> list[Instruction]:
    """All participants know the new addresses: go on, or replace those that were lost meanwhile."""
    restored: list[Instruction] = [RanksRestored(tuple(sorted(state.newcomers)))]
    state.newcomers, state.kept = set(), set()
    state.unfit_reasons.clear()
    state.search_began = math.inf
    return restored + (state.search(now) if state.losses else state.become_idle(now))


def loss_clauses(state: SessionState) -> list[str]:
    """How participants were lost, and why other workers could not take their ranks."""
    clauses = []
    for rank, clause in state.losses.items():
        reason = state.unfit_reasons.get(rank, "")
        clauses.append(clause if reason in clause else f"{clause}; {reason}")
    return clauses


def worker_lost(clauses: Iterable[str], *, searched: bool) -> WorkerLost:
    """The error of a session that ends because workers were lost, with a clause for each of them."""
    replacing = "No other worker could take the rank. " if searched else ""
    return WorkerLost(
        f"{'; '.join(clauses)}. {replacing}The session has ended, and the dataset is unchanged. Make a new Shuffler on "
        "the remaining workers"
    )


Handler = Callable[[SessionState, Any, float], list[Instruction]]


class IllegalTransition(RuntimeError):
    """An event that cannot happen in a phase, or leads to a phase that it must not lead to: a bug."""


@dataclass(frozen=True, slots=True)
class Transition:
    """What an event does in a phase.

    Parameters
    ----------
    handler
        Carries it out on the state, and returns instructions. It may set ``state.phase``.
    targets
        Phases in which the session may be afterwards, each with its condition in words.
    """

    handler: Handler
    targets: Mapping[Phase, str]


def ignore(state: SessionState, event: events.Event, now: float) -> list[Instruction]:
    """Do nothing: the event comes too late, or asks for what the session does already."""
    return []


NEW, OPENING, IDLE, EXCHANGING, READY, COMMITTING, ABORTING, WAITING, RESTORING, INFORMING, ENDED = Phase
OPEN = tuple(phase for phase in Phase if phase not in (NEW, ENDED))

# fmt: off
ROWS: tuple[tuple[tuple[Phase, ...], type[events.Event], Handler, dict[Phase, str]], ...] = (
    # The session is opened.
    ((NEW,), events.OpenCall, open_members, {OPENING: ""}),
    ((OPENING,), events.AllAnswers, be_open, {IDLE: ""}),
    ((OPENING,), events.Refusal, end_session, {ENDED: ""}),
    ((OPENING,), events.Loss, end_lost, {ENDED: ""}),
    # Rows are exchanged.
    ((IDLE,), events.BeginCall, prefetch,
        {EXCHANGING: "", IDLE: "a failure is reported first"}),
    ((IDLE,), events.AdvanceCall, fetch, {EXCHANGING: ""}),
    ((EXCHANGING,), events.AllVotes, compare_votes,
        {READY: "", COMMITTING: "the client waits", ABORTING: "the votes do not fit together"}),
    # All swap to the epoch.
    ((READY,), events.AdvanceCall, commit, {COMMITTING: ""}),
    ((COMMITTING,), events.AdvanceCall, wait_for_commit, {}),
    ((COMMITTING,), events.AllAnswers, complete_commit, {IDLE: "", WAITING: "a participant is lost"}),
    ((COMMITTING,), events.Refusal, end_commit, {ENDED: ""}),
    # A run has failed.
    ((EXCHANGING,), events.RunFailure, abort, {ABORTING: ""}),
    ((EXCHANGING,), events.Refusal, abort_refused, {ABORTING: ""}),
    ((ABORTING,), events.AllAnswers, leave_aborted,
        {EXCHANGING: "another run can succeed", IDLE: "the epoch has failed", WAITING: "a participant is lost"}),
    ((ABORTING,), events.Refusal, end_session, {ENDED: ""}),
    # Participants are lost.
    ((IDLE, WAITING, RESTORING), events.Loss, search_at_once, {WAITING: ""}),
    ((EXCHANGING, READY), events.Loss, abort_lost, {ABORTING: ""}),
    ((COMMITTING, ABORTING, INFORMING), events.Loss, excuse_lost, {}),
    (OPEN, events.FinalLoss, end_lost, {ENDED: ""}),
    # Other workers take lost ranks.
    ((WAITING,), events.Replacement, take_rank, {RESTORING: "all ranks are taken", WAITING: "others are lost"}),
    ((WAITING,), events.NoReplacement, go_without,
        {ENDED: "somebody is needed", WAITING: "nobody is needed, and others are lost",
         RESTORING: "nobody is needed, and other ranks are taken", IDLE: "nobody is needed",
         EXCHANGING: "nobody is needed, and a run is due"}),
    ((RESTORING,), events.AllAnswers, inform,
        {INFORMING: "there are others", IDLE: "there are no others",
         EXCHANGING: "there are no others, and a run is due"}),
    ((RESTORING,), events.Refusal, search_again, {WAITING: ""}),
    ((INFORMING,), events.AllAnswers, complete_replacement,
        {IDLE: "", EXCHANGING: "a run is due", WAITING: "a participant is lost"}),
    ((INFORMING,), events.Refusal, end_session, {ENDED: ""}),
    # The driver ends the session.
    ((NEW, *OPEN), events.Closure, end_session, {ENDED: ""}),
    # The event is late or superfluous.
    ((OPENING, EXCHANGING, READY, COMMITTING, ABORTING, WAITING, RESTORING, INFORMING, ENDED), events.BeginCall,
        ignore, {}),
    ((OPENING, EXCHANGING, ABORTING, WAITING, RESTORING, INFORMING), events.AdvanceCall, ignore, {}),
    ((COMMITTING, ABORTING, INFORMING, ENDED), events.Replacement, ignore, {}),
    ((COMMITTING, ABORTING, INFORMING, ENDED), events.NoReplacement, ignore, {}),
    ((ENDED,), events.Loss, ignore, {}),
    ((ENDED,), events.FinalLoss, ignore, {}),
    ((ENDED,), events.Closure, ignore, {}),
)
# fmt: on
"""Phases, an event, what the event does in them, and the phases that may follow, each with its condition."""

TRANSITIONS = {
    (phase, event): Transition(handler, targets or {phase: ""})
    for phases, event, handler, targets in ROWS
    for phase in phases
}
"""The table that the session machine runs."""


def take(state: SessionState, event: events.Event, now: float) -> list[Instruction]:
    """Let an event happen, and then what follows from it: that nobody owes an answer any longer.

    Raises
    ------
    IllegalTransition
        If the table does not have the event in this phase, or not the phase that follows.
    """
    phase = state.phase
    transition = TRANSITIONS.get((phase, type(event)))
    if transition is None:
        raise IllegalTransition(f"a session in the phase {phase.name} cannot take the event {event}")
    instructions = transition.handler(state, event, now)
    if state.phase not in transition.targets:
        raise IllegalTransition(f"the event {event} must not lead from the phase {phase.name} to {state.phase.name}")
    return instructions + follow(state, now)


def follow(state: SessionState, now: float) -> list[Instruction]:
    """Let happen what follows once nobody owes an answer."""
    if state.phase not in OWING or state.answers.owing:
        return []
    return take(state, events.AllVotes() if state.phase is EXCHANGING else events.AllAnswers(), now)


MOST_LOSSES = 10
"""How often the worker of a rank may be lost in one epoch, unless it retires. Each time, the rank's task runs again."""

STATUS = "status"
"""Name of the order that asks a participant for its state."""


class SessionMachine(SessionState):
    """The state machine of a session. See :class:`SessionState` for its parameters."""

    @property
    def busy(self) -> bool:
        """Whether participants owe answers, so that time matters."""
        return self.phase in OWING or self.phase is Phase.WAITING

    def owes_rows(self, participant: int) -> bool:
        """Whether a participant still exchanges rows of the next epoch."""
        return self.phase is Phase.EXCHANGING and participant in self.answers.owing

    def open(self, now: float) -> list[Instruction]:
        """Open the session on all participants."""
        return take(self, events.OpenCall(), now)

    def begin(self, now: float) -> list[Instruction]:
        """Start the next epoch's exchange unless it has already started."""
        return take(self, events.BeginCall(), now)

    def advance(self, now: float) -> list[Instruction]:
        """Let all participants swap to the next epoch once they are ready for it."""
        error = self.error or self.unreported
        if error is not None:
            self.unreported = None
            return [EpochFailed(error)]
        self.client_waits = True
        return take(self, events.AdvanceCall(), now)

    def voted(self, run_id: int, participant: int, vote: Vote, now: float) -> list[Instruction]:
        """Record the vote of a participant on a run. It may come twice: by itself, and as an answer."""
        self.silence.hear(participant, now)
        run = self.run
        if run is None or run.run_id != run_id or not self.owes_rows(participant):
            return []
        if vote.reason is not None or vote.counts is None:
            words = f"epoch {run.epoch} could not be exchanged: {self.name_of(participant)}: {vote.reason}"
            return take(self, events.RunFailure(ExchangeError(words), vote.again), now)
        run.votes[participant] = vote.counts
        self.answers.owing.discard(participant)
        return follow(self, now)

    def alive(self, participant: int, when: float) -> None:
        """Note that a participant was alive at a time: it has said so, or bytes of it have arrived at another one."""
        self.silence.hear(participant, when)

    def note_running(self, question: ProcessQuestion, now: float) -> list[Instruction]:
        """Note that the process of a silent participant runs. So the participant may be busy, and is not lost."""
        if question.turn == self.turn and question.participant in self.answers.owing:
            self.silence.excuse(question.participant, now)
            self.answers.note_running(question.participant)
        return []

    def answered(self, order: PhaseOrder, answer: Answer, now: float) -> list[Instruction]:
        """Record that a participant has carried out an order, or what it says of its state."""
        participant = order.participant
        if order.turn != self.turn:
            return []
        self.silence.hear(participant, now)
        self.answers.reached(participant)
        if isinstance(answer, MemberState):
            return self._described(participant, answer, now)
        if not self.is_due(order) or self.phase is Phase.EXCHANGING:  # participants answer the order to begin by votes
            return []
        if answer is not None and answer.busy is not None:
            self.answers.busy(participant, answer.busy)
        else:
            self.answers.carried_out(participant, None if answer is None else answer.report)
        return follow(self, now)

    def _described(self, participant: int, state: MemberState, now: float) -> list[Instruction]:
        """Use a participant's description of its state: it may contain a vote, or show that it missed an order."""
        run = self.run
        if participant not in self.answers.owing:  # it has answered since
            return []
        if not state.open:
            opening = self.phase is Phase.OPENING or participant in self.newcomers
            return [] if opening else self.lost([participant], "no longer has the session open", now)
        if run is None or self.phase is not Phase.EXCHANGING:
            return []
        if state.run_id != run.run_id:
            return [self.order(Phase.EXCHANGING.value, participant)]
        self.answers.arrived[participant] = state.arrived
        return [] if state.vote is None else self.voted(run.run_id, participant, state.vote, now)

    def refused(self, order: PhaseOrder, error: DShuffleError, now: float) -> list[Instruction]:
        """Record that a participant cannot carry out an order."""
        if not self.is_due(order):
            return []
        self.silence.hear(order.participant, now)
        return take(self, events.Refusal(order.participant, error), now)

    def unreachable(self, order: PhaseOrder, reason: str) -> None:
        """Record that an order may not have reached a participant. It is sent again at a later :meth:`tick`."""
        if order.turn == self.turn:
            self.answers.unreachable(order.participant, reason)

    def is_due(self, order: PhaseOrder) -> bool:
        """Whether an order was given in this phase, and has not been answered."""
        current = self.phase in OWING and order.turn == self.turn and order.name == self.phase.value
        return current and order.participant in self.answers.owing

    def lost(self, participants: Iterable[int], reason: str, now: float, *, retires: bool = False) -> list[Instruction]:
        """Replace participants that have left the cluster or do not answer, or end the session."""
        new = [participant for participant in participants if participant not in self.losses]
        if not new:
            return []
        clauses = {participant: f"{self.name_of(participant)} {reason}" for participant in new}
        self.loss_counts.update(() if retires else new)
        needed = [participant for participant in new if participant not in self.optional]
        often = [participant for participant in needed if self.loss_counts[participant] > MOST_LOSSES]
        for participant in often:
            times = f"for the {self.loss_counts[participant]}th time in one epoch"
            clauses[participant] += f", {times}. Perhaps a task blocks or ends its worker"
        somebody_is_left = {*self.losses, *new} < set(self.participants)
        replaceable = self.replaceable.issuperset(new) and somebody_is_left and not often
        return take(self, events.Loss(clauses) if replaceable else events.FinalLoss(clauses), now)

    def replaced(self, participant: int, now: float, *, kept: bool = False) -> list[Instruction]:
        """Record that another worker takes a lost rank; ``kept`` if the lost one answers again, with its partition."""
        return take(self, events.Replacement(participant, kept), now) if participant in self.losses else []

    def not_replaced(self, participants: Iterable[int], now: float) -> list[Instruction]:
        """Go on without lost participants, or end the session, because no other worker can come for them."""
        lost = self.losses.keys() & set(participants)
        return take(self, events.NoReplacement(lost), now) if lost else []

    def note_unfit(self, participant: int, reason: str) -> None:
        """Note why another worker cannot take a lost rank. The error has it if no worker comes."""
        self.unfit_reasons[participant] = reason

    def close(self, error: DShuffleError, now: float) -> list[Instruction]:
        """End the session."""
        return take(self, events.Closure(error), now)

    def tick(self, now: float) -> list[Instruction]:
        """Let time pass. Participants that owe an answer are asked, and silent participants are given up."""
        self.search_began += self.silence.tick(now)
        if self.phase is Phase.WAITING and now - self.search_began >= self.replacement_timeout:
            return self.not_replaced(self.losses, now)
        if self.phase not in OWING:
            return []
        instructions: list[Instruction] = []
        for participant in sorted(self.answers.owing):
            if self.silence.is_lost(participant, now):
                return instructions + self.lost([participant], self._silence_in_words(participant, now), now)
            if self.silence.is_due(participant, now):
                repeats = self.answers.pop_repeat(participant)
                instructions.append(self.order(self.phase.value if repeats else STATUS, participant))
                if repeats and self.phase is Phase.EXCHANGING:  # a vote may have been lost as well
                    instructions.append(self.order(STATUS, participant))
                silent_seconds = self.silence.seconds(participant, now)
                if silent_seconds >= self.heartbeat / 3:
                    instructions.append(ProcessQuestion(participant, silent_seconds, self.turn))
        if self.phase is Phase.COMMITTING and self.client_waits and self.silence.lasts(now) >= self.timeout:
            self.client_waits = False
            instructions.append(EpochFailed(ExchangeError(f"the next epoch cannot begin: {self.waiting_for()}")))
        return instructions

    def _silence_in_words(self, participant: int, now: float) -> str:
        if self.silence.is_excused(participant, now):
            return f"has not answered for {self.timeout:g} s (dshuffle.timeout), although its process runs"
        limit, seconds = "dshuffle.heartbeat", self.heartbeat
        if self.silence.was_excused(participant):
            limit, seconds = "dshuffle.stopped-timeout if it has no nanny", self.silence.seconds(participant, now)
        return f"has not answered for {seconds:.3g} s ({limit}){self.answers.why_unreachable(participant)}"

    def waiting_for(self) -> str:
        """Whom the session waits for, in words; empty if it does not wait."""
        if self.phase is Phase.WAITING:
            return f"waiting for other workers to replace {', '.join(map(self.name_of, sorted(self.losses)))}"
        if self.phase not in OWING or not self.answers.owing:
            return ""
        if self.phase is Phase.COMMITTING and self.epoch < self.first_epoch:
            purpose = f"to begin epoch {self.first_epoch}"  # there is none to end
        else:
            purpose = PURPOSE[self.phase].format(self.epoch + 1 if self.phase is Phase.EXCHANGING else self.epoch)
        return f"waiting {purpose}: {self.answers.in_words(self.name_of)}"
