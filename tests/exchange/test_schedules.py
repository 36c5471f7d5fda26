"""Both state machines of all participants under random schedules of delays, losses, duplicates and aborts.

The wire is a bag from which anything may be delivered, lost or duplicated at any time. What must hold is checked
after every event against plain sets kept beside the machines.

In half of the worlds participants hand on what they get, as relays do: messages wait for gates, which open when others
have arrived. Then windows have a place for every sender.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from dshuffle.exchange.mailboxes import Answer, Arrived, Fetch, Inbox, MessageId, Outbox
from dshuffle.planning import name_of

SERVER = -1
FAULTS = {"lose": 0.2, "duplicate": 0.3, "corrupt": 0.1, "abort": 0.02}


@dataclass
class Peer:
    """One participant and what the oracle knows of its present run; the server has no inbox."""

    outbox: Outbox
    inbox: Inbox | None
    begun: bool = False
    asked: Counter[MessageId] = field(default_factory=Counter)
    counted: set[MessageId] = field(default_factory=set)
    vote: str | None = None


class World:
    """Participants, the wire between them, and a scheduler that begins, aborts and commits runs."""

    def __init__(self, rng: random.Random, seen: Counter[str], *, attempts: int = 3) -> None:
        self.rng, self.seen, self.attempts = rng, seen, attempts
        n_ranks = rng.randint(1, 5)
        lowest = rng.choice([0, SERVER])
        self.window_in, self.window_out = rng.randint(1, 4), rng.randint(1, 4)
        self.to_one = rng.choice([None, 1, 2])
        self.relays = rng.random() < 0.5
        if self.relays:
            n_ranks = max(3, n_ranks)
            self.window_in = n_ranks - lowest - 1 + rng.choice([0, 0, 0, 1, 3])
        self.peers = {
            rank: Peer(
                Outbox(rank, window=self.window_out),
                Inbox(rank, window=self.window_in, attempts=attempts) if rank != SERVER else None,
            )
            for rank in range(lowest, n_ranks)
        }
        self.run_id = 0
        self.aborting: set[int] = set()
        self.wire: list[tuple[str, MessageId]] = []
        self.unanswered: set[MessageId] = set()
        self.new_run()

    # -- the scheduler -----------------------------------------------------------------------------------------

    def new_run(self, *, resumed: bool = False) -> None:
        self.run_id += 1
        if resumed:  # the same messages, without those that have arrived
            self.seen["resumed"] += 1
            self.towards = {
                gate: {message._replace(run_id=self.run_id) for message in messages}
                for gate, messages in self.towards.items()
            }
            for peer in self.peers.values():
                counted = {message._replace(run_id=self.run_id) for message in peer.counted}
                peer.begun, peer.vote, peer.asked, peer.counted = False, None, Counter(), counted
            return
        receivers = [rank for rank, peer in self.peers.items() if peer.inbox]
        self.owed = {
            (sender, to): self.rng.choice([1, 3, 5, 7] if self.relays else [0, 1, 1, 2, 7])
            for sender in self.peers
            for to in receivers
            if sender != to and self.rng.random() < 0.8
        }
        self.draw_gates()
        for peer in self.peers.values():
            peer.begun, peer.vote, peer.asked, peer.counted = False, None, Counter(), set()

    def draw_gates(self) -> None:
        """Which gate each message waits for at its sender, and which it counts towards at its destination.

        A message on some level waits for a gate of a lower one. Those of a flow are in the order of their levels, as
        they are in a plan: they are asked for in this order.
        """
        rng, owed = self.rng, self.owed
        n_levels = rng.randint(2, 12) if self.relays else 1
        levels = {flow: sorted(rng.choices(range(n_levels), k=count)) for flow, count in owed.items()}
        sometimes, often = rng.random(), rng.choice([0.5, 1.0])
        self.opens = {
            flow: [level if self.relays and rng.random() < often else -1 for level in levels[flow]] for flow in owed
        }
        self.towards: dict[tuple[int, int], set[MessageId]] = {}
        for (sender, to), gates in self.opens.items():
            for sequence, gate in enumerate(gates):
                self.towards.setdefault((to, gate), set()).add(MessageId(self.run_id, sender, to, sequence))
        self.waits_for = {}
        for (sender, to), flow in levels.items():
            before = [[-1, *(gate for gate in range(level) if (sender, gate) in self.towards)] for level in flow]
            self.waits_for[sender, to] = [rng.choice(g) if rng.random() < sometimes else g[-1] for g in before]

    def shut(self, message: MessageId) -> bool:
        """Whether a message of the present run has to wait for others that have not arrived at its sender."""
        gate = self.waits_for[message.sender, message.destination][message.sequence]
        return gate >= 0 and not self.towards[message.sender, gate] <= self.peers[message.sender].counted

    def full(self, outbox: Outbox, message: MessageId) -> bool:
        """Whether the window has no slot for a message, or none for its destination."""
        same = sum(other.destination == message.destination for other in outbox.in_flight)
        return len(outbox.in_flight) == self.window_out or (self.to_one is not None and same >= self.to_one)

    def begin(self, rank: int) -> None:
        peer, outbox = self.peers[rank], self.peers[rank].outbox
        peer.begun = True
        self.seen["early"] += any(message.sender == rank for message in self.unanswered)
        sends = {to: count for (sender, to), count in self.owed.items() if sender == rank}
        gates = {to: gates for (sender, to), gates in self.waits_for.items() if sender == rank}
        gates_or_none = gates if self.relays else None
        self.answer(outbox.begin(self.run_id, sends, gates=gates_or_none, to_one=self.to_one))
        for to, gate in [gate for gate, messages in self.towards.items() if messages <= peer.counted]:
            if to == rank and gate >= 0:
                self.answer(outbox.open_gate(self.run_id, gate))
        # Whatever was asked before this run, for this run or an older one, has its answer now, or must wait.
        for message in self.unanswered:
            if message.sender == rank:
                assert message.run_id == self.run_id
                assert self.full(outbox, message) or self.shut(message)
        if peer.inbox is None:
            peer.vote = "ready"
        else:
            receives = {sender: count for (sender, to), count in self.owed.items() if to == rank}
            done = {(message.sender, message.sequence) for message in peer.counted}
            self.ask(rank, peer.inbox.begin(self.run_id, receives, done=done))

    def abort(self, rank: int) -> None:
        peer = self.peers[rank]
        peer.vote = "aborted"
        self.end(rank)
        if peer.inbox is not None:
            peer.inbox.abort()
            assert not peer.inbox.outstanding
        self.aborting.discard(rank)
        if not self.aborting:
            self.seen["aborted"] += 1
            self.new_run(resumed=self.rng.random() < 0.5)

    def commit(self) -> None:
        for rank in self.peers:
            self.end(rank)
        self.seen["committed"] += 1
        self.new_run()

    def end(self, rank: int) -> None:
        outbox = self.peers[rank].outbox
        self.answer(outbox.end())
        assert not outbox.in_flight
        # Only what asks for a run that never began here may still wait.
        assert all(m.run_id > outbox.run_id for m in self.unanswered if m.sender == rank)

    # -- what the drivers do with instructions -----------------------------------------------------------------

    def answer(self, instructions: Sequence[Answer]) -> None:
        for instruction in instructions:
            message = instruction.message
            outbox = self.peers[message.sender].outbox
            assert message in self.unanswered, "answered twice, or unasked"
            self.unanswered.discard(message)
            match instruction:
                case Answer(_, None):
                    assert message.run_id == outbox.run_id == self.run_id, "rows of a stale run"
                    assert message.sequence < self.owed[message.sender, message.destination]
                    assert message in outbox.in_flight
                    assert not self.shut(message), "sent before it has come in"
                    self.wire.append(("rows", message))
                case Answer(_, reason):
                    assert message.run_id <= outbox.run_id
                    assert reason == f"stale: {name_of(message.sender)} is past run {message.run_id}"
                    self.seen["stale refused"] += 1
                    self.wire.append(("refused", message))

    def ask(self, rank: int, instructions: Sequence[Fetch | Arrived]) -> None:
        peer = self.peers[rank]
        for instruction in instructions:
            assert peer.vote is None, "instructions after the vote"
            match instruction:
                case Fetch(message, False):
                    assert (message.run_id, message.destination) == (self.run_id, rank)
                    assert message not in peer.counted, "asked for although it has arrived"
                    peer.asked[message] += 1
                    assert peer.asked[message] <= self.attempts
                    self.wire.append(("request", message))
                case Fetch(message, True):
                    assert peer.asked[message] == self.attempts
                    self.wire.append(("read", message))
                case Arrived(run_id, None):
                    assert run_id == self.run_id
                    assert peer.counted == {
                        MessageId(run_id, sender, rank, sequence)
                        for (sender, to), count in self.owed.items()
                        if to == rank
                        for sequence in range(count)
                    }
                    peer.vote = "ready"
                case Arrived(run_id, reason):
                    assert run_id == self.run_id
                    assert reason.startswith(f"run {run_id}, ")
                    peer.vote = reason
                    self.seen["failed"] += 1

    # -- what the wire does ------------------------------------------------------------------------------------

    def deliver(self, kind: str, message: MessageId, *, corrupt: bool = False) -> None:
        sender, inbox = self.peers[message.sender], self.peers[message.destination].inbox
        assert inbox is not None
        match kind:
            case "request":
                self.unanswered.add(message)
                self.answer(sender.outbox.request(message))
                waits = message in self.unanswered and sender.begun and message.run_id == self.run_id
                self.seen["waited for a gate"] += waits and self.shut(message)
            case "acknowledgement":
                self.answer(sender.outbox.acknowledged(message))
            case "later":
                self.seen["answered later"] += 1
                self.wire.append(("request", message))
            case "rows" | "read" if corrupt:
                self.fail(message, "corrupted", again=True)
            case "rows" | "read":
                counts = message in inbox.outstanding
                peer = self.peers[message.destination]
                if counts:
                    assert message not in peer.counted, "counted twice"
                    peer.counted.add(message)
                    gate = self.opens[message.sender, message.destination][message.sequence]
                    if gate >= 0 and self.towards[message.destination, gate] <= peer.counted:
                        self.answer(peer.outbox.open_gate(self.run_id, gate))
                else:
                    self.seen["late or twice"] += 1
                instructions = inbox.arrived(message)
                assert counts or not instructions
                self.ask(message.destination, instructions)
                if kind == "read":
                    self.seen["read from the store"] += 1
                else:
                    self.wire.append(("acknowledgement", message))
            case "refused":
                self.fail(message, "refused", again=False)

    def fail(self, message: MessageId, reason: str, *, again: bool) -> None:
        inbox = self.peers[message.destination].inbox
        assert inbox is not None
        before = inbox.outstanding
        instructions = inbox.failed(message, reason, again=again)
        assert message in before or not instructions
        self.seen["asked again"] += Fetch(message) in instructions
        self.ask(message.destination, instructions)

    def check(self) -> None:
        for peer in self.peers.values():
            assert len(peer.outbox.in_flight) <= self.window_out
            assert all(message.run_id == peer.outbox.run_id for message in peer.outbox.in_flight)
            if peer.inbox is not None:
                assert len(peer.inbox.outstanding) <= self.window_in
                assert not peer.inbox.outstanding & peer.counted
        for message in self.unanswered:
            peer = self.peers[message.sender]
            if peer.begun and message.run_id == self.run_id:
                assert self.full(peer.outbox, message) or self.shut(message), "waits for nothing"

    # -- what happens next -------------------------------------------------------------------------------------

    def step(self, *, lose: float = 0.0, duplicate: float = 0.0, corrupt: float = 0.0, abort: float = 0.0) -> None:
        """One event; time-outs strike when nothing else can happen, and at random where messages get lost."""
        rng = self.rng
        late = [rank for rank, peer in self.peers.items() if not peer.begun and rank not in self.aborting]
        outstanding = [m for peer in self.peers.values() if peer.inbox for m in sorted(peer.inbox.outstanding)]
        if self.aborting:
            if not self.wire or rng.random() < 0.2:
                self.abort(rng.choice(sorted(self.aborting)))
                return
        elif rng.random() < abort or any(peer.vote not in (None, "ready") for peer in self.peers.values()):
            self.aborting = set(self.peers)
            return
        elif late and (not self.wire or rng.random() < 0.3):
            self.begin(rng.choice(late))
            return
        elif all(peer.vote == "ready" for peer in self.peers.values()):
            self.commit()
            return
        if outstanding and (not self.wire or rng.random() < lose / 10):
            self.seen["timed out"] += 1
            self.fail(rng.choice(outstanding), "timed out", again=True)
            return
        if self.unanswered and rng.random() < lose / 10:  # the sender lets nobody wait for long
            message = rng.choice(sorted(self.unanswered))
            self.unanswered.discard(message)
            self.peers[message.sender].outbox.withdraw(message)
            self.wire.append(("later", message))
            return
        if self.wire:
            place = rng.randrange(len(self.wire))
            kind, message = self.wire[place]
            if rng.random() >= duplicate:
                self.wire[place] = self.wire[-1]
                self.wire.pop()
            if rng.random() < lose:
                self.seen[f"lost {kind}"] += 1
                return
            self.deliver(kind, message, corrupt=rng.random() < corrupt)

    def finish(self) -> Counter[str]:
        """Steps without further faults until the present run is decided; many times more than it can need."""
        run_id, seen = self.run_id, Counter(self.seen)
        for _ in range(20_000):
            if self.run_id != run_id:
                return self.seen - seen
            self.step()
            self.check()
        raise AssertionError(f"run {run_id} is deadlocked: {self.peers}")


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """What has happened under all schedules of the module."""
    return Counter()


def run_schedule(seed: int, seen: Counter[str]) -> None:
    """Run the schedules of a seed. ``tests/benchmarks/simulations.py`` runs many seeds."""
    rng = random.Random(seed)
    for _ in range(8):
        world = World(rng, seen)
        faults = {name: rng.choice([0.0, high / 10, high]) for name, high in FAULTS.items()}
        for _ in range(250):
            world.step(**faults)
            world.check()
        # However the messages have been lost so far, the run comes to an end, and the next one is as good as new.
        world.finish()
        world.wire.clear()
        assert world.finish()["committed"] == 1


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules(seed: int, seen: Counter[str]) -> None:
    run_schedule(seed, seen)


@pytest.mark.parametrize("seed", range(100))
def test_without_losses_a_run_is_committed_and_nothing_times_out(seed: int, seen: Counter[str]) -> None:
    world = World(random.Random(seed), seen)
    for _ in range(5):
        happened = world.finish()
        assert happened["committed"] == 1
        assert not happened["timed out"] + happened["failed"] + happened["asked again"]


@pytest.mark.slow
def test_messages_that_are_asked_for_again_make_no_others_wait_for_ever(seen: Counter[str]) -> None:
    for seed in range(1500, 1620):
        world = World(random.Random(seed), seen, attempts=1000)
        before, run_id = Counter(seen), world.run_id + 3
        while world.run_id < run_id:
            world.step(corrupt=0.3)
            world.check()
            # Nothing is lost, so a time-out strikes only if nothing else can happen.
            assert seen["timed out"] == before["timed out"], f"deadlocked: {world.peers}"
        assert seen["committed"] == before["committed"] + 3


@pytest.mark.parametrize("seed", range(30))
def test_a_sender_whose_acknowledgements_are_all_lost_fails_the_run_and_does_not_hang(
    seed: int, seen: Counter[str]
) -> None:
    world = World(random.Random(seed), seen)
    for _ in range(20):
        run_id = world.run_id
        for _ in range(5_000):
            world.step()
            world.check()
            world.wire = [(kind, message) for kind, message in world.wire if kind != "acknowledgement"]
            if world.run_id != run_id:
                break
        assert world.run_id == run_id + 1, "deadlocked"
    # With acknowledgements the same participants are as good as new.
    world.finish()
    assert world.finish()["committed"] == 1


@pytest.mark.slow
def test_the_schedules_saw_everything(seen: Counter[str]) -> None:
    """Runs last: the tests above are worth nothing if the faults they are about do not happen."""
    lost = "lost request, lost rows, lost acknowledgement, lost refused"
    runs = "early, resumed, aborted, committed, failed, stale refused, late or twice"
    waits = "answered later, read from the store, waited for a gate, asked again, timed out"
    for what in f"{lost}, {runs}, {waits}".split(", "):
        assert seen[what] >= 20, seen
