"""Simulator of the scheduler's state machine: random schedules in virtual time.

    python tests/runtime/scheduler/simulator.py 100000 [first seed]

runs that many schedules, and prints what has happened in them.

Messages are lost and late, workers crash and stop, tasks hang, or keep their worker from answering. The participants
are simple models of a worker: they begin, vote, swap and abort as the orders say, and ignore orders that are out of
date. What must hold is checked after every event: no participant swaps unless all are ready, all are on the same epoch
whenever the client hears of one, and every call of the client ends.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
import sys
from collections import Counter
from dataclasses import dataclass, field

from dshuffle.errors import DShuffleError, ExchangeError, WorkerLost
from dshuffle.records import Measures
from dshuffle.runtime.messages import Answer, CommitReply, Counts, MemberState, Report, Vote
from dshuffle.runtime.scheduler.machine import (
    ATTEMPTS,
    CallEnded,
    EpochCommitted,
    ParticipantDropped,
    Phase,
    PhaseOrder,
    ProcessQuestion,
    RanksRestored,
    ReplacementSearch,
    RunReady,
    SessionEnded,
    SessionMachine,
)

COMMITTED = CommitReply(report=Report(measures=Measures()))

DRIVEN = {
    *("open", "begin", "advance", "alive", "voted", "note_running", "answered", "refused", "lost", "replaced"),
    *("not_replaced", "close", "tick", "take"),
}
HEARTBEAT, TIMEOUT = 15.0, 300.0
FAULTS = {"lose": 0.1, "fail": 0.05, "crash": 0.01, "stop": 0.02, "hang": 0.02, "busy": 0.01}


@dataclass
class Member:
    """A worker, as far as the scheduler can see it."""

    rank: int
    opened: bool = False
    number: int = -1
    epoch: int = -1
    last_run: int = 0
    run_id: int = 0
    run_epoch: int = -1
    vote: Vote | None = None
    committed: int = -1
    crashed: bool = False
    stopped_until: float = 0.0
    busy_until: float = 0.0
    hangs_until: float = 0.0
    aborted: set[int] = field(default_factory=set)


class Driven:
    """A session machine. Its methods take the time as the last argument, and return what the machine tells."""

    def __init__(self, *args: object, **options: object) -> None:
        self._machine = SessionMachine(*args, **options)

    def __getattr__(self, name: str) -> object:
        value, machine = getattr(self._machine, name), self._machine
        if name not in DRIVEN:
            return value

        def call(*args: object, **options: object) -> list[object]:
            *args, machine.now = args
            value(*args, **options)
            told, machine.told = machine.told, []
            return told

        return call


class World:
    """A client, the machine, its members, and the messages between them, in virtual time."""

    def __init__(self, seed: int, seen: Counter[str], faults: dict[str, float] = FAULTS) -> None:
        self.rng, self.seen = random.Random(seed), seen
        # Each world has some of the faults.
        self.faults = {name: rate * self.rng.choice([0, 1, 1]) for name, rate in faults.items()}
        self.members = {rank: Member(rank) for rank in range(self.rng.randint(1, 5))}
        self.replaces = self.rng.random() < 0.7
        self.machine = Driven(
            self.members,
            first_epoch=0,
            heartbeat=HEARTBEAT,
            timeout=TIMEOUT,
            name_of="rank {}".format,
            replaceable=self.members if self.replaces else (),
            replacement_timeout=60.0,
            optional=[0] if self.rng.random() < 0.5 else (),
        )
        self.now = 0.0
        self.events: list[tuple[float, int, object]] = []
        self.order = itertools.count()
        self.ended: DShuffleError | None = None
        self.answer: DShuffleError | str | None = None
        self.clock_runs = False
        self.broken = False

    # -- time and the network ------------------------------------------------------------------------------------

    def later(self, seconds: float, call: object) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), call))

    def step(self) -> bool:
        if not self.events:
            return False
        self.now, _, call = heapq.heappop(self.events)
        call()
        self.check()
        return True

    def happens(self, fault: str) -> bool:
        happened = self.rng.random() < self.faults[fault]
        self.broken |= happened and fault in ("crash", "stop")
        self.seen[fault] += happened
        return happened

    def perform(self, instructions: list[object]) -> None:
        for instruction in instructions:
            match instruction:
                case PhaseOrder():
                    # Orders go to an address: not to the member that takes the rank later.
                    arrives = self.rng.expovariate(100)
                    order = instruction, self.members[instruction.participant], self.machine.epoch
                    self.later(arrives, lambda order=order: self.deliver(*order))
                case CallEnded(error):
                    self.answer = error or "opened"
                case RunReady(run):
                    ready = [m for m in self.members.values() if m.run_id == run.run_id and is_ready(m)]
                    assert len(ready) == len(self.members)
                case EpochCommitted(run, reports):
                    there = {rank for rank in self.members if rank not in self.machine.unsettled}
                    assert {self.members[rank].epoch for rank in there} == {run.epoch}
                    assert there <= reports.keys()
                    self.answer = "committed"
                case ProcessQuestion(rank):
                    member = self.members[rank]
                    if not member.crashed and member.stopped_until <= self.now:
                        answer = functools.partial(self.machine.note_running, instruction)
                        self.later(0.05, lambda answer=answer: self.perform(answer(self.now)))
                case ReplacementSearch(ranks):
                    self.seen["searched"] += 1
                    for rank in ranks:
                        self.find_replacement(rank)
                case RanksRestored(ranks):
                    self.seen["replaced"] += len(ranks)
                    assert all(self.members[rank].epoch == self.machine.epoch for rank in ranks)
                case ParticipantDropped(rank):
                    self.seen["went on without"] += 1
                    del self.members[rank]
                case SessionEnded(error):
                    self.ended = self.answer = error
                    if isinstance(error, WorkerLost):  # the others keep their partitions for a session that follows
                        assert self.machine.losses
                        left = {self.members[rank].epoch for rank in self.machine.settled}
                        assert self.machine.phase is Phase.ENDED
                        assert left <= {self.machine.epoch, self.machine.epoch + 1}
        if self.machine.busy and not self.clock_runs:
            self.clock_runs = True
            self.later(0.5, self.tick)

    def tick(self) -> None:
        self.clock_runs = False
        self.perform(self.machine.tick(self.now))

    def find_replacement(self, rank: int) -> None:
        """Another worker comes, or the old one goes on, or nobody comes."""
        lost = self.members[rank]
        if self.rng.random() < 0.2:
            return

        def join() -> None:
            if rank not in self.machine.missing or self.members[rank] is not lost:
                return
            if lost.crashed or self.rng.random() < 0.5:
                self.members[rank] = Member(rank)
            elif max(lost.stopped_until, lost.busy_until) > self.now:
                self.later(max(lost.stopped_until, lost.busy_until) - self.now, join)
                return
            self.seen["returned"] += self.members[rank] is lost
            self.perform(self.machine.replaced(rank, self.now))

        self.later(self.rng.uniform(0, 20), join)

    def deliver(self, order: PhaseOrder, member: Member, epoch: int) -> None:
        """An order arrives at a member, or not; its answer travels back, or is lost."""
        if self.happens("crash"):
            self.crash(member)
        if self.happens("stop"):
            member.stopped_until = self.now + self.rng.choice([2, 5, 40])
        if self.happens("busy"):
            member.busy_until = self.now + self.rng.choice([2, 20, 100])
        if self.happens("hang"):
            member.hangs_until = self.now + self.rng.choice([1, 10, 400])
        if member.crashed:
            return
        silent_until = max(member.stopped_until, member.busy_until)
        if silent_until > self.now:
            self.later(silent_until - self.now, lambda: self.deliver(order, member, epoch))
            return
        if self.happens("lose"):
            self.later(0.01, lambda: self.machine.unreachable(order, "OSError: lost"))
            if self.rng.random() < 0.5:  # the order, or its answer
                return
            self.carry_out(member, order, epoch)
            return
        reply = self.carry_out(member, order, epoch)
        if isinstance(reply, DShuffleError):
            self.later(self.rng.expovariate(100), lambda: self.perform(self.machine.refused(order, reply, self.now)))
        else:
            self.later(self.rng.expovariate(100), lambda: self.perform(self.machine.answered(order, reply, self.now)))

    # -- a worker ------------------------------------------------------------------------------------------------

    def crash(self, member: Member) -> None:
        member.crashed = True
        if self.rng.random() < 0.7:  # the scheduler notices; otherwise the connection just stays silent
            self.later(self.rng.uniform(0, 5), lambda: self.leave(member))

    def leave(self, member: Member) -> None:
        if self.members.get(member.rank) is member:
            self.perform(self.machine.lost([member.rank], "has left", self.now))

    def carry_out(self, member: Member, order: PhaseOrder, epoch: int) -> Answer | DShuffleError:
        match order.name:
            case "open":
                member.opened = True
            case "restore" | "members" if order.turn <= member.number:
                pass  # the order was given before the last one that arrived
            case "restore" if self.happens("fail"):
                return ExchangeError("no room here")
            case "restore":
                member.number = order.turn
                if member.epoch != epoch or not member.opened:
                    member.__init__(order.participant, opened=True, epoch=epoch, number=order.turn)
                member.run_id, member.vote, member.last_run = 0, None, order.run_id
            case "members":
                member.number = order.turn
                assert member.run_id == 0, "a run is under way"
            case "status":
                return MemberState(open=member.opened, run_id=member.last_run, vote=member.vote)
            case "begin":
                if order.run_id > member.last_run:
                    assert member.run_id == 0, "two runs at a time"
                    member.last_run = member.run_id = order.run_id
                    member.run_epoch, member.vote = member.epoch + 1, None
                    self.later(self.rng.choice([0.1, 1, 20]), lambda: self.finish(member, order.run_id))
            case "abort":
                member.last_run = max(member.last_run, order.run_id)
                if 0 < member.run_id <= order.run_id:
                    member.run_id, member.vote = 0, None
                member.aborted.add(order.run_id)
            case "commit":
                if member.committed == order.run_id:
                    return COMMITTED
                if member.run_id != order.run_id or not is_ready(member):
                    return ExchangeError(f"run {order.run_id} is not ready here")
                if member.hangs_until > self.now:
                    return CommitReply(busy="1 task still running")
                ranks = self.members.keys() - self.machine.unsettled - {order.participant}
                others = [self.members[rank] for rank in ranks]
                given_up = self.members.get(order.participant) is not member
                if not given_up and order.participant not in self.machine.unsettled:
                    ready = all(m.committed == order.run_id or is_ready(m) for m in others)
                    assert ready, "swapped before all were ready"
                assert order.run_id not in member.aborted
                member.epoch, member.committed, member.run_id, member.vote = member.run_epoch, order.run_id, 0, None
                return COMMITTED
        return None

    def finish(self, member: Member, run_id: int) -> None:
        """Everything has arrived at a member, or has not; its vote may be lost on the way."""
        if member.crashed or member.run_id != run_id:
            return
        reason = "it broke" if self.happens("fail") else None
        counts = Counts(digest=1, expected=0, rows=0)
        member.vote = vote = Vote(reason=reason, again=self.rng.random() < 0.7, counts=counts)
        if self.happens("lose"):
            return
        arrives = self.rng.expovariate(100)
        self.later(arrives, lambda: self.perform(self.machine.voted(run_id, member.rank, vote, self.now)))

    # -- the client ----------------------------------------------------------------------------------------------

    def call(self, instructions: list[object]) -> DShuffleError | str:
        """Carry out a call of the client until it is answered. It must be, within the limits of all waits."""
        self.answer, started = None, self.now
        self.perform(instructions)
        while self.answer is None:
            assert self.step(), f"nothing will ever happen: {self.machine.phase}, {self.machine.waiting_for()}"
            # Every loss costs at most a heartbeat, a replacement and another run.
            limit = (
                TIMEOUT
                + 100 * self.seen["busy"]
                + (ATTEMPTS + 2 * self.seen["crash"] + 2 * self.seen["stop"]) * (120 + 4 * HEARTBEAT)
            )
            assert self.now - started < limit, self.machine.waiting_for()
        return self.answer

    def check(self) -> None:
        epochs = {m.epoch for rank, m in self.members.items() if rank not in self.machine.unsettled}
        assert max(epochs, default=0) - min(epochs, default=0) <= 1
        if self.machine.phase in (Phase.IDLE, Phase.EXCHANGING, Phase.ABORTING):
            assert epochs <= {self.machine.epoch}

    def run(self, epochs: int) -> None:
        answer = self.call(self.machine.open(self.now))
        for _ in range(epochs):
            if self.ended is not None:
                break
            assert answer is not None
            if self.rng.random() < 0.5:  # prefetch
                self.perform(self.machine.begin(self.now))
            if self.happens("crash"):  # in training
                self.crash(self.members[self.rng.choice(list(self.members))])
            until = self.now + self.rng.choice([0, 5, 60])
            while self.events and self.events[0][0] < until:
                self.step()
            self.now = max(self.now, until)
            if self.ended is None:
                answer = self.call(self.machine.advance(self.now))
                self.seen[answer if isinstance(answer, str) else type(answer).__name__] += 1
        if self.ended is not None:
            self.seen["ended"] += 1
            reasons = self.broken or self.faults["lose"] > 0
            assert reasons, f"the session ended for no reason: {self.ended}"
            assert [CallEnded(self.ended)] == self.machine.advance(self.now)
        while self.step():  # nothing goes on for ever
            assert self.now < 10**5


def is_ready(member: Member) -> bool:
    return member.vote is not None and member.vote.reason is None


def simulate(seeds: range, faults: dict[str, float] = FAULTS) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        try:
            World(seed, seen, faults).run(epochs=6)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return seen


if __name__ == "__main__":
    start = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    print(dict(simulate(range(start, start + int(sys.argv[1])))))
