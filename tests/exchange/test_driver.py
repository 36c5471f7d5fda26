"""Senders and receivers in one event loop, over a network that delays, loses and corrupts.

The network hands over the very arrays that a sender packed, so rows that were packed over too early arrive corrupted.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dshuffle.errors import CorruptChunk, DatasetError
from dshuffle.exchange.buffers import BufferPool
from dshuffle.exchange.cache import CachePartition
from dshuffle.exchange.driver import Receiver, Reply, Sender
from dshuffle.exchange.inbox import Inbox
from dshuffle.exchange.messages import Cut, MessageId
from dshuffle.exchange.outbox import Outbox
from dshuffle.rows import RowLayout, checksum_rows

SERVER, STORE = -1, -2
LAYOUT = RowLayout.of({"x": (np.dtype("u1"), (21,))})

Carry = Callable[[MessageId], Awaitable[Reply]]


class Truth:
    """What the store holds; also the server's rows."""

    def __init__(self, n_samples: int, rng: random.Random) -> None:
        self.rows = np.frombuffer(rng.randbytes(n_samples * LAYOUT.nbytes), np.uint8).reshape(n_samples, -1)
        self.checksums = checksum_rows(self.rows, np.arange(n_samples))

    def pack(self, sample_ids: np.ndarray, rows: np.ndarray, checksums: np.ndarray) -> None:
        rows[:], checksums[:] = self.rows[sample_ids], self.checksums[sample_ids]


class Participant:
    """A rank, or the server: it has no cache and receives nothing."""

    def __init__(self, cluster: Cluster, who: int, *, window: int, attempts: int, timeout: float) -> None:
        self.who, self.cluster = who, cluster
        n_samples = len(cluster.truth.rows)
        self.cache = CachePartition(LAYOUT, capacity=n_samples, incoming=n_samples)
        self.held = np.zeros(0, np.int64)
        self.outbox, cut = Outbox(who, window=window), Cut(cluster.message_rows)
        self.sender = Sender(
            self.outbox,
            cluster.truth if who == SERVER else self.cache,
            BufferPool(LAYOUT, cut.rows_per_message, window),
            cut,
            self,
            cluster.executor,
        )
        self.inbox = Inbox(max(who, 0), window=window, attempts=attempts)
        self.receiver = Receiver(
            self.inbox,
            self.cache,
            cut,
            self,
            cluster.executor,
            read_store=lambda sample_ids, slots: cluster.read_store(self, sample_ids, slots),
            store=STORE,
            report=lambda run_id, reason: cluster.report(who, run_id, reason),
            timeout=timeout,
        )

    def is_local(self, participant: int) -> bool:
        return participant == self.who

    async def fetch(self, message: MessageId) -> Reply:
        assert message.destination == self.who
        self.cluster.asked[message] += 1
        return await self.cluster.carry(message)

    async def acknowledge(self, message: MessageId) -> None:
        sample_ids, slots = self.receiver._flows[message.sender]
        rows = slice(*Cut(self.cluster.message_rows).bounds(message.sequence, len(sample_ids)))
        # Whatever is acknowledged has been unpacked, and rightly.
        np.testing.assert_array_equal(self.cache.rows[slots[rows]], self.cluster.truth.rows[sample_ids[rows]])
        await self.cluster.carry_acknowledgement(message)


