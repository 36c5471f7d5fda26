"""The state machine of a session, as its driver uses it.

It uses no comm, clock or task: whoever drives it passes the time in, and carries out the instructions. Tests take it
through any order of events. An epoch has two phases. First every participant receives rows into free slots and votes.
Once all are ready and the client waits for the epoch, all are ordered to swap. If a run fails, it is aborted
everywhere, and all participants stay on the previous epoch.

The methods of :class:`SessionMachine` ignore messages that are out of date. Of the others they make events, and
:mod:`.transitions` has the table of what an event does in each phase.

Every wait for an answer has a limit. A participant that owes an answer is asked for its state every third of a
heartbeat, in case a vote or an order was lost on the way. A participant that says nothing for a heartbeat is lost,
unless its process is known to run.
"""

from __future__ import annotations

from collections.abc import Iterable

from dshuffle.errors import DShuffleError, ExchangeError
from dshuffle.runtime.messages import Answer, MemberState, Vote
from dshuffle.runtime.scheduler.machine import events
from dshuffle.runtime.scheduler.machine.instructions import EpochFailed, Instruction, PhaseOrder, ProcessQuestion
from dshuffle.runtime.scheduler.machine.losses import loss_clauses, worker_lost
from dshuffle.runtime.scheduler.machine.phases import OWING, PURPOSE, Phase
from dshuffle.runtime.scheduler.machine.state import SessionState
from dshuffle.runtime.scheduler.machine.transitions import follow, take

MOST_LOSSES = 10
"""How often the worker of a rank may be lost in one epoch, unless it retires. Each time, the rank's task runs again."""

STATUS = "status"
"""Name of the order that asks a participant for its state."""


class SessionMachine(SessionState):
    """The state machine of a session. See :class:`SessionState` for its parameters.

    Examples
    --------
    >>> machine = SessionMachine([0], first_epoch=0, heartbeat=15, timeout=300, name_of="rank {}".format)
    >>> machine.open(now=0.0)
    [PhaseOrder(name='open', participant=0, run_id=0, turn=1)]
    >>> machine.answered(PhaseOrder("open", 0, 0, turn=1), None, now=0.1)
    [SessionOpened()]
    >>> machine.advance(now=0.2)
    [PhaseOrder(name='begin', participant=0, run_id=1, turn=2)]
    """

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

    def replaced(self, participant: int, now: float, *, adopted: bool = False, kept: bool = False) -> list[Instruction]:
        """Record that another worker takes a lost rank.

        ``adopted`` if that is a participant; ``kept`` if the lost worker answers again, with its partition.
        """
        return take(self, events.Replacement(participant, adopted, kept), now) if participant in self.losses else []

    def not_replaced(self, participants: Iterable[int], now: float) -> list[Instruction]:
        """Go on without lost participants, or end the session, because no other worker can come for them."""
        lost = self.losses.keys() & set(participants)
        return take(self, events.NoReplacement(lost), now) if lost else []

    def not_adopted(self, now: float) -> list[Instruction]:
        """End the session, because no participant can adopt the lost ranks."""
        return self.close(worker_lost(loss_clauses(self), searched=True), now)

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
