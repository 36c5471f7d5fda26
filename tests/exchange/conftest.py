"""Several participants of an exchange in one event loop, over a network that a test can make late, lossy or wrong.

The network hands over the very arrays that a sender packed, so rows that were packed over too early arrive corrupted.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.comms import BufferPool, Reply, RowsReply, from_fields, to_fields
from dshuffle.exchange.endpoints import JobQueue, Receiver, Sender
from dshuffle.exchange.mailboxes import Flow, Inbox, MessageId, Outbox, flows_of_samples
from dshuffle.exchange.transports import ArrivingRows, leaving
from dshuffle.planning import name_of
from dshuffle.rows import RowLayout, checksum_rows

SERVER, STORE = -1, -2
LAYOUT = RowLayout.of({"x": (np.dtype("u1"), (21,))})

Fields = dict[str, Any]
Carry = Callable[[MessageId], Awaitable[Fields]]


def given(value: Any) -> asyncio.Future[Any]:
    """What a run starts with, there at once."""
    future = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


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
        self.outbox = Outbox(who, window=window)
        self.holder = cluster.truth if who == SERVER else self.cache
        self.sender = Sender(self.outbox, BufferPool(LAYOUT, cluster.message_rows, window), self, cluster.jobs)
        self.arriving: tuple[np.ndarray, np.ndarray, dict[int, Flow]]
        self.inbox = Inbox(max(who, 0), window=window, attempts=attempts)
        self.receiver = Receiver(
            self.inbox,
            self,
            cluster.jobs,
            timeout=timeout,
            open_gate=lambda run_id, gate: self.sender.open_gate(run_id, gate),
        )

    def begin(self, run_id: int, receives: dict[int, np.ndarray]) -> None:
        samples, flows = flows_of_samples(receives, at_most=self.cluster.message_rows)
        slots = self.arriving[1] if self.cluster.resumed else self.cache.reserve(samples)
        self.arriving = samples, slots, flows
        sink = ArrivingRows(self.cache, samples, slots, self.bring)
        self.receiver.begin(
            run_id,
            flows,
            given(sink),
            lambda reason, again: self.cluster.report(self.who, run_id, reason),
            resumed=self.cluster.resumed,
        )

    async def bring(
        self, sample_ids: np.ndarray, slots: np.ndarray, stop: Callable[[], bool], *, done: np.ndarray, recovers: bool
    ) -> None:
        """Read the store, a few rows at a time; what an earlier attempt has read is not read again."""
        for first in range(0, len(sample_ids), self.cluster.store_rows):
            part = np.arange(len(sample_ids))[first : first + self.cluster.store_rows]
            part = part[~done[part]]
            if len(part):
                await self.cluster.jobs.run(self.cluster.read_store, self, sample_ids[part], slots[part])
                done[part] = True

    def is_local(self, participant: int) -> bool:
        places = {SERVER: self.cluster.server_at}
        return places.get(participant, participant) == places.get(self.who, self.who)

    async def fetch(self, message: MessageId) -> Reply:
        assert message.destination == self.who
        self.cluster.asked[message] += 1
        return from_fields(await self.cluster.carry(message), name_of(message.sender))

    async def acknowledge(self, message: MessageId) -> None:
        sample_ids, slots, flows = self.arriving
        rows = slice(*flows[message.sender].message(message.sequence))
        # Whatever is acknowledged has been unpacked, and rightly.
        np.testing.assert_array_equal(self.cache.rows[slots[rows]], self.cluster.truth.rows[sample_ids[rows]])
        await self.cluster.carry_acknowledgement(message)


class Cluster:
    """Participants with random partitions, and what they owe each other for another random assignment.

    The server lives at ``server_at``: in a process of its own, or in that of a rank.
    """

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
        server_at: int = SERVER,
    ) -> None:
        self.rng = random.Random(seed)
        self.message_rows = message_rows
        self.store_rows = 10
        self.server_at = server_at
        self.truth = Truth(n_samples, self.rng)
        self.jobs = JobQueue(3, "test")
        self.participants = {
            who: Participant(self, who, window=window, attempts=attempts, timeout=timeout)
            for who in range(SERVER, n_ranks)
        }
        self.ranks = {who: participant for who, participant in self.participants.items() if who != SERVER}
        self.asked: Counter[MessageId] = Counter()
        self.acknowledged: Counter[MessageId] = Counter()
        self.reads = 0
        self.resumed = False
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

    async def local(self, message: MessageId) -> Fields:
        """As within a process: an asker who gives up takes the answering with him."""
        reply = await self.participants[message.sender].sender.serve(message)
        if not isinstance(reply, RowsReply):
            return to_fields(reply)
        arrays = {"rows": reply.rows, "checksums": reply.checksums}  # a test sees when they are packed over
        return {"status": "OK", "acknowledge": reply.acknowledge, **arrays}

    async def wire(self, message: MessageId) -> Fields:
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
        reader.cache.add_checksums(sample_ids, slots)

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
        samples, outgoing = flows_of_samples(self.sends[who], at_most=self.message_rows)
        participant.sender.begin(self.run_id, outgoing, given(leaving(participant.holder.pack, samples)))
        if who != SERVER:
            participant.begin(
                self.run_id, {who_else: sends[who] for who_else, sends in self.sends.items() if who in sends}
            )

    async def exchange(self, run_id: int, *, resumed: bool = False) -> dict[int, str | None]:
        self.resumed = resumed
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
            peer.receiver.commit()
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
        return {
            MessageId(self.run_id, sender, rank, sequence)
            for sender, flows in self.sends.items()
            if sender != STORE
            for rank, sample_ids in flows.items()
            for sequence in range(-(-len(sample_ids) // self.message_rows))
        }

    def play(self, scenario: Callable[[], Awaitable[Any]]) -> Any:
        """Load the first epoch, then play the scenario."""

        async def main() -> Any:
            try:
                await self.load()
                return await asyncio.wait_for(scenario(), 60)
            finally:
                await self.jobs.close()

        return asyncio.run(main())


@pytest.fixture(scope="session")
def new_cluster() -> type[Cluster]:
    return Cluster
