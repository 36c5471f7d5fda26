"""Take valid plans, break them in every way, and expect the offender to be named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import PlanError
from dshuffle.planning import SERVER, STORE, Packets
from dshuffle.planning.epoch_plan import check_plan


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


def check(packets, senders=None, **options):
    check_plan(make(packets, senders), HOLDERS, DESTINATIONS, 3, **options)


def check_refused(message, packets, senders=None, **options):
    with pytest.raises(PlanError, match=message):
        check(packets, senders, **options)


def test_the_papers_plans_pass():
    check(UNCODED)
    check(UNCODED, PEERS)
    check(UNCODED, [STORE] * 6)
    check(CODED)
    check(UNCODED, capacity=4)


@pytest.mark.parametrize("number", range(6))
def test_a_lost_packet(number):
    (sample, worker) = UNCODED[number][0]
    packets = UNCODED[:number] + UNCODED[number + 1 :]
    check_refused(f"sample {sample} is not delivered to worker {worker}", packets)


@pytest.mark.parametrize("number", range(3))
def test_a_lost_coded_packet(number):
    check_refused(r"sample \d is not delivered to worker \d", CODED[:number] + CODED[number + 1 :])


def test_a_lost_component():
    check_refused("sample 4 is not delivered to worker 0", [[(1, 2)], *CODED[1:]])


def test_an_empty_plan_with_demand():
    check_refused("sample 0 is not delivered to worker 1", [])


def test_a_repeated_packet():
    check_refused("packet 6 delivers sample 3 to worker 1 again, after packet 2", [*UNCODED, [(3, 1)]])
    check_refused("packet 3 delivers sample 3 to worker 1 again, after packet 2", [*CODED, [(3, 1)]])


def test_a_wrong_destination():
    check_refused("packet 0 delivers sample 4 to worker 1, which neither trains on it", [[(4, 1)], *UNCODED[1:]])
    check_refused("packet 6 delivers sample 4 to worker 1, which neither trains on it", [*UNCODED, [(4, 1)]])


def test_a_sample_that_is_held_already():
    check_refused("packet 6 delivers sample 2 to worker 0, which already holds it", [*UNCODED, [(2, 0)]])


@pytest.mark.parametrize("sample", [-1, 9, 2**40])
def test_no_such_sample(sample):
    check_refused(rf"packet 1 for worker 1 has sample {sample}, which is not in \[0, 9\)", [[(4, 0)], [(sample, 1)]])


@pytest.mark.parametrize("worker", [-1, 3, 2**30])
def test_no_such_destination(worker):
    check_refused(
        rf"packet 1 delivers sample 0 to worker {worker}, which is not in \[0, 3\)", [[(4, 0)], [(0, worker)]]
    )


@pytest.mark.parametrize("sender", [-3, 3, 64])
def test_no_such_sender(sender):
    check_refused(f"packet 2 is sent by {sender}, which is neither", UNCODED, [2, 2, sender, 0, 1, 1])


def test_a_sender_that_lacks_the_sample():
    check_refused("packet 0 for worker 0 has sample 4, which its sender 1 does not hold", UNCODED, [1, *PEERS[1:]])
    check_refused(
        "packet 0 for worker 0 has sample 4, which its sender 1 does not hold",
        [[(4, 0), (1, 2)], *CODED[1:]],
        [1, 2, 2],
    )


def test_a_sender_that_is_the_destination():
    check_refused("packet 3 with sample 1 is sent by worker 2 to itself", UNCODED, [2, 2, 0, 2, 1, 1])


def test_components_that_do_not_fit_together():
    # Worker 0 holds neither 0 nor 4.
    check_refused("worker 0 cannot decode sample 4 from packet 1: it lacks sample 0", [CODED[2], [(4, 0), (0, 1)]])


def test_two_components_for_one_worker():
    packets = [[(1, 2), (4, 0)], [(0, 1), (3, 1)], [(5, 2)], [(6, 2)]]
    check_refused("packet 1 has samples 0 and 3 for worker 1", packets)


def test_a_sample_that_cancels_itself():
    # Twice in one packet, a row XORs to nothing.
    check_refused("cannot decode sample 4 from packet 0: it needs sample 4 first", [[(4, 0), (4, 1)], *UNCODED[1:]])


def test_capacity():
    check_refused("worker 0 holds 4 samples, over the capacity of 3", UNCODED, capacity=3)
    with pytest.raises(PlanError, match="worker 1 is assigned 3 samples, over the capacity of 2"):
        check_plan(make([]), np.array([2, 2, 0], dtype=np.uint64), [1, 1, 1], 2, capacity=2)


def test_lengths_that_differ():
    with pytest.raises(PlanError, match="holders has 9 samples, but destinations has 8"):
        check_plan(make(UNCODED), HOLDERS, DESTINATIONS[:-1], 3)


# Leftover coding of Attia and Tandon (2016): sample 0 is held by worker 2 and needed by 0, 1 by 0 for 1, 2 by 1 for 2.
# Two packets are enough, because worker 2 decodes sample 1 first, which it only needs as a key to sample 2.
CYCLE_HOLDERS, CYCLE_DESTINATIONS = masks([{1}, {2}, {0}], 3), [0, 1, 2]
CYCLE = [[(0, 0), (1, 2)], [(1, 1), (2, 2)]]


@pytest.mark.parametrize("packets", [CYCLE, CYCLE[::-1]])
def test_decoding_in_two_steps(packets):
    check_plan(make(packets), CYCLE_HOLDERS, CYCLE_DESTINATIONS, 3)


def test_a_helper_that_helps_nobody():
    with pytest.raises(PlanError, match="packet 0 delivers sample 1 to worker 2, which neither trains"):
        check_plan(make([CYCLE[0], [(1, 1)], [(2, 2)]]), CYCLE_HOLDERS, CYCLE_DESTINATIONS, 3)


def test_a_helper_beside_one_that_helps():
    holders, destinations = masks([{1, 3}, {2}, {0}], 4), [0, 1, 2, 0]
    check_plan(make(CYCLE), holders, destinations, 3)
    with pytest.raises(PlanError, match="packet 2 delivers sample 3 to worker 1, which neither trains"):
        check_plan(make([*CYCLE, [(3, 1)]]), holders, destinations, 3)


def test_a_helper_that_is_missing():
    with pytest.raises(PlanError, match="worker 2 cannot decode sample 2 from packet 1: it lacks sample 1"):
        check_plan(make([[(0, 0)], CYCLE[1]]), CYCLE_HOLDERS, CYCLE_DESTINATIONS, 3)


def test_decoding_in_a_circle():
    packets = [[(0, 0), (1, 1)], [(1, 0), (0, 1)]]
    with pytest.raises(PlanError, match="worker 0 cannot decode sample 0 from packet 0: it needs sample 1"):
        check_plan(make(packets), masks([set(), set(), {0, 1}], 2), [0, 1], 3)


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


@given(instances(), st.data())
def test_cliques_pass(instance, data):
    n, q, caches, destinations = instance
    needed = [(j, d) for j, d in enumerate(destinations) if j not in caches[d]]
    packets = []
    for j, d in data.draw(st.permutations(needed)):
        for packet in packets:
            if all(j in caches[e] and i in caches[d] and d != e for i, e in packet):
                packet.append((j, d))
                break
        else:
            packets.append([(j, d)])
    check_plan(make(packets), masks(caches, q), destinations, n)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": np.array([0, 2, 1, 3])}, "packet 1 has no components"),
        ({"offsets": np.array([0, 1, 1, 3])}, "packet 1 has no components"),
        ({"offsets": np.array([0, 3])}, "2 offsets do not match 3 senders"),
        ({"offsets": np.array([1, 2, 2, 3])}, "offsets run from 1 to 3"),
        ({"offsets": np.array([0, 1, 2, 4])}, "offsets run from 0 to 4, not from 0 to 3"),
        ({"offsets": np.array([], dtype=np.int64), "senders": np.array([], dtype=np.int32)}, "0 offsets"),
        ({"samples": np.arange(2)}, "2 samples do not match 3 destinations"),
        ({"samples": np.arange(3, dtype=np.int32)}, "Packets.samples must be .* int64"),
        ({"destinations": np.arange(3)}, "Packets.destinations must be .* int32"),
        ({"senders": np.zeros((3, 1), dtype=np.int32)}, "Packets.senders must be a one-dimensional"),
        ({"samples": [0, 1, 2]}, "Packets.samples must be"),
    ],
)
def test_plans_whose_arrays_do_not_fit(changes, message):
    fields = {
        "offsets": np.arange(4),
        "samples": np.arange(3),
        "destinations": np.zeros(3, dtype=np.int32),
        "senders": np.zeros(3, dtype=np.int32),
    }
    assert Packets(**fields).n_packets == 3
    with pytest.raises(PlanError, match=message):
        Packets(**fields | changes)