class Cluster:
    """Participants with random partitions, and what they owe each other for another random assignment."""

    def __init__(
        self,
        seed: int = 0,
        *,
        n_ranks: int = 3,
        n_samples: int = 60,
        window: int = 2,
        attempts: int = 3,
        timeout: float = 60.0,
        message_rows: int = 3,
        senders: tuple[int, ...] | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.message_rows = message_rows
        self.truth = Truth(n_samples, self.rng)
        self.executor = ThreadPoolExecutor(3)
        self.participants = {
            who: Participant(self, who, window=window, attempts=attempts, timeout=timeout)
            for who in range(SERVER, n_ranks)
        }
        self.ranks = {who: participant for who, participant in self.participants.items() if who != SERVER}
        self.asked: Counter[MessageId] = Counter()
        self.acknowledged: Counter[MessageId] = Counter()
        self.reads = 0
        self.carry: Carry = self.wire
        self.plan(np.array([self.rng.randrange(n_ranks) for _ in range(n_samples)]), (STORE,))
        self.first_senders = senders

    def plan(self, assignment: np.ndarray, senders: tuple[int, ...] | None) -> None:
        """Who sends what for an assignment: any of ``senders`` that has it, by default whoever has it."""
        self.next_held = {rank: np.flatnonzero(assignment == rank) for rank in self.ranks}
        self.sends: dict[int, dict[int, np.ndarray]] = defaultdict(dict)
        for rank, next_held in self.next_held.items():
            flows = defaultdict(list)
            for sample in np.setdiff1d(next_held, self.ranks[rank].held).tolist():
                holders = [who for who, peer in self.ranks.items() if sample in peer.held]
                holders = [who for who in [*holders, *holders, SERVER, STORE] if senders is None or who in senders]
                flows[self.rng.choice(holders)].append(sample)
            for sender, samples in flows.items():
                self.rng.shuffle(samples)
                self.sends[sender][rank] = np.array(samples)

    # -- the network -------------------------------------------------------------------------------------------

    async def local(self, message: MessageId) -> Reply:
        """As within a process: an asker who gives up takes the answering with him."""
        return await self.participants[message.sender].sender.serve(message)

    async def wire(self, message: MessageId) -> Reply:
        """As over TCP: the sender goes on answering when the asker has given up."""
        return await asyncio.shield(asyncio.ensure_future(self.local(message)))

    async def carry_acknowledgement(self, message: MessageId) -> None:
        self.acknowledged[message] += 1
        self.participants[message.sender].sender.acknowledged(message)

    async def pause(self) -> None:
        await asyncio.sleep(self.rng.choice([0, 0, 0.0005, 0.002]))

    def read_store(self, reader: Participant, sample_ids: np.ndarray, slots: np.ndarray) -> None:
        self.reads += 1
        reader.cache.rows[slots] = self.truth.rows[sample_ids]
        reader.cache.seal(sample_ids, slots)

    # -- the scheduler -----------------------------------------------------------------------------------------

    def report(self, who: int, run_id: int, reason: str | None) -> None:
        assert run_id == self.run_id
        assert who not in self.votes, "voted twice"
        self.votes[who] = reason
        if reason is not None or len(self.votes) == len(self.ranks):
            self.decided.set()

    async def begin(self, run_id: int) -> None:
        self.run_id, self.votes, self.decided = run_id, {}, asyncio.Event()
        for who in self.rng.sample(sorted(self.participants), len(self.participants)):
            self.begin_on(who)
            await self.pause()

    def begin_on(self, who: int) -> None:
        participant = self.participants[who]
        participant.sender.begin(self.run_id, self.sends[who])
        if who != SERVER:
            receives = {sender: flows[who] for sender, flows in self.sends.items() if who in flows}
            slots = participant.cache.reserve(np.concatenate([np.zeros(0, np.int64), *receives.values()]))
            participant.receiver.begin(self.run_id, receives, slots)

    async def exchange(self, run_id: int) -> dict[int, str | None]:
        await self.begin(run_id)
        await self.decided.wait()
        return self.votes

    async def abort(self) -> None:
        for participant in self.participants.values():
            participant.sender.end()
            await participant.receiver.abort()
            assert not participant.outbox.in_flight
            assert not participant.inbox.outstanding
        self.check()

    def commit(self) -> None:
        assert self.votes == dict.fromkeys(self.ranks)
        rows = sum(len(ids) for flows in self.sends.values() for ids in flows.values())
        assert sum(peer.receiver.meter.rows for peer in self.ranks.values()) == rows
        for participant in self.participants.values():
            participant.sender.end()
        for rank, peer in self.ranks.items():
            peer.receiver.commit(self.run_id)
            peer.cache.commit(peer.cache.prepare(self.next_held[rank]))
            peer.held = self.next_held[rank]
        self.check()

    def check(self) -> None:
        """Every partition holds what it should, with the store's bytes and checksums."""
        for peer in self.ranks.values():
            np.testing.assert_array_equal(peer.cache.index.sample_ids, peer.held)
            slots = peer.cache.index.find(peer.held)
            np.testing.assert_array_equal(peer.cache.rows[slots], self.truth.rows[peer.held])
            np.testing.assert_array_equal(peer.cache.checksums[slots], self.truth.checksums[peer.held])

    async def load(self) -> None:
        """The first epoch, from the store; the next one is to be exchanged as run 2."""
        await self.exchange(1)
        self.commit()
        n_samples, ranks = len(self.truth.rows), sorted(self.ranks)
        self.plan(np.array([self.rng.choice(ranks) for _ in range(n_samples)]), self.first_senders)
        self.reads = 0

    def messages(self) -> set[MessageId]:
        """Every message of the present run."""
        cut = Cut(self.message_rows)
        return {
            MessageId(self.run_id, sender, rank, sequence)
            for sender, flows in self.sends.items()
            if sender != STORE
            for rank, sample_ids in flows.items()
            for sequence in range(cut.count(len(sample_ids)))
        }


def play(cluster: Cluster, scenario: Callable[[Cluster], Awaitable[Any]]) -> Any:
    """Load the first epoch, then play the scenario."""

    async def main() -> Any:
        await cluster.load()
        return await asyncio.wait_for(scenario(cluster), 60)

    with cluster.executor:
        return asyncio.run(main())


def corrupted(reply: Reply, rng: random.Random) -> Reply:
    rows = reply["rows"].copy()  # as it is on the wire, not in the sender's buffer
    rows[rng.randrange(len(rows)), rng.randrange(LAYOUT.nbytes)] ^= 1 << rng.randrange(8)
    return {**reply, "rows": rows}


PEERS = (0, 1, 2)

# -- what arrives --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["local", "wire"])
@pytest.mark.parametrize("seed", range(8))
def test_partitions_are_byte_exact_and_nothing_is_sent_twice(seed: int, over: str) -> None:
    rng = random.Random(seed)
    # One attempt, and replies that wait before they are read: a buffer used again too early would fail the run.
    cluster = Cluster(seed, n_ranks=rng.randint(1, 4), window=rng.randint(1, 3), attempts=1)

    async def slowly(message: MessageId) -> Reply:
        await cluster.pause()
        reply = await getattr(cluster, over)(message)
        await cluster.pause()
        return reply

    async def scenario(cluster: Cluster) -> None:
        cluster.carry = slowly
        for run_id in range(2, 6):
            cluster.asked.clear()
            cluster.acknowledged.clear()
            assert await cluster.exchange(run_id) == dict.fromkeys(cluster.ranks)
            assert cluster.asked == cluster.acknowledged == Counter(cluster.messages())
            sent = sum(peer.sender.meter.sent_bytes for peer in cluster.participants.values())
            received = sum(peer.receiver.meter.received_bytes for peer in cluster.ranks.values())
            n_sent = sum(len(ids) for who in cluster.participants for ids in cluster.sends[who].values())
            assert sent == received == n_sent * (LAYOUT.nbytes + 4)
            cluster.commit()
            n_samples, ranks = len(cluster.truth.rows), sorted(cluster.ranks)
            cluster.plan(np.array([rng.choice(ranks) for _ in range(n_samples)]), None)

    play(cluster, scenario)


@pytest.mark.parametrize("over", ["local", "wire"])
@pytest.mark.parametrize("seed", range(15))
def test_under_faults_a_run_is_right_or_fails_with_its_reason(seed: int, over: str) -> None:
    rng = random.Random(seed)
    chance = rng.choice([0.02, 0.1, 0.3])

    async def faulty(message: MessageId) -> Reply:
        await cluster.pause()
        fault = rng.choice(["request lost", "reply lost", "corrupted", "unknown"]) if rng.random() < chance else None
        if fault == "request lost":
            raise OSError(fault)
        if fault == "unknown":
            return None  # type: ignore[return-value]
        reply = await getattr(cluster, over)(message)
        await cluster.pause()
        if fault == "reply lost":
            raise TimeoutError(fault)
        return corrupted(reply, rng) if fault and reply["status"] == "OK" else reply

    async def acknowledge(message: MessageId) -> None:
        if rng.random() < chance / 4:
            raise OSError("acknowledgement lost")
        await Cluster.carry_acknowledgement(cluster, message)

    async def scenario(cluster: Cluster) -> None:
        cluster.carry = faulty
        cluster.carry_acknowledgement = acknowledge  # type: ignore[method-assign]
        for run_id in range(2, 8):
            votes = await cluster.exchange(run_id)
            failures = [reason for reason in votes.values() if reason is not None]
            if not failures:
                cluster.commit()
                return
            assert all(any(why in reason for why in REASONS) for reason in failures), failures
            assert all(reason.startswith(f"run {run_id}, ") for reason in failures)
            await cluster.abort()
        cluster.carry, cluster.carry_acknowledgement = cluster.wire, Cluster.carry_acknowledgement.__get__(cluster)
        assert await cluster.exchange(run_id + 1) == dict.fromkeys(cluster.ranks)
        cluster.commit()

    cluster = Cluster(seed)
    play(cluster, scenario)


REASONS = [
    "OSError: request lost (attempt 3 of 3)",
    "TimeoutError: reply lost (attempt 3 of 3)",
    "OSError: acknowledgement lost (attempt 3 of 3)",
    "arrived corrupted (attempt 3 of 3)",
    "does not know dshuffle (its reply was None) (attempt 3 of 3)",
]


def test_a_corrupted_message_is_fetched_again_and_acknowledged_once() -> None:
    cluster = Cluster(senders=PEERS)

    async def first_corrupted(message: MessageId) -> Reply:
        reply = await cluster.wire(message)
        return corrupted(reply, cluster.rng) if cluster.asked[message] == 1 else reply

    async def late(message: MessageId) -> None:
        # Another request of the same receiver may overtake it: it must not name rows that are still to be packed.
        asyncio.get_running_loop().call_later(0.01, cluster.participants[message.sender].sender.acknowledged, message)
        cluster.acknowledged[message] += 1

    async def scenario(cluster: Cluster) -> None:
        cluster.carry, cluster.carry_acknowledgement = first_corrupted, late  # type: ignore[method-assign]
        await cluster.exchange(2)
        assert cluster.asked == Counter({message: 2 for message in cluster.messages()})
        assert cluster.acknowledged == Counter(cluster.messages())
        cluster.commit()

    play(cluster, scenario)


# -- what fails ----------------------------------------------------------------------------------------------------


def failure(cluster: Cluster, carry: Carry) -> str:
    """Why a run over such a network fails."""

    async def scenario(cluster: Cluster) -> str:
        cluster.carry = carry
        votes = await cluster.exchange(2)
        await cluster.abort()
        # What made it fail is gone: the next run is committed.
        cluster.carry = cluster.wire
        await cluster.exchange(3)
        cluster.commit()
        return next(reason for reason in votes.values() if reason is not None)

    return str(play(cluster, scenario))


def test_a_message_that_is_always_corrupted_names_its_sample() -> None:
    cluster = Cluster(senders=PEERS)

    async def carry(message: MessageId) -> Reply:
        reply = await cluster.wire(message)
        if message.sequence:
            return reply
        return {**reply, "rows": np.where(np.arange(len(reply["rows"]))[:, None] == 1, 0, reply["rows"])}

    reason = failure(cluster, carry)
    samples = [int(ids[1]) for flows in cluster.sends.values() for ids in flows.values() if len(ids) > 1]
    assert any(f"ChecksumMismatch: the row of sample {sample} arrived corrupted" in reason for sample in samples)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (None, "participant {} does not know dshuffle (its reply was None) (attempt 3 of 3)"),
        ({}, "participant {} does not know dshuffle (its reply was {{}}) (attempt 3 of 3)"),
        ({"status": "refused", "reason": "closed", "again": False}, "closed (attempt 1 of 3)"),
        ({"status": "refused", "reason": "busy", "again": True}, "busy (attempt 3 of 3)"),
    ],
)
def test_an_unusable_reply_is_the_reason(reply: Reply, words: str) -> None:
    async def carry(message: MessageId) -> Reply:
        return reply

    reason = failure(Cluster(senders=PEERS), carry)
    assert any(words.format(sender) in reason for sender in PEERS), reason


