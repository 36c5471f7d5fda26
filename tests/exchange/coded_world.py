"""All participants of a coded exchange without a network. Messages go in any order that gates allow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import numpy as np

from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.transports import PacketDecoder, PacketStore, coded_part
from dshuffle.planning import SERVER, Packets
from dshuffle.planning.delivery.relay import route
from dshuffle.rows import RowLayout, checksum_rows

from ..draws import check_plan, plan_delivery

DELIVERIES = ["clique", "coded", "leftover", "ubershuffle"]
ROW_SIZES = [8, 12, 21]  # one of each kernel

Message = tuple[int, int, int]
"""(sender, destination, sequence)"""


class Truth:
    """The store's rows, and all packets of a plan."""

    def __init__(self, n_samples: int, plan: Packets, nbytes: int, rng: np.random.Generator) -> None:
        self.rows = rng.integers(0, 256, (n_samples, nbytes), dtype=np.uint8)
        self.checksums = checksum_rows(self.rows, np.arange(n_samples))
        self.packets = np.zeros((plan.n_packets, nbytes), np.uint8)
        self.packet_sums = np.zeros(plan.n_packets, np.uint32)
        for packet, (begin, end) in enumerate(pairwise(plan.offsets)):
            for sample in plan.samples[begin:end]:
                self.packets[packet] ^= self.rows[sample]
                self.packet_sums[packet] ^= self.checksums[sample]


@dataclass
class Rank:
    """A worker: what it holds, and the two ends of its part of the exchange."""

    cache: CachePartition
    held: np.ndarray
    wanted: np.ndarray
    slots: np.ndarray
    store: PacketStore
    decoder: PacketDecoder


