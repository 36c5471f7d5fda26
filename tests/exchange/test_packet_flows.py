"""Whole coded exchanges without a network: messages in any order that gates allow, against the store's rows."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dshuffle.coding import add_packets
from dshuffle.errors import ChecksumMismatch, ExchangeError
from dshuffle.exchange import packet_flows
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.packet_flows import CodedPart, PacketDecoder, PacketStore
from dshuffle.planning import RELAYS, SERVER, Packets
from dshuffle.planning.check_plan import check_plan
from dshuffle.planning.delivery import plan_delivery
from dshuffle.planning.delivery.relay import route
from dshuffle.rows import RowLayout, checksum_rows

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
        self.parts = {who: CodedPart.of(plan, self.hops, who, at_most=at_most) for who in range(SERVER, n)}
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
            self.ranks[sender].store.pack(first, last, rows, checksums)
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
            spare = np.setdiff1d(np.arange(cache.n_slots), [*peer.slots, *present])
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


# -- what arrives --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    """Rows that took several packets, by delivery and relay."""
    return Counter()


@pytest.mark.parametrize("relay", sorted(RELAYS))
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("seed", range(16))
def test_every_rank_gets_the_rows_of_the_store(seed: int, delivery: str, relay: str, seen: Counter[str]) -> None:
    rng = np.random.default_rng(seed)
    nbytes, excess = ROW_SIZES[seed % 3], delivery != "leftover" and seed % 2 == 0
    world = random_world(delivery, rng, excess=excess, relay=relay, nbytes=nbytes)
    wanted = np.flatnonzero(world.assignment[world.plan.samples] == world.plan.destinations)
    seen[f"{delivery}, {relay}"] += sum(world.made_of(component).total() > 1 for component in wanted.tolist())
    world.finish(again=0.3)
    world.check()


@pytest.mark.slow
def test_some_rows_took_several_packets(seen: Counter[str]) -> None:
    """The tests above are worth less if all packets could be decoded one by one."""
    for delivery in ("clique", "leftover"):
        for relay in RELAYS:
            assert seen[f"{delivery}, {relay}"] >= 10, seen


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    delivery=st.sampled_from(DELIVERIES),
    relay=st.sampled_from(sorted(RELAYS)),
    nbytes=st.sampled_from(ROW_SIZES),
    excess=st.booleans(),
)
def test_random_exchanges(seed: int, delivery: str, relay: str, nbytes: int, excess: bool) -> None:
    excess = excess and delivery != "leftover"
    world = random_world(delivery, np.random.default_rng(seed), excess=excess, relay=relay, nbytes=nbytes)
    world.finish(again=0.1)
    world.check()


def chain(length: int, rng: np.random.Generator, *, relay: str, nbytes: int = 21) -> World:
    """A world where worker 0 wants sample 0 alone, and needs all packets for it.

    They have the samples 0 and 1, 1 and 2, and so on, the last by itself, each together with one that worker 0 holds.
    """
    packets = [[(i, 0), (i + 1, 1 + i % 2), (length + i, 3)] for i in range(length - 1)] + [[(length - 1, 0)]]
    holders = [0b1100 if sample % 2 else 0b1010 for sample in range(length)] + [0b0111] * (length - 1)
    assignment = [0, *(1 if sample % 2 else 2 for sample in range(1, length)), *[3] * (length - 1)]
    return World(4, packets_of(*packets), holders, assignment, rng, relay=relay, nbytes=nbytes)


@pytest.mark.parametrize("relay", sorted(RELAYS))
def test_a_long_chain(relay: str) -> None:
    world = chain(80, np.random.default_rng(1), relay=relay)
    assert world.made_of(0).total() == 80
    world.finish(again=0.3)
    world.check()


# Samples 0 to 4 for workers 0 to 4. Worker 0 takes 1 and 2 out of packet 0, each of which it decodes with sample 3.
DIAMOND = packets_of([(0, 0), (1, 1), (2, 2)], [(1, 0), (3, 3)], [(2, 0), (3, 4)], [(3, 0), (4, 4)])


def test_a_row_that_takes_a_packet_twice() -> None:
    world = World(5, DIAMOND, [0b00110, 0b01100, 0b10010, 0, 0b00001], [0, 1, 2, 3, 4], np.random.default_rng(1))
    assert world.made_of(0) == {0: 1, 1: 1, 2: 1, 3: 2}
    world.finish(again=0.5)
    world.check()


def test_messages_with_packets_for_one_row_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    world = chain(12, np.random.default_rng(1), relay="unicast")
    rank, packets = world.ranks[0], world.hops.packets[world.parts[0].arriving]
    adding: list[int] = []
    most = []

    def slow(*args: Any) -> None:
        adding.append(1)
        time.sleep(0.002)
        most.append(len(adding))
        add_packets(*args)
        adding.pop()

    monkeypatch.setattr(packet_flows, "add_packets", slow)
    with ThreadPoolExecutor(4) as executor:
        parts = [(i, i + 1, world.truth.packets[[p]], world.truth.packet_sums[[p]]) for i, p in enumerate(packets)]
        for done in [executor.submit(rank.decoder.unpack, *part) for part in parts]:
            done.result()
    assert most == [1] * 12
    np.testing.assert_array_equal(rank.cache.rows[rank.slots], world.truth.rows[rank.wanted])


# -- what is damaged -----------------------------------------------------------------------------------------------


def damage(world: World, rows: np.ndarray, checksums: np.ndarray, item: int) -> None:
    """Flip a bit of an item or of its checksum."""
    bit = int(world.rng.integers(8 * rows.shape[1] + 32))
    if bit < 32:
        checksums[item] ^= np.uint32(1 << bit)
    else:
        rows[item, bit // 8 - 4] ^= 1 << bit % 8


def carry_until_damage_shows(world: World, target: int) -> tuple[Message, str]:
    """Carry messages, component ``target`` damaged on its way; the message with which that shows, and the words."""
    world.damaged = int(world.hops.packets[target])
    while message := world.next():
        rows, checksums = world.pack(message)
        for item in np.flatnonzero(world.items(message) == target).tolist():
            damage(world, rows, checksums, item)
        try:
            world.unpack(message, rows, checksums)
        except ChecksumMismatch as error:
            return message, str(error)
        world.arrived(message)
    raise AssertionError(f"component {target} was damaged, and all went well")


def verified_alone(world: World) -> list[int]:
    """The components that are decoded from one packet, and kept."""
    kept = np.flatnonzero(world.assignment[world.plan.samples] == world.plan.destinations)
    return [component for component in kept.tolist() if world.made_of(component).total() == 1]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    delivery=st.sampled_from(DELIVERIES),
    relay=st.sampled_from(sorted(RELAYS)),
    excess=st.booleans(),
)
def test_a_damaged_packet_is_named_at_once_and_the_right_one_taken_afterwards(
    seed: int, delivery: str, relay: str, excess: bool
) -> None:
    rng = np.random.default_rng(seed)
    world = random_world(delivery, rng, excess=excess and delivery != "leftover", relay=relay)
    if alone := verified_alone(world):
        target = int(rng.choice(alone))
        message, words = carry_until_damage_shows(world, target)
        assert target in world.items(message)
        assert f"the row of sample {world.plan.samples[target]} was decoded incorrectly" in words
        world.damaged = -1  # nobody has kept it
        world.finish(again=0.1)
        world.check()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    delivery=st.sampled_from(["clique", "leftover"]),
    relay=st.sampled_from(sorted(RELAYS)),
)
def test_a_damaged_packet_of_several_for_a_row_is_found_with_the_last_of_them(
    seed: int, delivery: str, relay: str
) -> None:
    rng = np.random.default_rng(seed)
    world = random_world(delivery, rng, excess=False, relay=relay)
    if several := sorted(set(range(world.plan.n_components)) - set(verified_alone(world))):
        message, words = carry_until_damage_shows(world, int(rng.choice(several)))
        victims = world.victims(world.damaged, message[1])
        assert any(f"the row of sample {sample} was decoded incorrectly" in words for sample in victims)


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_row_that_is_held_is_found(seed: int, delivery: str) -> None:
    rng = np.random.default_rng(seed)
    world = random_world(delivery, rng, excess=delivery != "leftover", least=150)
    used = [
        (int(world.plan.destinations[component]), sample)
        for component in verified_alone(world)
        for sample in world.samples_of(world.hops.packets[component])
        if sample != world.plan.samples[component]
    ]
    rank, sample = used[rng.integers(len(used))]
    cache = world.ranks[rank].cache
    cache.rows[cache.index.find(np.array([sample])), 3] ^= 16
    with pytest.raises(ChecksumMismatch, match=r"sample \d+ was decoded incorrectly: .* or a row held here is"):
        world.finish()


# Rank 0 gets sample 0 out of its XOR with 1, and 1 by itself; 1 is for rank 1, which has 0.
PAIR = packets_of([(0, 0), (1, 1)], [(1, 0)])


def pair() -> World:
    return World(2, PAIR, [0b10, 0], [0, 1], np.random.default_rng(0))


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("damaged", [0, 1])
def test_a_row_of_several_packets_that_came_out_wrong_never_counts_as_right(last: int, damaged: int) -> None:
    world = pair()
    rank = world.ranks[0]
    assert rank.wanted.tolist() == [0]

    def unpack(item: int, flipped: int = 0) -> None:
        rows, checksums = world.truth.packets[[item]], world.truth.packet_sums[[item]]
        rows[0, 5] ^= flipped
        rank.decoder.unpack(item, item + 1, rows, checksums)

    unpack(1 - last, 4 * (damaged != last))
    with pytest.raises(ChecksumMismatch, match="the row of sample 0 was decoded incorrectly"):
        unpack(last, 4 * (damaged == last))
    for _ in range(2):  # asked for again, the message arrives as it should
        try:
            unpack(last)
        except ChecksumMismatch:
            continue
        np.testing.assert_array_equal(rank.cache.rows[rank.slots], world.truth.rows[[0]])


@pytest.mark.parametrize(
    ("n_rows", "nbytes", "n_checksums"), [(0, 21, 0), (2, 21, 2), (1, 21, 2), (1, 20, 1), (1, 24, 1), (1, 0, 1)]
)
def test_a_message_of_another_shape_is_refused(n_rows: int, nbytes: int, n_checksums: int) -> None:
    world = pair()
    rows, checksums = np.zeros((n_rows, nbytes), np.uint8), np.zeros(n_checksums, np.uint32)
    words = rf"rows \({n_rows}, {nbytes}\) and checksums \({n_checksums},\); 1 packets of 21 bytes were expected"
    with pytest.raises(ExchangeError, match=words):
        world.ranks[0].decoder.unpack(0, 1, rows, checksums)
    world.finish()
    world.check()


def test_packets_are_not_read_from_the_store() -> None:
    with pytest.raises(ExchangeError, match="a packet cannot be read from the store"):
        pair().ranks[0].decoder.read_store(0, 1, lambda: False)


# -- what cannot be decoded ----------------------------------------------------------------------------------------


def decoder_of(plan: Packets, *held: int) -> PacketDecoder:
    """The decoder of rank 0, which holds these samples and wants all that comes in."""
    cache = CachePartition(RowLayout.of({"x": (np.dtype("f8"), ())}), capacity=9, incoming=99)
    cache.reserve(np.array(held, np.int64))
    cache.commit(cache.prepare(np.array(held, np.int64)))
    hops = route("unicast", plan, 2, 9)
    arriving = CodedPart.of(plan, hops, 0, at_most=9).arriving
    slots = cache.reserve(plan.samples[arriving])
    wanted = np.ones(len(arriving), np.bool_)
    return PacketDecoder(cache, plan, hops.packets, arriving, wanted, slots, PacketStore(cache.layout, arriving[:0]))


@pytest.mark.parametrize(
    ("plan", "held", "lost"),
    [
        (packets_of([(0, 0), (1, 1)]), (), 1),
        (packets_of([(0, 0), (1, 1)]), (0, 2), 1),
        (packets_of([(5, 0)], [(0, 0), (5, 1), (4, 1), (6, 1)]), (6,), 4),
        (packets_of([(0, 0), (1, 1)], [(1, 0), (7, 1)]), (), 7),
    ],
)
def test_a_sample_that_decoding_lacks_is_named(plan: Packets, held: tuple[int, ...], lost: int) -> None:
    with pytest.raises(ExchangeError, match=f"sample {lost} is needed for decoding, but is neither held nor incoming"):
        decoder_of(plan, *held)
    decoder_of(plan, *sorted([*held, lost]))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "plan",
    [
        packets_of([(0, 0), (1, 0)]),
        packets_of([(0, 0), (0, 1)]),
        packets_of([(0, 0), (1, 1)], [(1, 0), (0, 1)]),
        packets_of([(0, 0), (1, 1)], [(1, 0), (2, 1)], [(2, 0), (0, 1)]),
        packets_of([(4, 0), (0, 1)], [(0, 0), (1, 1)], [(1, 0), (0, 1)], [(5, 0)]),
        packets_of([(0, 0), (1, 1), (2, 1)], [(1, 0), (0, 1), (2, 1)], [(2, 0), (0, 1), (1, 1)]),
        packets_of(*[[(i, 0), *((k, 1) for k in range(40) if k != i)] for i in range(40)]),
    ],
    ids=str,
)
def test_packets_that_need_each_other_are_refused(plan: Packets) -> None:
    with pytest.raises(ExchangeError, match="each of which can be decoded only after another"):
        decoder_of(plan)


def test_a_store_keeps_what_is_handed_on_and_nothing_else() -> None:
    layout = RowLayout.of({"x": (np.dtype("u1"), (3,))})
    store = PacketStore(layout, np.array([7, 2, 7, 9]))
    assert store.find(np.array([9, 2, 3, 7, 10, 0])).tolist() == [2, 0, -1, 1, -1, -1]
    rows, checksums = np.arange(18, dtype=np.uint8).reshape(6, 3), np.arange(6, dtype=np.uint32)
    store.keep(store.find(np.array([9, 2, 3])), rows[:3], checksums[:3])
    store.keep(store.find(np.array([7])), rows[3:4], checksums[3:4])
    store.keep(store.find(np.array([0, 1])), rows[4:], checksums[4:])
    packed, sums = layout.empty(3), np.empty(3, np.uint32)
    store.pack(1, 4, packed, sums)
    np.testing.assert_array_equal(packed, rows[[1, 3, 0]])
    assert sums.tolist() == [1, 3, 0]
    empty = PacketStore(layout, np.zeros(0, np.int64))
    assert empty.find(np.array([0, 5])).tolist() == [-1, -1]
    empty.keep(empty.find(np.array([0, 5])), rows[:2], checksums[:2])