@pytest.mark.parametrize(
    ("error", "attempt"), [(ConnectionResetError("cut off"), 3), (RuntimeError("a bug"), 1), (MemoryError("full"), 1)]
)
def test_an_error_is_the_reason(error: Exception, attempt: int) -> None:
    async def carry(message: MessageId) -> Reply:
        raise error

    reason = failure(Cluster(senders=PEERS), carry)
    assert f"{type(error).__name__}: {error} (attempt {attempt} of 3)" in reason


def test_a_reply_that_never_comes_times_out() -> None:
    async def carry(message: MessageId) -> Reply:
        return await asyncio.get_running_loop().create_future()

    reason = failure(Cluster(senders=PEERS, timeout=0.2), carry)
    assert "TimeoutError: no reply within 0.2 s (attempt 3 of 3)" in reason


def test_a_sender_that_lacks_a_row_is_not_asked_again() -> None:
    cluster = Cluster(senders=PEERS)

    async def scenario(cluster: Cluster) -> None:
        sender, flows = next((who, flows) for who, flows in cluster.sends.items() if flows)
        rank = next(iter(flows))
        missing = next(sample for sample in cluster.next_held[rank] if sample not in cluster.ranks[sender].held)
        flows[rank] = np.array([missing])
        votes = await cluster.exchange(2)
        assert f"ExchangeError: sample {missing} is not in this cache partition" in (votes[rank] or "")
        assert "(attempt 1 of 3)" in (votes[rank] or "")
        assert MessageId(2, sender, rank, 0) not in cluster.ranks[sender].outbox.in_flight

    play(cluster, scenario)


