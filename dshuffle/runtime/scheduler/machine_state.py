"""What the state machine of a session remembers, and its events and instructions.

Nothing here knows Dask, a clock or a comm.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dshuffle.errors import DShuffleError
from dshuffle.planning.remainder import SampleDigest
from dshuffle.runtime.messages import Counts, Report


class Phase(enum.Enum):
    """Phase of a session. The value of a phase in which participants owe an answer is the name of the order."""

    NEW = "new"
    OPENING = "open"
    IDLE = "idle"
    EXCHANGING = "begin"
    READY = "ready"
    COMMITTING = "commit"
    ABORTING = "abort"
    WAITING = "waiting"
    RESTORING = "restore"
    INFORMING = "members"
    ENDED = "ended"


OWING = {Phase.OPENING, Phase.EXCHANGING, Phase.COMMITTING, Phase.ABORTING, Phase.RESTORING, Phase.INFORMING}
"""Phases in which participants owe an answer."""

PURPOSE = {
    Phase.OPENING: "to open the session",
    Phase.EXCHANGING: "for the samples of epoch {}",
    Phase.COMMITTING: "to end epoch {}",
    Phase.ABORTING: "to stop an exchange",
    Phase.RESTORING: "for replacements of lost workers to load their partitions",
    Phase.INFORMING: "to continue after workers were replaced",
}
"""What the session waits for in a phase, in words."""


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
    """Give a participant the order of a phase, and report the answer.

    The name of the order is the value of the phase, or ``"status"``. The turn is that of the phase: an answer may come
    when the phase has ended, and perhaps has begun again.
    """

    name: str
    participant: int
    run_id: int
    turn: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """All participants have opened the session."""


@dataclass(frozen=True, slots=True)
class RunReady:
    """All participants are ready for the run's epoch."""

    run: Run


@dataclass(frozen=True, slots=True)
class EpochCommitted:
    """All participants have swapped to the run's epoch; what they report."""

    run: Run
    reports: Mapping[int, Report]


@dataclass(frozen=True, slots=True)
class EpochFailed:
    """Tell the client that an epoch failed. The session goes on, and the client may ask again."""

    error: DShuffleError


