"""One contract suite for every registered delivery, and what each promises beyond it."""

import contextlib
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.planning import DELIVERIES, SERVER, Global, Packets, first_ranks
from dshuffle.planning.delivery import suitable_deliveries

from ...conftest import at_most
from ...draws import check_plan, first_holders, next_ranks, plan_delivery

LIMITS = {"coded": (64, 5), "ubershuffle": (64, 5), "clique": (64, 5), "leftover": (130, 1)}
"""The most workers, and holders of a sample, that a delivery can do with, if there is a limit."""


@st.composite
def instances(draw, name):
    """Holder sets of every sample (nobody's is empty), their masks, and destinations, such as a delivery allows."""
    most_workers, most_holders = LIMITS.get(name, (130, 5))
    n = draw(st.sampled_from([n for n in (1, 2, 3, 8, 64, 65, 130) if n <= most_workers]))
    rank = st.integers(0, n - 1)
    sets = draw(st.lists(st.sets(rank, min_size=1, max_size=most_holders), max_size=25))
    masks = np.zeros((len(sets), -(-n // 64)), dtype=np.uint64)
    for sample, workers in enumerate(sets):
        for worker in workers:
            masks[sample, worker // 64] |= np.uint64(1 << worker % 64)
    destinations = draw(st.lists(rank, min_size=len(sets), max_size=len(sets)))
    return n, sets, masks, np.array(destinations, dtype=np.int64)


def components(plan):
    """(packet's sender, sample, destination) of every component."""
    for p in range(plan.n_packets):
        for e in range(plan.offsets[p], plan.offsets[p + 1]):
            yield int(plan.senders[p]), int(plan.samples[e]), int(plan.destinations[e])


@pytest.mark.parametrize("name", DELIVERIES)
@given(data=st.data(), seed=st.integers())
def test_every_worker_gets_what_it_needs_exactly_once(name, data, seed):
    n, sets, masks, destinations = data.draw(instances(name))
    plan = plan_delivery(name, masks, destinations, n, seed=seed)
    check_plan(plan, masks, destinations, n)

    lacking = Counter((j, int(d)) for j, d in enumerate(destinations) if d not in sets[j])
    given_out = Counter((j, d) for _, j, d in components(plan))
    assert set(given_out.values()) <= {1}
    # Only chains and cycles give a worker samples that it does not train on, as keys to others.
    assert given_out == lacking or (name in ("leftover", "clique") and given_out > lacking)
    assert plan.n_packets <= len(lacking)


UNCODED = [[(4, 0)], [(0, 1)], [(3, 1)], [(1, 2)], [(5, 2)], [(6, 2)]]
PEERS = [2, 2, 0, 0, 1, 1]
CODED = [[(1, 2), (4, 0)], [(0, 1), (5, 2)], [(3, 1), (6, 2)]]


@pytest.mark.parametrize(
    ("made", "senders", "message"),
    [
        (UNCODED, None, None),
        (UNCODED, PEERS, None),
        (CODED, None, None),
        (UNCODED[1:], None, "sample 4 is not delivered to worker 0"),
        ([*CODED, [(3, 1)]], None, "twice"),
        ([*UNCODED, [(4, 1)]], None, "neither trains on"),
        ([*UNCODED, [(2, 0)]], None, "holds the sample already"),
        (UNCODED, [1, *PEERS[1:]], "a sender lacks a sample"),
        ([CODED[2], [(4, 0), (0, 1)], *UNCODED[3:5]], None, "cannot decode"),
    ],
)
def test_the_check_of_plans_finds_faults(made, senders, message):
    """Chung et al. (2017), examples 1 to 3, with samples and workers counted from 0."""
    caches = [{1, 2, 3, 7}, {5, 6, 7, 8}, {0, 2, 3, 4}]
    masks = [sum(1 << k for k, cache in enumerate(caches) if j in cache) for j in range(9)]
    pairs = np.array([pair for packet in made for pair in packet])
    offsets, servers = np.cumsum([0, *map(len, made)]), [SERVER] * len(made)
    plan = Packets(offsets, pairs[:, 0], pairs[:, 1], np.array(servers if senders is None else senders))
    with contextlib.nullcontext() if message is None else pytest.raises(AssertionError, match=message):
        check_plan(plan, masks, [1, 2, 0, 1, 0, 2, 2, 0, 1], 3)


@at_most(40)
@given(st.data())
def test_peer_comes_close_to_the_best_choice_of_senders(data):
    n = data.draw(st.integers(2, 4))
    q = data.draw(st.integers(1, 7))
    # The last worker needs everything and holds nothing.
    sets = [data.draw(st.sets(st.integers(0, n - 1), min_size=1)) for _ in range(q)]
    masks = [sum(1 << worker for worker in workers) for workers in sets]
    plan = plan_delivery("peer", masks, [n] * q, n + 1)
    best = min(max(Counter(senders).values()) for senders in itertools.product(*sets))
    assert np.bincount(plan.senders).max() <= best + 1


@pytest.mark.parametrize("density", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("weights", [(1000, 1000, 250, 500), (1000, 17, 1000, 1000)])
def test_peers_send_in_proportion_to_their_shares(weights, density):
    q, n = 20_000, len(weights)
    rng = np.random.default_rng(3)
    held = rng.random((q, n)) < density
    held[~held.any(axis=1), 0] = True
    holders = (held << np.arange(n)).sum(axis=1)
    ranks = rng.choice(n, q, p=np.array(weights) / sum(weights))
    needed = holders[(holders >> ranks) & 1 == 0]

    def longest(plan):
        return float((np.bincount(plan.senders, minlength=n) / weights).max())

    # By Hall's theorem: workers must send all samples that no other worker holds.
    sets_of_workers = range(1, 2**n)
    total = [sum(weights[worker] for worker in range(n) if workers >> worker & 1) for workers in sets_of_workers]
    best = max(np.count_nonzero(needed & ~workers == 0) / total[workers - 1] for workers in sets_of_workers)
    assert longest(plan_delivery("peer", holders, ranks, n, weights=weights)) <= 1.02 * best
    assert longest(plan_delivery("peer", holders, ranks, n)) > 1.2 * best


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.6])
def test_peers_on_the_same_host_are_preferred(alpha):
    q, n = 50_000, 12
    hosts = np.repeat(np.arange(3), 4)
    previous = first_ranks("random", q, n, seed=3)
    holders = first_holders(previous, n, int(alpha * q), seed=3)
    ranks = next_ranks(Global(), previous, n, seed=3, epoch=1)
    plan = plan_delivery("peer", holders, ranks, n, hosts=hosts)
    held = (holders[plan.samples] >> np.arange(n, dtype=np.uint64)) & np.uint64(1)
    assert held[np.arange(len(held)), plan.senders].all()
    beside = (held.astype(bool) & (hosts == hosts[plan.destinations][:, None])).any(axis=1)
    near = hosts[plan.senders] == hosts[plan.destinations]
    assert np.array_equal(near, beside)
    without = plan_delivery("peer", holders, ranks, n)
    assert near.mean() > 1.1 * (hosts[without.senders] == hosts[without.destinations]).mean()
    for some in (near, ~near):
        sends = np.bincount(plan.senders[some], minlength=n)
        assert sends.max() <= 1.03 * sends.mean() + 1


@pytest.mark.parametrize(
    ("circumstances", "names"),
    [
        ({"excess": False}, "peer server storage leftover"),
        ({"excess": True}, "peer server storage clique ubershuffle coded"),
        ({"n_workers": 65, "excess": True}, "peer server storage"),
        ({"excess": True, "server_holds_all": False}, "peer server storage"),
        ({"excess": True, "has_server": False}, "peer storage"),
        ({"excess": False, "has_server": False, "has_storage": False}, "peer"),
    ],
)
def test_which_deliveries_suit(circumstances, names):
    found = suitable_deliveries(**{"n_workers": 8, "has_server": True, "has_storage": True, **circumstances})
    assert [delivery.name for delivery in found] == names.split()