# -- what waits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["local", "wire"])
def test_who_asks_again_while_waiting_for_the_window_is_answered_in_the_end(over: str) -> None:
    cluster = Cluster(n_samples=20, n_ranks=2, senders=(SERVER,), window=1, attempts=1000, timeout=0.05)
    held_back: list[MessageId] = []

    async def late(message: MessageId) -> None:
        held_back.append(message)
        await asyncio.sleep(0)

    async def scenario(cluster: Cluster) -> None:
        cluster.carry = getattr(cluster, over)
        cluster.carry_acknowledgement = late  # type: ignore[method-assign]
        await cluster.begin(2)
        while not cluster.decided.is_set():
            await asyncio.sleep(0.12)  # long enough for the others to give up waiting, twice
            message = held_back.pop(0)
            assert max(cluster.asked.values()) < 50, "refused at once, and asked for again at once"
            cluster.participants[SERVER].sender.acknowledged(message)
            assert len(cluster.participants[SERVER].outbox.in_flight) <= 1
        cluster.commit()
        assert max(cluster.asked.values()) > 1

    play(cluster, scenario)


def test_requests_before_the_run_wait_for_it_and_after_it_are_refused() -> None:
    async def scenario(cluster: Cluster) -> None:
        early = MessageId(3, SERVER, 0, 10**6)
        sender = cluster.participants[SERVER].sender
        request = asyncio.ensure_future(sender.serve(early))
        await cluster.exchange(2)
        cluster.commit()
        assert not request.done()
        sender.begin(3, {0: np.arange(5)})
        assert await request == {"status": "refused", "reason": "this run owes 0 2 messages", "again": False}
        for run_id in (1, 2):
            reply = await sender.serve(MessageId(run_id, SERVER, 0, 0))
            assert reply["reason"] == f"stale: participant -1 is past run {run_id}"
            assert not reply["again"]

    play(Cluster(), scenario)


