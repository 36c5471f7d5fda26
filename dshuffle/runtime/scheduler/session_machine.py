"""The scheduler's side of a session as a state machine: events in, instructions out.

It uses no comm, clock or task: whoever drives it passes the time in, and carries out the instructions. Tests take it
through any order of events. An epoch has two phases. First every participant receives rows into free slots and votes.
Once all are ready and the client asks for the epoch, all are told to swap. If a run fails, it is aborted everywhere,
and all participants stay on the previous epoch. The next attempt has a new run id, so old messages can be refused.

========== ============================================== =====================================
phase      event                                          next phase
========== ============================================== =====================================
opening    all have answered                              idle
idle       begin, advance                                 exchanging
exchanging all have voted ready                           ready, or committing if it is wanted
exchanging refused, a failed vote, or different plans     aborting
ready      advance                                        committing
committing all have answered                              idle, at the next epoch
aborting   all have answered                              exchanging again, or idle with an error
any        lost, or silent for a heartbeat                ended, or (below) aborting and then waiting
waiting    replacements have come                         restoring
waiting    no replacement in time                         ended, or on without participants that are optional,
                                                          or restoring, if others adopt the lost ranks
restoring  the replacements hold their partitions         informing
restoring  refused                                        waiting
informing  the others know the new addresses              idle, exchanging again, or waiting for others
any other  refused                                        ended
========== ============================================== =====================================

If lost workers are replaced, the participants that are left first come to an end: of the commit, if it has begun, else
of the run, which is aborted. So all of them are on the same epoch. Then other workers take the lost ranks. Each reads
the partition of its rank for that epoch again. If a participant has adopted a rank beside its own, the session
stays on this epoch, and its client opens another one with fewer workers.

Every wait for an answer has a limit. A participant that owes one is asked for its state every third of a heartbeat, in
case a vote or an order was lost on the way. A participant that says nothing for a heartbeat is lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from dshuffle.errors import ClusterError, DShuffleError, ExchangeError, MembershipChanged
from dshuffle.planning.sample_digest import SampleDigest
from dshuffle.runtime.messages import Answer, MemberState, Vote
from dshuffle.runtime.scheduler.answers import Answers
from dshuffle.runtime.scheduler.heartbeat import Silence
from dshuffle.runtime.scheduler.instructions import (
    ATTEMPTS,
    OWING,
    PURPOSE,
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
    worker_lost,
)
from dshuffle.runtime.scheduler.votes import check_votes


class SessionMachine:
    """The phase of a session, and who owes an answer.

    Parameters
    ----------
    participants
        All ranks, and the server if it is dedicated. Each has one vote.
    first_epoch
        Number of the first epoch.
    heartbeat
        Seconds of silence after which a participant that owes an answer is lost.
    timeout
        Seconds after which a call of the client fails if the commit still waits for tasks of the previous epoch. The
        commit goes on.
    who_is
        Name and address of a participant, for errors.
    replaceable
        Participants that another worker can replace.
    replacement_timeout
        Seconds to wait for replacements.
    optional
        Participants without which the session can go on if no other worker replaces them.
    shrinks
        Whether other participants can adopt a rank that no other worker takes.

    Examples
    --------
    >>> machine = SessionMachine([0], first_epoch=0, heartbeat=15, timeout=300, who_is="rank {}".format)
    >>> machine.open(now=0.0)
    [Tell(order='open', who=0, run_id=0, turn=1)]
    >>> machine.answered(Tell("open", 0, 0, turn=1), None, now=0.1)
    [Opened()]
    >>> machine.advance(now=0.2)
    [Tell(order='begin', who=0, run_id=1, turn=2)]
    """

    def __init__(
        self,
        participants: Iterable[int],
        *,
        first_epoch: int,
        heartbeat: float,
        timeout: float,
        who_is: Callable[[int], str],
        replaceable: Iterable[int] = (),
        replacement_timeout: float = 60.0,
        optional: Iterable[int] = (),
        shrinks: bool = False,
    ) -> None:
        self.participants = tuple(participants)
        self.first_epoch = first_epoch
        self.epoch = first_epoch - 1
        self.phase = Phase.IDLE
        self.run: Run | None = None
        self.error: DShuffleError | None = None
        self._heartbeat = heartbeat
        self._timeout = timeout
        self._who_is = who_is
        self._replaceable = frozenset(replaceable)
        self._replacement_timeout = replacement_timeout
        self._optional = frozenset(optional)
        self._shrinks = shrinks
        self._adoptions: Counter[int] = Counter()  # how often other participants were to adopt a rank
        self.drawn: dict[int, SampleDigest] = {}  # digest of the samples that each rank trains on in the epoch
        self.adopted: set[int] = set()  # ranks whose workers have another rank as well
        self._missing: dict[int, str] = {}  # lost ranks, and how they were lost
        self._new: set[int] = set()
        self._unfit: dict[int, str] = {}  # why other workers could not take a lost rank
        self._replacing_since = math.inf
        self._begin_again = False  # whether a run was aborted because of a lost worker
        self._runs = 0
        self.turn = 0  # number of the phases in which participants owe answers
        self._wanted = False  # whether the client waits for the next epoch
        self._failure: tuple[DShuffleError, bool] | None = None  # of the run that is being aborted
        self._untold: DShuffleError | None = None  # an epoch failed while the client did not wait for it
        self._answers = Answers()
        self._silence = Silence(heartbeat)

    @property
    def wanted(self) -> bool:
        """Whether the client waits for the next epoch."""
        return self._wanted

    @property
    def busy(self) -> bool:
        """Whether participants owe answers, so that time matters."""
        return self.phase in OWING or self.phase is Phase.WAITING

    @property
    def unsettled(self) -> frozenset[int]:
        """Participants that are lost and being replaced, or whose new workers do not hold their partitions yet."""
        return frozenset(self._missing) | self._new

    @property
    def new(self) -> frozenset[int]:
        """Replacements that do not hold their partitions yet, or are not known to the others."""
        return frozenset(self._new)

    @property
    def settled(self) -> list[int]:
        """Participants that hold their partitions, or serve."""
        return [who for who in self.participants if who not in self.unsettled]

    @property
    def missing(self) -> tuple[int, ...]:
        """Lost ranks that still wait for a replacement."""
        return tuple(sorted(self._missing)) if self.phase is Phase.WAITING else ()

    def owes_rows(self, who: int) -> bool:
        """Whether a participant still exchanges rows of the next epoch."""
        return self.phase is Phase.EXCHANGING and who in self._answers.owing

    def open(self, now: float) -> list[Instruction]:
        """Open the session on all participants."""
        return self._order(Phase.OPENING, now)

    def begin(self, now: float) -> list[Instruction]:
        """Start the next epoch's exchange unless it has already started."""
        if self.phase is not Phase.IDLE or self._untold is not None or self.adopted:
            return []
        return self._new_run(now, 1)

    def advance(self, now: float) -> list[Instruction]:
        """Let all participants swap to the next epoch once they are ready for it."""
        if self.error is not None:
            return [EpochFailed(self.error)]
        if self._untold is not None:
            error, self._untold = self._untold, None
            return [EpochFailed(error)]
        self._wanted = True
        if self.phase is Phase.IDLE:
            return self._go_on(now)
        if self.phase is Phase.READY:
            return self._order(Phase.COMMITTING, now)
        if self.phase is Phase.COMMITTING:  # it failed before, because tasks were still running
            self._silence.extend(now)
        return []

    def voted(self, run_id: int, who: int, vote: Vote, now: float) -> list[Instruction]:
        """Record the vote of a participant on a run. It may come twice: by itself, and as an answer."""
        self._silence.hear(who, now)
        run = self.run
        if run is None or run.run_id != run_id or self.phase is not Phase.EXCHANGING or who not in self._answers.owing:
            return []
        if vote.reason is not None or vote.counts is None:
            error = ExchangeError(f"epoch {run.epoch} could not be exchanged: {self._who_is(who)}: {vote.reason}")
            return self._fail(error, vote.again, now)
        run.votes[who] = vote.counts
        self._answers.owing.discard(who)
        if self._answers.owing:
            return []
        run.ready_after = now - run.started
        wrong = check_votes(run.epoch, run.votes.values())
        if wrong is not None:
            return self._fail(ExchangeError(wrong, transient=False), False, now)
        self.phase = Phase.READY
        ready: list[Instruction] = [AllReady(run)]
        return ready + self._order(Phase.COMMITTING, now) if self._wanted else ready

    def alive(self, participant: int, when: float) -> None:
        """Note that a participant was alive at a time: it has said so, or bytes of it have arrived at another one."""
        self._silence.hear(participant, when)

    def answered(self, tell: Tell, answer: Answer, now: float) -> list[Instruction]:
        """Record that a participant has carried out an order, or what it says of its state."""
        who = tell.who
        if tell.turn != self.turn:
            return []
        self._silence.hear(who, now)
        self._answers.reached(who)
        if isinstance(answer, MemberState):
            return self._told_state(who, answer, now)
        if not self.is_due(tell) or self.phase is Phase.EXCHANGING:
            return []
        if answer is not None and answer.busy is not None:
            self._answers.busy(who, answer.busy)
        else:
            self._answers.carried_out(who, None if answer is None else answer.report)
        return [] if self._answers.owing else self._all_answered(now)

    def refused(self, tell: Tell, error: DShuffleError, now: float) -> list[Instruction]:
        """Record that a participant cannot carry out an order."""
        if not self.is_due(tell):
            return []
        self._silence.hear(tell.who, now)
        if self.phase is Phase.EXCHANGING:
            return self._fail(error, False, now)
        if self.phase is Phase.RESTORING:  # perhaps another worker can
            self._new.discard(tell.who)
            self._missing[tell.who] = f"{self._who_is(tell.who)} cannot take a lost rank ({error})"
            self.unfit(tell.who, self._missing[tell.who])
            return self._wait_for_replacements(now)
        if self.phase is Phase.COMMITTING:
            words = f"all workers were ready for epoch {self.epoch + 1}, but the commit failed: {error}"
            error = ClusterError(words, transient=error.transient)
        return self.end(error)

    def unreachable(self, tell: Tell, reason: str) -> None:
        """Record that an order may not have reached a participant. It is sent again at a later :meth:`tick`."""
        if tell.turn == self.turn:
            self._answers.unreachable(tell.who, reason)

    def lost(self, who: Iterable[int], reason: str, now: float) -> list[Instruction]:
        """Replace participants that have left the cluster or do not answer, or end the session."""
        gone = {one: f"{self._who_is(one)} {reason}" for one in who if one not in self._missing}
        if not gone or self.phase is Phase.ENDED:
            return []
        settled = {*self._missing, *gone} < set(self.participants)  # somebody is left
        if self.phase is Phase.OPENING or not gone.keys() <= self._replaceable or not settled:
            return self.end(worker_lost(gone.values(), tried=bool(self._missing)))
        self._missing |= gone
        self._new -= gone.keys()
        if self.phase in (Phase.IDLE, Phase.RESTORING, Phase.WAITING):
            return self._wait_for_replacements(now)
        if self.phase in (Phase.EXCHANGING, Phase.READY):
            self._failure, self._begin_again = None, True
            return self._order(Phase.ABORTING, now)
        self._answers.owing -= gone.keys()
        return [] if self._answers.owing else self._all_answered(now)

    def replaced(self, who: int, now: float, *, adopted: bool = False) -> list[Instruction]:
        """Record that another worker takes a lost rank; ``adopted`` if that is a participant."""
        if self.phase is not Phase.WAITING or self._missing.pop(who, None) is None:
            return []
        self._new.add(who)
        self.adopted = self.adopted | {who} if adopted else self.adopted - {who}
        return [] if self._missing else self._order(Phase.RESTORING, now)

    def unfit(self, who: int, reason: str) -> None:
        """Note why another worker cannot take a lost rank. The error has it if no worker comes."""
        self._unfit[who] = reason

    def _losses(self) -> list[str]:
        """How participants were lost, and why other workers could not take their ranks."""
        reasons = {who: self._unfit.get(who, "") for who in self._missing}
        return [loss if reasons[who] in loss else f"{loss}; {reasons[who]}" for who, loss in self._missing.items()]

    def not_replaced(self, who: Iterable[int], now: float) -> list[Instruction]:
        """Go on without lost participants, or end the session, because no other worker can come for them."""
        given_up = self._missing.keys() & set(who)
        if self.phase is not Phase.WAITING or not given_up:
            return []
        if lost := given_up - self._optional:
            self._adoptions.update(lost)
            if self._shrinks and self.epoch >= self.first_epoch and self._adoptions.most_common(1)[0][1] <= ATTEMPTS:
                return [Adopt(tuple(sorted(lost)))]
            return self.end(worker_lost(self._losses(), tried=True))
        without: list[Instruction] = [GoesOnWithout(one) for one in given_up]
        self.participants = tuple(one for one in self.participants if one not in given_up)
        for one in given_up:
            del self._missing[one]
        if self._missing:
            return without
        if self._new:
            return without + self._order(Phase.RESTORING, now)
        self._replacing_since = math.inf
        return without + self._go_on(now)

    def not_adopted(self) -> list[Instruction]:
        """End the session, because no participant can adopt the lost ranks."""
        return self.end(worker_lost(self._losses(), tried=True))

    def end(self, error: DShuffleError) -> list[Instruction]:
        """End the session."""
        if self.phase is Phase.ENDED:
            return []
        self.phase, self.error, self.run = Phase.ENDED, error, None
        self._answers = Answers()
        return [Ended(error)]

    def tick(self, now: float) -> list[Instruction]:
        """Let time pass. Participants that owe an answer are asked, and silent participants are given up."""
        self._replacing_since += self._silence.tick(now)
        if self.phase is Phase.WAITING and now - self._replacing_since >= self._replacement_timeout:
            return self.not_replaced(self._missing, now)
        if self.phase not in OWING:
            return []
        instructions: list[Instruction] = []
        for who in sorted(self._answers.owing):
            if self._silence.is_lost(who, now):
                silence = f"has not answered for {self._heartbeat:g} s{self._answers.why_unreachable(who)}"
                return instructions + self.lost([who], silence, now)
            if self._silence.is_due(who, now):
                again = self._answers.tell_again(who)
                order = self.phase.value if again else "status"
                instructions.append(self._tell(order, who))
                if again and self.phase is Phase.EXCHANGING:  # a vote may have been lost as well
                    instructions.append(self._tell("status", who))
        if self.phase is Phase.COMMITTING and self._wanted and self._silence.lasts(now) >= self._timeout:
            self._wanted = False
            instructions.append(EpochFailed(ExchangeError(f"the epoch cannot end: {self.waiting_for()}")))
        return instructions

    def waiting_for(self) -> str:
        """Whom the session waits for, in words; empty if it does not wait."""
        if self.phase is Phase.WAITING:
            return f"waiting for other workers to replace {', '.join(map(self._who_is, sorted(self._missing)))}"
        if self.phase not in OWING or not self._answers.owing:
            return ""
        doing = PURPOSE[self.phase].format(self.epoch + 1 if self.phase is Phase.EXCHANGING else self.epoch)
        return f"waiting {doing}: {self._answers.in_words(self._who_is)}"

    def _order(self, phase: Phase, now: float) -> list[Instruction]:
        """Enter a phase, and tell all participants that it concerns."""
        self.phase = phase
        self.turn += 1
        told = [who for who in self.participants if who not in self._missing]
        if phase in (Phase.RESTORING, Phase.INFORMING):
            told = [who for who in told if (who in self._new) == (phase is Phase.RESTORING)]
        self._answers = Answers(told)
        self._silence.begin(now, told)
        return [self._tell(phase.value, who) for who in told]

    def _tell(self, order: str, who: int) -> Tell:
        # A worker that takes a rank must refuse all runs so far: orders to begin them may arrive late.
        run_id = self._runs if order == "restore" else 0 if self.run is None else self.run.run_id
        return Tell(order, who, run_id, self.turn)

    def _new_run(self, now: float, attempt: int) -> list[Instruction]:
        self._runs += 1
        self.run = Run(self._runs, self.epoch + 1, now, attempt)
        return self._order(Phase.EXCHANGING, now)

    def _wait_for_replacements(self, now: float) -> list[Instruction]:
        if self._replacing_since == math.inf:
            self._replacing_since = now
        self.phase, self.run = Phase.WAITING, None
        self._silence.begin(now)
        self._answers = Answers()
        return [Replace(tuple(sorted(self._missing)))]

    def _go_on(self, now: float) -> list[Instruction]:
        """Become idle, or begin the next run at once if it is waited for."""
        self.phase, self.run = Phase.IDLE, None
        again, self._begin_again = self._begin_again, False
        if self.adopted:
            wanted, self._wanted = self._wanted, False
            return [EpochFailed(MembershipChanged(f"epoch {self.epoch + 1} has fewer workers"))] if wanted else []
        return self._new_run(now, 1) if self._wanted or again else []

    def _fail(self, error: DShuffleError, again: bool, now: float) -> list[Instruction]:
        self._failure = error, again
        return self._order(Phase.ABORTING, now)

    def is_due(self, tell: Tell) -> bool:
        """Whether an order was given in this phase, and has not been answered."""
        current = self.phase in OWING and tell.turn == self.turn and tell.order == self.phase.value
        return current and tell.who in self._answers.owing

    def _told_state(self, who: int, state: MemberState, now: float) -> list[Instruction]:
        """Use a participant's description of its state: it may contain a vote, or show that it missed an order."""
        run = self.run
        if who not in self._answers.owing:  # it has answered since
            return []
        if not state.open:
            opening = self.phase is Phase.OPENING or who in self._new
            return [] if opening else self.lost([who], "no longer has the session open", now)
        if run is None or self.phase is not Phase.EXCHANGING:
            return []
        if state.run_id != run.run_id:
            return [self._tell("begin", who)]
        self._answers.arrived[who] = state.arrived
        return [] if state.vote is None else self.voted(run.run_id, who, state.vote, now)

    def _all_answered(self, now: float) -> list[Instruction]:
        if self.phase is Phase.OPENING:
            self.phase = Phase.IDLE
            return [Opened()]
        if self.phase is Phase.RESTORING and len(self._new) < len(self.participants):
            return self._order(Phase.INFORMING, now)
        if self.phase in (Phase.RESTORING, Phase.INFORMING):
            new, self._new = tuple(sorted(self._new)), set()
            self._unfit.clear()
            self._replacing_since = math.inf
            found: list[Instruction] = [Replaced(new)]
            return found + (self._wait_for_replacements(now) if self._missing else self._go_on(now))
        run = self.run
        assert run is not None
        if self.phase is Phase.COMMITTING:
            self.phase, self.epoch, self.run, self._wanted = Phase.IDLE, run.epoch, None, False
            self.drawn = {who: counts.drawn for who, counts in run.votes.items() if counts.drawn is not None}
            committed: list[Instruction] = [Committed(run, self._answers.reports)]
            return committed + (self._wait_for_replacements(now) if self._missing else [])
        if self._missing:
            self._failure, self._begin_again = None, True
            return self._wait_for_replacements(now)
        assert self._failure is not None
        (error, again), self._failure = self._failure, None
        if again and run.attempt < ATTEMPTS:
            return self._new_run(now, run.attempt + 1)
        self.phase, self.run = Phase.IDLE, None
        if not self._wanted:
            self._untold = error
            return []
        self._wanted = False
        return [EpochFailed(error)]