@dataclass(frozen=True, slots=True)
class ProcessQuestion:
    """Find out whether the process of a silent participant runs, and report it: `SessionMachine.note_running`."""

    participant: int
    silent_seconds: float
    turn: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ReplacementSearch:
    """Find workers for these ranks, and report them with :meth:`SessionMachine.replaced`."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RanksRestored:
    """These ranks have new workers, which hold their partitions. Their tasks can run."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParticipantDropped:
    """The session goes on without a participant that was lost, because no other worker can come for it."""

    participant: int


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Tell the client that the session has ended, and free the participants that are left."""

    error: DShuffleError


Instruction = (
    PhaseOrder
    | SessionOpened
    | RunReady
    | EpochCommitted
    | EpochFailed
    | ProcessQuestion
    | ReplacementSearch
    | RanksRestored
    | ParticipantDropped
    | SessionEnded
)


@dataclass(frozen=True, slots=True)
class OpenCall:
    """The client opens the session."""


@dataclass(frozen=True, slots=True)
class BeginCall:
    """The client prefetches the next epoch."""


@dataclass(frozen=True, slots=True)
class AdvanceCall:
    """The client waits for the next epoch."""


@dataclass(frozen=True, slots=True)
class AllAnswers:
    """All participants have carried out the order of the phase."""


@dataclass(frozen=True, slots=True)
class AllVotes:
    """All participants have voted ready."""


@dataclass(frozen=True, slots=True)
class RunFailure:
    """A run has failed; ``again`` if another run can succeed."""

    error: DShuffleError
    again: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """A participant cannot carry out the order of the phase."""

    participant: int
    error: DShuffleError


@dataclass(frozen=True, slots=True)
class Loss:
    """Participants are lost that other workers can replace. Each has a clause that says how it was lost."""

    clauses: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class FinalLoss:
    """Participants are lost that no other worker can replace, or all are lost."""

    clauses: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Replacement:
    """Another worker takes a lost rank.

    Parameters
    ----------
    kept
        Whether it is the lost worker, and still has the partition of this epoch.
    """

    participant: int
    kept: bool = False


@dataclass(frozen=True, slots=True)
class NoReplacement:
    """No other worker comes for lost participants."""

    participants: Collection[int]


@dataclass(frozen=True, slots=True)
class Closure:
    """The driver ends the session."""

    error: DShuffleError


Event = (
    OpenCall | BeginCall | AdvanceCall | AllAnswers | AllVotes | RunFailure | Refusal | Loss | FinalLoss | Replacement
    | NoReplacement | Closure
)  # fmt: skip


MOST_NAMES = 3
"""Number of participants that are named when a session says whom it waits for."""


class Answers:
    """Who owes an answer to the order of a phase, and what is known of the order until the answer comes."""

    def __init__(self, participants: Iterable[int] = ()) -> None:
        self.owing = set(participants)
        self.reports: dict[int, Report] = {}
        self.arrived: dict[int, float | None] = {}  # fraction of its rows that a participant has, as far as it is known
        self._unreachable: dict[int, str] = {}  # why the order did not reach a participant
        self._busy: dict[int, str] = {}  # why a participant cannot carry out the order yet
        self._running: set[int] = set()  # participants that do not answer although their processes run
        self._repeats: set[int] = set()  # participants that were busy and must get the order again

    def carried_out(self, participant: int, report: Report | None) -> None:
        """Note that a participant has carried out the order; with a report if it was to commit."""
        if report is not None:
            self.reports[participant] = report
        self.owing.discard(participant)

    def busy(self, participant: int, reason: str) -> None:
        """Note that a participant cannot carry out the order yet, and must get it again."""
        self._busy[participant] = reason
        self._repeats.add(participant)

    def unreachable(self, participant: int, reason: str) -> None:
        """Note that the order may not have reached a participant."""
        if participant in self.owing:
            self._unreachable[participant] = reason

    def note_running(self, participant: int) -> None:
        """Note that the process of a participant runs, although the participant does not answer."""
        self._running.add(participant)

    def reached(self, participant: int) -> None:
        """Note that messages reach a participant, and that it answers."""
        self._running.discard(participant)
        self._unreachable.pop(participant, None)

    def pop_repeat(self, participant: int) -> bool:
        """Whether a participant must get the order again. The answer is True once for each reason."""
        repeat = participant in self._unreachable or participant in self._repeats
        self._unreachable.pop(participant, None)
        self._repeats.discard(participant)
        return repeat

    def why_unreachable(self, participant: int) -> str:
        """Why the order did not reach a participant, in brackets; empty if nothing is known."""
        return f" ({self._unreachable[participant]})" if participant in self._unreachable else ""

    def in_words(self, name_of: Callable[[int], str]) -> str:
        """Who owes an answer, and why. Those with a reason come first, then those with the fewest of their rows."""

        def urgency(participant: int) -> tuple[bool, float, int]:
            arrived = self.arrived.get(participant)
            has_reason = participant in self._busy or participant in self._running
            return not has_reason, 1.0 if arrived is None else arrived, participant

        def in_words(participant: int) -> str:
            words = name_of(participant)
            if participant in self._busy:
                return f"{words}: {self._busy[participant]}"
            if participant in self._running:
                return f"{words} does not answer, but its process runs: a task may hold Python's global lock"
            arrived = self.arrived.get(participant)
            return words if arrived is None else f"{words} has {arrived:.0%}"

        names = [in_words(participant) for participant in sorted(self.owing, key=urgency)[:MOST_NAMES]]
        more = len(self.owing) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")


class Silence:
    """When the participants of a session were heard and asked.

    Parameters
    ----------
    heartbeat
        Seconds of silence after which a participant that owes an answer is lost. Until then it is asked every third of
        a heartbeat.
    longest
        Seconds of silence after which a participant is lost although its process runs.
    """

    def __init__(self, heartbeat: float, longest: float = math.inf) -> None:
        self._heartbeat = heartbeat
        self._longest = longest
        self._since = 0.0
        self._ticked = 0.0
        self._heard: dict[int, float] = {}
        self._excused: dict[int, float] = {}  # when the processes of silent participants were seen to run
        self._queried_at: dict[int, float] = {}

    def begin(self, now: float, participants: Iterable[int] = ()) -> None:
        """Begin a phase, in which these participants get an order."""
        self._since = self._ticked = now
        self._queried_at = dict.fromkeys(participants, now)
        self._excused = {}

    def extend(self, now: float) -> None:
        """Let the phase begin again."""
        self._since = now

    def hear(self, participant: int, now: float) -> None:
        """Note that a participant has said something, or was alive at an earlier time."""
        self._heard[participant] = max(now, self._heard.get(participant, now))

    def excuse(self, participant: int, now: float) -> None:
        """Note that the process of a participant runs, although the participant says nothing."""
        self._excused[participant] = now

    def tick(self, now: float) -> float:
        """Let time pass, and return the seconds that do not count.

        While nobody looked at the clock, nobody read the answers that came either.
        """
        gap, self._ticked = now - self._ticked, now
        if gap < self._heartbeat / 3:
            return 0.0
        self._since += gap
        self._heard = {participant: heard + gap for participant, heard in self._heard.items()}
        self._excused = {participant: excused + gap for participant, excused in self._excused.items()}
        self._queried_at = {participant: time + gap for participant, time in self._queried_at.items()}
        return gap

    def lasts(self, now: float) -> float:
        """Seconds since the phase began."""
        return now - self._since

    def seconds(self, participant: int, now: float) -> float:
        """Seconds for which a participant has said nothing in this phase."""
        return now - max(self._heard.get(participant, self._since), self._since)

    def is_excused(self, participant: int, now: float) -> bool:
        """Whether the process of a participant was seen to run less than a heartbeat ago."""
        return now - self._excused.get(participant, -math.inf) < self._heartbeat

    def was_excused(self, participant: int) -> bool:
        """Whether the process of a participant was seen to run in this phase, however long ago."""
        return participant in self._excused

    def is_lost(self, participant: int, now: float) -> bool:
        """Whether a participant has said nothing for a heartbeat, or for the longest time if its process runs."""
        silence = self.seconds(participant, now)
        return silence >= self._longest or (silence >= self._heartbeat and not self.is_excused(participant, now))

    def is_due(self, participant: int, now: float) -> bool:
        """Whether to ask a participant now. If so, the next time is a third of a heartbeat later."""
        due = now - self._queried_at[participant] >= self._heartbeat / 3
        if due:
            self._queried_at[participant] = now
        return due


class SessionState:
    """The phase of a session, who owes an answer, and which participants are lost.

    Parameters
    ----------
    participants
        All ranks, and the server if it is dedicated. Each has one vote.
    first_epoch
        Number of the first epoch.
    heartbeat
        Seconds of silence after which a participant that owes an answer is lost, unless its process is known to run.
    timeout
        Seconds after which a call of the client fails if the commit still waits for tasks of the previous epoch. The
        commit goes on. A participant that says nothing for so long is lost although its process runs.
    name_of
        Name and address of a participant, for errors.
    replaceable
        Participants that another worker can replace.
    replacement_timeout
        Seconds to wait for replacements.
    optional
        Participants without which the session can go on if no other worker replaces them.
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
        self.heartbeat = heartbeat
        self.timeout = timeout
        self.name_of = name_of
        self.replaceable = frozenset(replaceable)
        self.replacement_timeout = replacement_timeout
        self.optional = frozenset(optional)

        self.participants = tuple(participants)
        self.epoch = first_epoch - 1
        self.phase = Phase.NEW
        self.turn = 0  # number of the phases in which participants owe answers
        self.answers = Answers()
        self.silence = Silence(heartbeat, longest=max(heartbeat, timeout))
        self.error: DShuffleError | None = None  # with which the session has ended

        self.client_waits = False  # for the next epoch
        self.unreported: DShuffleError | None = None  # an epoch failed while the client did not wait for it
        self.n_runs = 0
        self.run: Run | None = None
        self.failure: RunFailure | None = None  # of the run that is being aborted
        self.repeats_run = False  # whether a run was aborted because of a lost worker
        self.digests: dict[int, SampleDigest] = {}  # of the samples that each rank trains on in the epoch

        self.losses: dict[int, str] = {}  # lost participants, and how they were lost
        self.loss_counts: Counter[int] = Counter()  # how often each rank was lost in the epoch
        self.newcomers: set[int] = set()  # replacements that do not hold their partitions yet, or are not known to all
        self.kept: set[int] = set()  # newcomers that were only silent, and still have their partitions and tasks
        self.unfit_reasons: dict[int, str] = {}  # why other workers could not take a lost rank
        self.search_began = math.inf

    @property
    def unsettled(self) -> frozenset[int]:
        """Participants that are lost and being replaced, or whose new workers do not hold their partitions yet."""
        return frozenset(self.losses) | self.newcomers

    @property
    def settled(self) -> list[int]:
        """Participants that hold their partitions, or serve."""
        unsettled = self.unsettled
        return [participant for participant in self.participants if participant not in unsettled]

    @property
    def missing(self) -> tuple[int, ...]:
        """Lost participants that wait for a replacement now."""
        return tuple(sorted(self.losses)) if self.phase is Phase.WAITING else ()

    def order(self, name: str, participant: int) -> PhaseOrder:
        """An order to a participant, in the present phase."""
        # A worker that takes a rank must refuse all runs so far: orders to begin them may arrive late.
        run_id = self.n_runs if name == Phase.RESTORING.value else 0 if self.run is None else self.run.run_id
        return PhaseOrder(name, participant, run_id, self.turn)

    def enter(self, phase: Phase, now: float) -> list[Instruction]:
        """Enter a phase in which participants owe an answer, and give its order to all that it concerns."""
        self.phase = phase
        self.turn += 1
        participants = [participant for participant in self.participants if participant not in self.losses]
        if phase is Phase.RESTORING:
            participants = [participant for participant in participants if participant in self.newcomers]
        if phase is Phase.INFORMING:
            participants = [participant for participant in participants if participant not in self.newcomers]
        self.answers = Answers(participants)
        self.silence.begin(now, participants)
        return [self.order(phase.value, participant) for participant in participants]

    def begin_run(self, now: float, attempt: int) -> list[Instruction]:
        """Begin an attempt at the exchange of the next epoch. Its run has a new id, so old messages can be refused."""
        self.n_runs += 1
        self.run = Run(self.n_runs, self.epoch + 1, now, attempt)
        return self.enter(Phase.EXCHANGING, now)

    def become_idle(self, now: float) -> list[Instruction]:
        """Become idle, or begin the next run at once if it is waited for or was interrupted by a loss."""
        self.phase, self.run = Phase.IDLE, None
        repeats_run, self.repeats_run = self.repeats_run, False
        return self.begin_run(now, 1) if self.client_waits or repeats_run else []

    def search(self, now: float) -> list[Instruction]:
        """Wait for other workers that take the lost ranks."""
        if self.search_began == math.inf:
            self.search_began = now
        self.phase, self.run = Phase.WAITING, None
        self.silence.begin(now)
        self.answers = Answers()
        return [ReplacementSearch(tuple(sorted(self.losses)))]

    def end(self, error: DShuffleError) -> list[Instruction]:
        """End the session."""
        self.phase, self.error, self.run = Phase.ENDED, error, None
        self.answers = Answers()
        return [SessionEnded(error)]