# -- the store -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [CorruptChunk("chunk 7 of array 'x'"), DatasetError("it is gone"), ValueError("a bug")], ids=repr
)
def test_what_the_store_cannot_give_is_not_asked_for_again(error: Exception) -> None:
    def fail(*_: object) -> None:
        cluster.reads += 1
        raise error

    async def scenario(cluster: Cluster) -> None:
        cluster.read_store = fail  # type: ignore[method-assign]
        votes = await cluster.exchange(2)
        await cluster.abort()
        reasons = [reason for reason in votes.values() if reason]
        assert reasons
        assert all(f"{type(error).__name__}: {error} (attempt 1 of 3)" in reason for reason in reasons)
        assert cluster.reads <= len(cluster.ranks)
        del cluster.read_store  # type: ignore[attr-defined]
        await cluster.exchange(3)
        cluster.commit()

    cluster = Cluster(senders=(STORE, *PEERS))
    play(cluster, scenario)


def test_a_store_that_stumbles_is_read_again() -> None:
    cluster = Cluster(senders=(STORE,))

    def stumble(reader: Participant, sample_ids: np.ndarray, slots: np.ndarray) -> None:
        reader.cache.rows[slots[0]] = 0
        if cluster.reads < 2:
            cluster.reads += 1
            raise ConnectionResetError("by peer")
        Cluster.read_store(cluster, reader, sample_ids, slots)

    async def scenario(cluster: Cluster) -> None:
        cluster.read_store = stumble  # type: ignore[method-assign]
        await cluster.exchange(2)
        cluster.commit()

    play(cluster, scenario)
    assert cluster.reads == 2 + 3


