"""Take valid plans, break them in every way, and expect the offender to be named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import PlanError
from dshuffle.planning import SERVER, STORE, Packets

from ..draws import check_plan


def make(packets, senders=None):
    """A plan from lists of (sample, destination) pairs."""
    pairs = [pair for packet in packets for pair in packet]
    return Packets(
        offsets=np.cumsum([0, *map(len, packets)]).astype(np.int64),
        samples=np.array([sample for sample, _ in pairs], dtype=np.int64),
        destinations=np.array([worker for _, worker in pairs], dtype=np.int32),
        senders=np.array([SERVER] * len(packets) if senders is None else senders, dtype=np.int32),
    )


def masks(caches, q):
    return np.array([sum(1 << k for k, cache in enumerate(caches) if j in cache) for j in range(q)], dtype=np.uint64)


# Chung et al. (2017), examples 1 to 3, with samples and workers counted from 0.
CACHES = [{1, 2, 3, 7}, {5, 6, 7, 8}, {0, 2, 3, 4}]
HOLDERS = masks(CACHES, 9)
DESTINATIONS = np.array([1, 2, 0, 1, 0, 2, 2, 0, 1])
UNCODED = [[(4, 0)], [(0, 1)], [(3, 1)], [(1, 2)], [(5, 2)], [(6, 2)]]
PEERS = [2, 2, 0, 0, 1, 1]
CODED = [[(1, 2), (4, 0)], [(0, 1), (5, 2)], [(3, 1), (6, 2)]]


# Leftover coding of Attia and Tandon (2016): sample 0 is held by worker 2 and needed by 0, 1 by 0 for 1, 2 by 1 for 2.
# Two packets are enough, because worker 2 decodes sample 1 first, which it only needs as a key to sample 2.
CYCLE_HOLDERS, CYCLE_DESTINATIONS = masks([{1}, {2}, {0}], 3), [0, 1, 2]
CYCLE = [[(0, 0), (1, 2)], [(1, 1), (2, 2)]]


def test_the_papers_plans_pass():
    for plan in (make(UNCODED), make(UNCODED, PEERS), make(UNCODED, [STORE] * 6), make(CODED)):
        check_plan(plan, HOLDERS, DESTINATIONS, 3)
    for packets in (CYCLE, CYCLE[::-1]):
        check_plan(make(packets), CYCLE_HOLDERS, CYCLE_DESTINATIONS, 3)


@pytest.mark.parametrize(
    ("packets", "senders", "message"),
    [
        (UNCODED[1:], None, "sample 4 is not delivered to worker 0, which needs it"),
        ([[(1, 2)], *CODED[1:]], None, "sample 4 is not delivered to worker 0"),
        ([], None, "sample 0 is not delivered to worker 1"),
        ([*CODED, [(3, 1)]], None, "packet 3 from the server, sample 3 for worker 1: another packet"),
        ([*UNCODED, [(4, 1)]], None, "packet 6 .*, sample 4 for worker 1: the worker neither trains on the sample"),
        ([*UNCODED, [(2, 0)]], None, "packet 6 .*, sample 2 for worker 0: the worker already holds the sample"),
        ([[(4, 0)], [(9, 1)]], None, "packet 1 .*, sample 9 for worker 1: there is no such sender, sample or worker"),
        ([[(4, 0)], [(0, 3)]], None, "packet 1 .*, sample 0 for worker 3: there is no such"),
        (UNCODED, [2, 2, -3, 0, 1, 1], "packet 2 from rank -3, .*: there is no such"),
        (UNCODED, [1, *PEERS[1:]], "packet 0 from rank 1, sample 4 for worker 0: the sender does not hold the sample"),
        (UNCODED, [2, 2, 0, 2, 1, 1], "packet 3 from rank 2, sample 1 for worker 2: the sender .* sends it to itself"),
        ([CODED[2], [(4, 0), (0, 1)]], None, "packet 1 .*, sample 4 for worker 0: the worker cannot decode the sample"),
        ([CODED[0], [(0, 1), (3, 1)]], None, "packet 1 .*, sample 0 for worker 1: the worker cannot decode the sample"),
        ([[(4, 0), (4, 1)], *UNCODED[1:]], None, "packet 0 .*, sample 4 for worker 0: the worker cannot"),
    ],
)
def test_the_first_fault_is_named(packets, senders, message):
    with pytest.raises(PlanError, match=message):
        check_plan(make(packets, senders), HOLDERS, DESTINATIONS, 3)


@st.composite
def instances(draw):
    n = draw(st.integers(2, 4))
    q = draw(st.integers(1, 6))
    caches = [draw(st.sets(st.integers(0, q - 1))) for _ in range(n)]
    destinations = draw(st.lists(st.integers(0, n - 1), min_size=q, max_size=q))
    return n, q, caches, destinations


def peel(packets, caches):
    """What every worker knows in the end, if it gets the packets that name it."""
    known = [set(cache) for cache in caches]
    for k, have in enumerate(known):
        received = [[j for j, _ in packet] for packet in packets if k in {d for _, d in packet}]
        while news := [unknown[0] for packet in received if len(unknown := [j for j in packet if j not in have]) == 1]:
            have.update(news)
    return known


@given(instances(), st.data())
def test_what_passes_can_be_decoded(instance, data):
    n, q, caches, destinations = instance
    pair = st.tuples(st.integers(0, q - 1), st.integers(0, n - 1))
    needed = [(j, d) for j, d in enumerate(destinations) if j not in caches[d]]
    # The demanded pairs in any grouping, and sometimes more.
    pairs = data.draw(st.permutations(needed)) + data.draw(st.lists(pair, max_size=2))
    packets = []
    for item in pairs:
        if packets and data.draw(st.booleans()):
            packets[-1].append(item)
        else:
            packets.append([item])
    try:
        check_plan(make(packets), masks(caches, q), destinations, n)
    except PlanError:
        return
    known = peel(packets, caches)
    assert all(j in known[d] for j, d in needed)
    assert len(pairs) == len(set(pairs))
