import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter, PlanError
from dshuffle.planning import (
    CACHINGS,
    DELIVERIES,
    SERVER,
    SHARDINGS,
    STORE,
    Aligned,
    Choices,
    Chunks,
    Delivery,
    EpochPlanner,
    GivenSharding,
    Global,
    Local,
    Packets,
    Partial,
    ShuffleSpec,
)
from dshuffle.planning.assignment import ASSIGNMENTS, parse_assignment
from dshuffle.planning.exchange_epochs import epoch_order
from dshuffle.planning.randomness import DRAW_VERSION

from ..conftest import written


def make(n_samples=12, n_workers=3, **changes):
    fields = {"seed": 0, "assignment": Global(), "delivery": "peer", "sharding": "random"}
    version, first = changes.pop("draw_version", DRAW_VERSION), changes.pop("first_epoch", 0)
    return ShuffleSpec(n_samples, n_workers, Choices(**fields | changes), version, first)


@st.composite
def specs(draw, deliveries=tuple(DELIVERIES)):
    delivery = draw(st.sampled_from(sorted(deliveries)))
    n = draw(st.sampled_from([1, 2, 3, 6, 64 if delivery in ("coded", "ubershuffle") else 66]))
    q = draw(st.integers(n, 2 * n + 30))
    excess = [(1 + 1 / n) / 2, 1] if DELIVERIES[delivery].supports(n, excess=True) else []
    return make(
        q,
        n,
        seed=draw(st.integers()),
        assignment=written(
            draw(st.sampled_from(sorted(ASSIGNMENTS))),
            fraction=draw(st.sampled_from([0.3, 1])),
            rows=draw(st.integers(1, (q - 1) // max(n - 1, 1) or 1)),
        ),
        delivery=delivery,
        sharding=draw(st.sampled_from(sorted(SHARDINGS))),
        caching=draw(st.sampled_from(sorted(CACHINGS))),
        cache_fraction=draw(st.sampled_from([None, 1 / n, *excess])),
    )


@given(specs(["storage", "peer", "server"]))
def test_every_epoch_can_be_carried_out(spec):
    q, n = spec.n_samples, spec.n_workers
    planner = EpochPlanner(spec)
    caches = [set() for _ in range(n)]
    for epoch in range(4):
        plan = planner.advance() if epoch else planner.load()
        assert plan is planner.current
        assert plan.epoch == epoch
        workers = {rank: plan.for_worker(rank) for rank in [SERVER, *range(n)]}
        trained, needed, received = [], 0, [set(cache) for cache in caches]
        for rank in range(n):
            worker = workers[rank]
            assert (worker.rank, worker.epoch) == (rank, epoch)
            incoming = [j for ids in worker.receives.values() for j in ids.tolist()]
            assert len(incoming) == len(set(incoming))
            assert not caches[rank] & set(incoming)
            if epoch:
                assert len(incoming) <= spec.max_incoming
            for source, ids in worker.receives.items():
                assert len(ids) > 0
                assert ids.dtype == np.int64
                if source != STORE:
                    np.testing.assert_array_equal(ids, workers[source].sends[rank])
                if source >= 0:
                    assert set(ids.tolist()) <= caches[source]
            assert all(rank in workers[target].receives for target in worker.sends)
            needed += len(set(worker.order.tolist()) - caches[rank])
            received[rank] |= set(incoming)
            assert set(worker.order.tolist()) <= set(worker.held.tolist()) <= received[rank]
            assert worker.held.tolist() == sorted(set(worker.held.tolist()))
            assert len(worker.held) <= spec.capacity
            trained += worker.order.tolist()
        assert sorted(trained) == list(range(q))
        assert plan.n_needed == needed
        assert len(workers[SERVER].order) == len(workers[SERVER].held) == len(workers[SERVER].receives) == 0
        caches = [set(workers[rank].held.tolist()) for rank in range(n)]


def test_loading_reads_share_and_excess_from_the_store():
    spec = make(20, 4, cache_fraction=0.5)
    plan = EpochPlanner(spec).load()
    assert plan.n_needed == 20
    assert plan.packets.n_packets == 4 * 10
    for rank in range(4):
        worker = plan.for_worker(rank)
        assert list(worker.receives) == [STORE]
        np.testing.assert_array_equal(worker.receives[STORE], worker.held)
        assert worker.sends == {}
        np.testing.assert_array_equal(
            worker.order, epoch_order(np.flatnonzero(plan.ranks == rank), seed=0, epoch=0, rank=rank)
        )


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_local_epochs_move_nothing_and_change_the_order(delivery):
    planner = EpochPlanner(make(30, 3, assignment=Local(), delivery=delivery))
    before = planner.load().for_worker(1)
    plan = planner.advance()
    after = plan.for_worker(1)
    assert plan.n_needed == plan.packets.n_packets == 0
    assert after.receives == after.sends == plan.for_worker(SERVER).sends == {}
    assert after.order.tolist() != before.order.tolist()
    assert sorted(after.order.tolist()) == sorted(before.order.tolist())


@pytest.mark.parametrize(
    ("assignment", "n", "expected"),
    [
        (Local(), 3, 0),
        (Partial(0), 3, 0),
        (Partial(0.1), 3, 1),
        (Partial(1), 3, 4),
        (Global(), 3, 5),
        (Partial(1), 1, 0),
        (Aligned(), 3, 5),
        (Aligned(0.1), 3, 1),
        (Aligned(0), 3, 0),
        (Chunks(1), 3, 5),
        (Chunks(4), 3, 6),
        (Chunks(3), 3, 6),
        (Chunks(14), 1, 14),
    ],
)
def test_max_incoming(assignment, n, expected):
    assert make(14, n, assignment=assignment).max_incoming == expected


@pytest.mark.parametrize("assignment", [*ASSIGNMENTS, "aligned:0.5"])
@pytest.mark.parametrize("broadcast", [False, True])
def test_a_shuffle_can_begin_with_any_epoch(assignment, broadcast):
    assignment = assignment if ":" in assignment else written(assignment)
    rule = parse_assignment(assignment)
    sharding = "random"
    if broadcast:
        if rule.in_chunks:
            pytest.skip("a given sharding is one of single samples")
        sharding = GivenSharding.of("given", np.arange(62) % 3, [0, 4])
    delivery = "coded" if rule.needs_holders else "peer"
    choices = Choices(assignment, delivery, sharding=sharding, cache_fraction=0.6, seed=3)
    from_0 = EpochPlanner(ShuffleSpec(62, 3, choices))
    plans = [from_0.load(), *(from_0.advance() for _ in range(6))]
    later = EpochPlanner(ShuffleSpec(62, 3, choices, first_epoch=4))
    for epoch in (4, 5, 6):
        plan = later.load() if epoch == 4 else later.advance()
        assert plan.epoch == epoch
        np.testing.assert_array_equal(plan.ranks, plans[epoch].ranks)
        for rank in range(3):
            np.testing.assert_array_equal(plan.for_worker(rank).order, plans[epoch].for_worker(rank).order)
        if epoch == 4:
            for rank in range(3):
                part = plan.for_worker(rank)
                assert part.receives.keys() == {STORE}
                np.testing.assert_array_equal(part.receives[STORE], part.held)


def test_partial_reaches_its_bound():
    spec = make(100, 4, assignment=Partial(0.3))
    planner = EpochPlanner(spec)
    planner.load()
    plan = planner.advance()
    for rank in range(4):
        assert sum(map(len, plan.for_worker(rank).receives.values())) == spec.max_incoming == 8
        assert sum(map(len, plan.for_worker(rank).sends.values())) == 8


def test_a_wrong_plan_is_never_handed_out(monkeypatch):
    planner = EpochPlanner(make())
    planner.load()
    wrong = Delivery("peer", lambda *args, **options: Packets.uncoded([], [], []))
    monkeypatch.setitem(DELIVERIES, "peer", wrong)
    with pytest.raises(PlanError, match=r"sample \d+ is not delivered to worker \d"):
        planner.advance()
    assert planner.current.epoch == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draw_version": 1}, "draw_version=1 .*3 in this release.*Use the release"),
        ({"n_workers": 0}, "n_workers=0 .* >= 1"),
        ({"first_epoch": -1}, "first_epoch=-1 .*integer >= 0"),
        ({"first_epoch": 2**63}, r"first_epoch=9223372036854775808 .*in \[0, 9223372036854775807\]"),
        ({"first_epoch": 10**5 + 1, "assignment": Partial(0.1)}, "first_epoch=100001 .*'partial:0.1' depends on all"),
        ({"n_workers": 1.5}, "n_workers=1.5 .* integer"),
        ({"n_samples": 2**63}, r"n_samples=9223372036854775808 .*below 2\*\*63"),
        ({"n_samples": 2}, "n_samples=2 .* >= 3.*fewer samples than workers"),
        ({"assignment": "globl"}, "assignment='globl'.*'partial:Q'"),
        ({"assignment": Chunks()}, "assignment='chunks' .*'chunks:ROWS'"),
        ({"assignment": Chunks(6)}, "chunk_rows=6 .*at most 5, for 12 samples and 3 workers.*smaller chunks"),
        ({"delivery": "pigeon"}, "delivery='pigeon'.*'peer', 'server', 'storage'"),
        ({"delivery": "coded", "n_workers": 65, "n_samples": 65}, "n_workers=65 .*at most 64 .*'coded'.*'clique'"),
        ({"delivery": "leftover", "cache_fraction": 0.5}, "delivery='leftover' .*with excess.*'ubershuffle'"),
        ({"sharding": "hash"}, "sharding='hash'.*'contiguous', 'random'"),
        ({"caching": "lru"}, "caching='lru'.*'even', 'recent', 'uniform'"),
        ({"cache_fraction": 0.3}, r"cache_fraction=0.3 .* \[1/3, 1\]"),
        ({"cache_fraction": 1.1}, "cache_fraction=1.1"),
        ({"cache_fraction": float("nan")}, "cache_fraction=nan"),
        ({"seed": 0.5}, "seed=0.5 .* integer"),
    ],
)
def test_bad_specifications(changes, message):
    with pytest.raises(InvalidParameter, match=message):
        make(**changes)