class World:
    """All participants of one exchange, the server (which has every packet) included."""

    def __init__(
        self,
        n: int,
        plan: Packets,
        holders: list[int],
        assignment: list[int],
        rng: np.random.Generator,
        *,
        relay: str = "unicast",
        nbytes: int = 21,
    ) -> None:
        check_plan(plan, np.array(holders, np.uint64), assignment, n)
        self.n, self.plan, self.assignment, self.rng = n, plan, np.array(assignment), rng
        self.truth = Truth(len(assignment), plan, nbytes, rng)
        self.hops = route(relay, plan, n, int(rng.integers(1, 8)))
        at_most = int(rng.integers(1, 8))
        cut = {who: coded_part(plan, self.hops, who, at_most=at_most) for who in range(SERVER, n)}
        self.parts = {
            who: SimpleNamespace(leaving=sent, outgoing=out, arriving=received, incoming=into)
            for who, ((sent, out), (received, into)) in cut.items()
        }
        self.ranks = {rank: self.start(rank, holders) for rank in range(n)}
        self.messages: list[Message] = [
            (sender, to, sequence)
            for to, part in self.parts.items()
            for sender, flow in part.incoming.items()
            for sequence in range(flow.n_messages)
        ]
        assert sorted(self.messages) == sorted(
            (sender, to, sequence)
            for sender, part in self.parts.items()
            for to, flow in part.outgoing.items()
            for sequence in range(flow.n_messages)
        )
        assert all(0 < len(self.items(message)) <= at_most for message in self.messages)
        self.towards = Counter((to, self.gates(sender, to)[1][sequence]) for sender, to, sequence in self.messages)
        self.damaged = -1  # a packet of which somebody has another copy than the server's

    def start(self, rank: int, holders: list[int]) -> Rank:
        truth, part = self.truth, self.parts[rank]
        held = self.rng.permutation([sample for sample, mask in enumerate(holders) if mask >> rank & 1]).astype(int)
        samples = self.plan.samples[part.arriving]
        wanted = self.assignment[samples] == rank
        layout = RowLayout.of({"x": (np.dtype("u1"), (truth.rows.shape[1],))})
        # Slots that are taken already, so that the rows do not stand in the order of anything.
        cache = CachePartition(layout, capacity=len(held) + 5, incoming=int(wanted.sum()))
        cache.rows[:], cache.checksums[:] = 0xA5, 0xA5A5A5A5
        slots = cache.reserve(np.concatenate([held, np.arange(10**6, 10**6 + 5)]).astype(np.int64))
        cache.rows[slots[: len(held)]] = truth.rows[held]
        cache.add_checksums(held, slots[: len(held)])
        cache.commit(cache.prepare(np.sort(held)))
        store = PacketStore(layout, part.leaving)
        slots = cache.reserve(samples[wanted])
        decoder = PacketDecoder(cache, self.plan, self.hops.packets, part.arriving, wanted, slots, store)
        return Rank(cache, held, samples[wanted], slots, store, decoder)

    def gates(self, sender: int, to: int) -> tuple[list[int], list[int]]:
        """The gates that the messages of a flow wait for and count towards."""
        waits_for, opens = self.parts[sender].outgoing[to].gates, self.parts[to].incoming[sender].gates
        assert waits_for is not None
        assert opens is not None
        return waits_for.tolist(), opens.tolist()

    def items(self, message: Message) -> np.ndarray:
        """The components that come in with a message; the sender must name the same packets."""
        sender, to, sequence = message
        items = self.parts[to].arriving[slice(*self.parts[to].incoming[sender].message(sequence))]
        leaving = self.parts[sender].leaving[slice(*self.parts[sender].outgoing[to].message(sequence))]
        np.testing.assert_array_equal(leaving, self.hops.packets[items])
        assert set(self.plan.destinations[items].tolist()) == {to}
        return items

    def may_go(self, message: Message) -> bool:
        sender, to, sequence = message
        gate = self.gates(sender, to)[0][sequence]
        return gate < 0 or ((sender, gate) in self.towards and self.towards[sender, gate] == 0)

    def pack(self, message: Message) -> tuple[np.ndarray, np.ndarray]:
        """The message as it stands in the sender's buffers; a sender has the server's very packets."""
        sender, to, sequence = message
        packets = self.hops.packets[self.items(message)]
        rows, checksums = self.truth.packets[packets], self.truth.packet_sums[packets]
        if sender != SERVER:
            expected, expected_sums = rows.copy(), checksums.copy()
            first, last = self.parts[sender].outgoing[to].message(sequence)
            rows[:], checksums[:] = 0, 0
            self.ranks[sender].store(first, last, rows, checksums)
            right = packets != self.damaged
            np.testing.assert_array_equal(rows[right], expected[right])
            np.testing.assert_array_equal(checksums[right], expected_sums[right])
        return rows, checksums

    def unpack(self, message: Message, rows: np.ndarray, checksums: np.ndarray) -> None:
        """What the receiver does with what the wire brings: a frame of bytes that cannot be written to."""
        sender, to, sequence = message
        received = np.frombuffer(b"1" + rows.tobytes(), np.uint8)[1:].reshape(rows.shape)
        first, last = self.parts[to].incoming[sender].message(sequence)
        self.ranks[to].decoder.unpack(first, last, received, np.frombuffer(checksums.tobytes(), np.uint32))

    def arrived(self, message: Message) -> None:
        sender, to, sequence = message
        self.messages.remove(message)
        self.towards[to, self.gates(sender, to)[1][sequence]] -= 1

    def next(self) -> Message | None:
        """Any message that may go."""
        may = [message for message in self.messages if self.may_go(message)]
        assert may or not self.messages, f"deadlocked: {self.messages}"
        return may[self.rng.integers(len(may))] if may else None

    def finish(self, *, again: float = 0.0) -> None:
        """Carry all that is left; of what has arrived, some arrives again later."""
        done: list[Message] = []
        while message := self.next():
            self.unpack(message, *self.pack(message))
            self.arrived(message)
            done.append(message)
            while self.rng.random() < again:
                message = done[self.rng.integers(len(done))]
                self.unpack(message, *self.pack(message))

    def check(self) -> None:
        """All ranks have what they want, in the reserved slots, and can go on to the next epoch."""
        truth = self.truth
        for rank, peer in self.ranks.items():
            own = np.flatnonzero(self.assignment == rank)
            assert set(own.tolist()) <= {*peer.held.tolist(), *peer.wanted.tolist()}
            cache = peer.cache
            np.testing.assert_array_equal(cache.rows[peer.slots], truth.rows[peer.wanted])
            np.testing.assert_array_equal(cache.checksums[peer.slots], truth.checksums[peer.wanted])
            present = cache.index.find(peer.held)  # what training reads meanwhile
            np.testing.assert_array_equal(cache.rows[present], truth.rows[peer.held])
            np.testing.assert_array_equal(cache.checksums[present], truth.checksums[peer.held])
            spare = np.setdiff1d(np.arange(len(cache.rows)), [*peer.slots, *present])
            assert (cache.rows[spare] == 0xA5).all()
            cache.commit(cache.prepare(own))
            np.testing.assert_array_equal(cache.rows[cache.index.find(own)], truth.rows[own])

    def samples_of(self, packet: int) -> list[int]:
        """The samples of a packet."""
        samples: list[int] = self.plan.samples[self.plan.offsets[packet] : self.plan.offsets[packet + 1]].tolist()
        return samples

    def made_of(self, component: int) -> Counter[int]:
        """The packets that a component's destination needs for its sample, by brute force."""
        rank, packet = self.plan.destinations[component], self.hops.packets[component]
        packets = Counter([int(packet)])
        for other in range(self.plan.offsets[packet], self.plan.offsets[packet + 1]):
            sample = self.plan.samples[other]
            if other != component and sample not in self.ranks[rank].held:
                [source] = np.flatnonzero((self.plan.samples == sample) & (self.plan.destinations == rank))
                packets += self.made_of(int(source))
        return packets

    def victims(self, packet: int, rank: int) -> set[int]:
        """The samples that a rank gets wrong with a wrong packet."""
        mine = np.flatnonzero((self.plan.destinations == rank) & (self.assignment[self.plan.samples] == rank))
        return {int(self.plan.samples[c]) for c in mine.tolist() if self.made_of(c)[packet] % 2}


def random_world(
    delivery: str, rng: np.random.Generator, *, excess: bool, relay: str = "unicast", nbytes: int = 21, least: int = 1
) -> World:
    n, q = int(rng.integers(2, 7)), int(rng.integers(least, least + 50))
    holders = rng.integers(0, 2**n, q) if excess else 1 << rng.integers(0, n, q)
    assignment = rng.integers(0, n, q)
    plan = plan_delivery(delivery, holders, assignment, n, seed=int(rng.integers(1000)))
    return World(n, plan, holders.tolist(), assignment.tolist(), rng, relay=relay, nbytes=nbytes)


def packets_of(*packets: list[tuple[int, int]]) -> Packets:
    """A plan from lists of (sample, destination) pairs."""
    pairs = np.array([pair for packet in packets for pair in packet])
    senders = np.full(len(packets), SERVER, np.int32)
    return Packets(np.cumsum([0, *map(len, packets)]), pairs[:, 0].copy(), pairs[:, 1].astype(np.int32), senders)


# Rank 0 gets sample 0 out of its XOR with 1, and 1 by itself; 1 is for rank 1, which has 0.
PAIR = packets_of([(0, 0), (1, 1)], [(1, 0)])


def pair() -> World:
    return World(2, PAIR, [0b10, 0], [0, 1], np.random.default_rng(0))
