"""Relays, by carrying their hops in every order: nothing gets stuck, all arrives, the load is as promised."""

import random
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.planning import RELAYS, SERVER, Packets
from dshuffle.planning.delivery.relay import route


def by_hand(n, q, seed):
    """Packets to random sets of workers in random order. Relays do not mind whether they can be decoded."""
    rng = np.random.default_rng(seed)
    destinations = [rng.permutation(n)[: rng.integers(1, n + 1)] for _ in range(q)]
    offsets = np.cumsum([0, *map(len, destinations)])
    workers = np.concatenate([np.zeros(0, np.int32), *destinations]).astype(np.int32)
    return Packets(offsets, rng.permutation(offsets[-1]), workers, np.full(q, SERVER, dtype=np.int32))


@st.composite
def plans(draw):
    """(n, plan, batch)"""
    n, q, seed = draw(st.integers(2, 8)), draw(st.integers(0, 60)), draw(st.integers(0, 2**32))
    return n, by_hand(n, q, seed), draw(st.integers(1, 9))


def rows(plan, hops):
    """(packet, sender, destination, waits_for, opens) of every hop."""
    columns = (hops.packets, hops.senders, plan.destinations, hops.waits_for, hops.opens)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def carry(hops, rng):
    """Let random hops go that may; what is left over never may. A gate without hops towards it stays shut."""
    towards = Counter((to, opens) for _, _, to, _, opens in hops if opens >= 0)
    has, left = set(), list(hops)
    while True:
        may = [hop for hop in left if hop[3] < 0 or (towards.get((hop[1], hop[3])) == 0)]
        if not may:
            return has, left
        hop = packet, sender, to, _, opens = rng.choice(may)
        assert sender == SERVER or (packet, sender) in has, f"{hop} may go, and its sender lacks the packet"
        left.remove(hop)
        has.add((packet, to))
        if opens >= 0:
            towards[to, opens] -= 1


@pytest.mark.parametrize("relay", sorted(RELAYS))
@given(plans(), st.integers(0, 2**32))
def test_everything_arrives_in_whatever_order_hops_go(relay, instance, seed):
    n, plan, batch = instance
    hops = route(relay, plan, n, batch)
    np.testing.assert_array_equal(hops.packets, np.repeat(np.arange(plan.n_packets), np.diff(plan.offsets)))
    for name, dtype in {"packets": "i8", "senders": "i4", "waits_for": "i4", "opens": "i4"}.items():
        column = getattr(hops, name)
        assert (column.shape, column.dtype) == ((plan.n_components,), np.dtype(dtype))
    wanted = {(packet, to) for packet, _, to, _, _ in rows(plan, hops)}
    assert len(wanted) == plan.n_components
    assert carry(rows(plan, hops), random.Random(seed)) == (wanted, [])


def by_packet(plan, hops):
    made = rows(plan, hops)
    return [made[a:b] for a, b in pairwise(plan.offsets.tolist())]


@given(plans())
def test_pipelined_hands_packets_on_in_batches(instance):
    n, plan, batch = instance
    batches = defaultdict(list)
    for packet in by_packet(plan, route("pipelined", plan, n, batch)):
        [(_, _, relay, nothing, gate)] = [hop for hop in packet if hop[1] == SERVER]
        assert nothing == -1
        others = [hop for hop in packet if hop[1] != SERVER]
        assert all((sender, waits_for, opens) == (relay, gate, -1) for _, sender, _, waits_for, opens in others)
        batches[relay].append(gate)
    for gates in batches.values():
        check_batches(gates, batch)


def check_batches(gates, batch):
    """One batch after the other in the order of the plan, none too large, smaller ones at the end."""
    assert gates == sorted(gates)
    sizes = np.bincount(gates)
    assert all(batch >= size >= after > 0 for size, after in pairwise([*sizes.tolist(), 1]))
    assert sizes[-1] <= max(1, batch // 2)
    assert sizes[0] == batch or len(gates) < 4 * batch
    assert len(sizes) <= len(gates) / batch + 20


@given(plans())
def test_in_a_ring_all_members_but_the_last_hand_a_packet_on_once(instance):
    n, plan, batch = instance
    for packet in by_packet(plan, route("ring", plan, n, batch)):
        sent_by = {sender: (to, waits_for, opens) for _, sender, to, waits_for, opens in packet}
        assert len(sent_by) == len(packet)  # nobody sends it twice
        at = SERVER
        for step in range(len(packet)):
            at, waits_for, opens = sent_by[at]
            assert (waits_for, opens) == (step - 1, step)
        assert at not in sent_by