# -- aborts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["local", "wire"])
@pytest.mark.parametrize("seed", range(10))
def test_after_an_abort_nothing_is_written_and_the_next_run_is_right(seed: int, over: str) -> None:
    rng = random.Random(seed)
    writing = 0

    def slow(write: Callable[..., None]) -> Callable[..., None]:
        def slowly(*args: Any) -> None:
            nonlocal writing
            writing += 1
            time.sleep(rng.choice([0, 0.001, 0.01]))
            write(*args)
            writing -= 1

        return slowly

    async def late(message: MessageId) -> Reply:
        reply = await getattr(cluster, over)(message)
        await cluster.pause()
        return reply

    async def scenario(cluster: Cluster) -> None:
        for peer in cluster.ranks.values():
            peer.cache.unpack = slow(peer.cache.unpack)  # type: ignore[method-assign]
        cluster.read_store = slow(cluster.read_store)  # type: ignore[method-assign]
        cluster.carry = late
        for run_id in range(2, 7):
            await cluster.begin(run_id)
            await asyncio.sleep(rng.choice([0, 0.001, 0.005, 0.01]))
            await cluster.abort()
            assert not writing
            before = [(peer.cache.rows.copy(), peer.cache.checksums.copy()) for peer in cluster.ranks.values()]
            await asyncio.sleep(rng.choice([0, 0.015]))
            for peer, (rows, checksums) in zip(cluster.ranks.values(), before, strict=True):
                np.testing.assert_array_equal(peer.cache.rows, rows)
                np.testing.assert_array_equal(peer.cache.checksums, checksums)
        assert await cluster.exchange(run_id + 1) == dict.fromkeys(cluster.ranks)
        cluster.commit()

    cluster = Cluster(seed, attempts=1)
    play(cluster, scenario)


def test_an_abort_waits_for_the_thread_that_writes() -> None:
    started, release = threading.Event(), threading.Event()

    def read(reader: Participant, sample_ids: np.ndarray, slots: np.ndarray) -> None:
        started.set()
        release.wait()
        Cluster.read_store(cluster, reader, sample_ids, slots)

    async def scenario(cluster: Cluster) -> None:
        cluster.read_store = read  # type: ignore[method-assign]
        await cluster.begin(2)
        await asyncio.to_thread(started.wait)
        abort = asyncio.ensure_future(cluster.abort())
        await asyncio.sleep(0.05)
        assert not abort.done()
        release.set()
        await abort

    cluster = Cluster(senders=(STORE,))
    play(cluster, scenario)


def test_an_abort_does_not_wait_for_a_sender_that_never_begins() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.run_id, cluster.votes, cluster.decided = 2, {}, asyncio.Event()
        cluster.begin_on(0)
        cluster.begin_on(1)  # and the server does not
        await asyncio.sleep(0.01)
        await asyncio.wait_for(cluster.abort(), 5)
        await cluster.exchange(3)
        cluster.commit()

    play(Cluster(n_ranks=2, senders=(SERVER,)), scenario)
