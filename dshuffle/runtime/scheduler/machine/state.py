"""What the state machine of a session remembers, and the steps that several of its transitions share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from dshuffle.errors import DShuffleError, MembershipChanged
from dshuffle.planning.sample_digest import SampleDigest
from dshuffle.runtime.scheduler.machine.answers import Answers
from dshuffle.runtime.scheduler.machine.events import RunFailure
from dshuffle.runtime.scheduler.machine.instructions import (
    EpochFailed,
    Instruction,
    PhaseOrder,
    ReplacementSearch,
    Run,
    SessionEnded,
)
from dshuffle.runtime.scheduler.machine.phases import Phase
from dshuffle.runtime.scheduler.machine.silence import Silence


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
    shrinks
        Whether other participants can adopt a rank that no other worker takes.
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
        shrinks: bool = False,
    ) -> None:
        self.first_epoch = first_epoch
        self.heartbeat = heartbeat
        self.timeout = timeout
        self.name_of = name_of
        self.replaceable = frozenset(replaceable)
        self.replacement_timeout = replacement_timeout
        self.optional = frozenset(optional)
        self.shrinks = shrinks

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
        self.adopted: set[int] = set()  # ranks whose workers have another rank as well
        self.adoptions: Counter[int] = Counter()  # how often other participants were to adopt a rank
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
        client_waits = self.client_waits
        if self.adopted:  # the client opens another session
            self.client_waits = False
            error = MembershipChanged(f"epoch {self.epoch + 1} has fewer workers")
            return [EpochFailed(error)] if client_waits else []
        return self.begin_run(now, 1) if client_waits or repeats_run else []

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
