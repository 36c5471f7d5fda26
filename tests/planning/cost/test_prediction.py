"""The cost model: what it must never say, and what was measured."""

import dataclasses
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices, EpochPlanner, ShuffleSpec, cost
from dshuffle.planning.cost import ClusterRates, Work, loads_of, message_counts, predict, timed
from dshuffle.planning.delivery.relay import route
from dshuffle.planning.epoch_plan import SERVER

from ...conftest import at_most

FAST = {
    "send_rate": math.inf,
    "receive_rate": math.inf,
    "encode_rate": math.inf,
    "decode_rate": math.inf,
    "message_seconds": 0.0,
}
RATE = 12.5e6


def network(n, **rates):
    """A cluster whose processors and headers cost nothing."""
    return ClusterRates(
        n, **{"link_up": RATE, "link_down": RATE, "wire_overhead": 0.0, **FAST, "read_rate": math.inf, **rates}
    )


# The testbed of docs/design.md: links of 100 Mbit/s each way, and two cores for 8 workers and the server. What a byte
# that crosses costs these cores, with links emulated on them, follows from its times and idle shares (peer: 206 MB in
# 3.1 s, 20 % idle; relay of 4 KiB rows: 412 MB in 8.58 s, 42 % idle, of which 1 s for messages): 22 s a GB, half for
# each end.
TESTBED = ClusterRates(
    n_workers=8,
    link_up=RATE,
    link_down=RATE,
    server_up=RATE,
    cores=2,
    machine_workers=8,
    server_on_machine=True,
    send_rate=1e9 / 11,
    receive_rate=1e9 / 11,
    epoch_seconds=0.1,
)


@pytest.mark.parametrize(
    ("samples", "row", "delivery", "relay", "measured"),
    [
        (400_000, 1024, "server", "pipelined", 17.5),
        (400_000, 1024, "clique", "pipelined", 4.30),
        (400_000, 1024, "clique", "ring", 7.1),
        (400_000, 1024, "clique", "unicast", 17.9),
        (400_000, 1024, "peer", "pipelined", 3.1),
        (200_000, 4096, "clique", "pipelined", 8.58),
    ],
)
def test_the_measured_times_of_the_design(samples, row, delivery, relay, measured):
    work = Work(samples, row, Choices(delivery=delivery, cache_fraction=0.5, relay=relay))
    predicted = predict(TESTBED, work)
    assert predicted.exchange_seconds == pytest.approx(measured, rel=0.2)
    expected = {"server": "server egress", "peer": "processors", "ring": "scatter, then ring"}
    assert predicted.bottleneck == expected.get(delivery, expected.get(relay, "server egress"))


@pytest.mark.parametrize("alpha", [None, 0.3, 0.7])
def test_peer_reaches_the_cut_set_bound(alpha):
    """DESIGN.md: every worker must receive U/n rows whatever the code."""
    predicted = predict(network(10), Work(20_000, 996, Choices(cache_fraction=alpha)))
    assert predicted.exchange_seconds == pytest.approx(predicted.needed / 10 * 1000 / RATE, rel=0.06)
    assert predicted.needed == pytest.approx(20_000 * (1 - (alpha or 0.1)), rel=0.02)


def test_a_worker_that_serves_sends_itself_nothing():
    dedicated, beside = network(4, server_up=RATE), network(4)
    server, clique = (Work(20_000, 996, Choices(delivery=name, cache_fraction=0.5)) for name in ("server", "clique"))
    alone, both = predict(dedicated, server), predict(beside, server)
    assert both.exchange_seconds == pytest.approx(0.75 * alone.exchange_seconds)
    both = predict(beside, clique)  # what it hands on goes over the same link
    sent = 0.75 * both.server_egress + both.worker_egress / 4
    assert both.exchange_seconds == pytest.approx(sent / RATE, rel=0.05)


@at_most(60)
@given(
    delivery=st.sampled_from(["peer", "server", "storage", "clique"]),
    name=st.sampled_from(
        ["link_up", "link_down", "server_up", "storage", "storage_client", "cores"]
        + [f"{part}_rate" for part in ("send", "receive", "encode", "decode", "read")]
    ),
    factor=st.integers(2, 50),
    over_links=st.booleans(),
)
def test_more_of_anything_is_never_slower(delivery, name, factor, over_links):
    cluster = ClusterRates(
        *(8, 1e8, 1e8, 3e8, 2e8, 5e7),
        request_seconds=0.01,
        machine_workers=2,
        storage_over_links=over_links,
    )
    work = Work(50_000, 1000, Choices(delivery=delivery, cache_fraction=0.4))
    before = predict(cluster, work)
    more = dataclasses.replace(cluster, **{name: getattr(cluster, name) * factor})
    after = predict(more, work)
    assert after.exchange_seconds <= before.exchange_seconds * (1 + 1e-12)


@pytest.mark.parametrize("delivery", ["peer", "clique"])
def test_the_bytes_are_those_of_the_hops(delivery):
    """An exact prediction beside a planner's own plan of the same shuffle."""
    work = Work(12_000, 96, Choices(delivery=delivery, cache_fraction=0.4))
    predicted = predict(network(6), work)
    planner = EpochPlanner(ShuffleSpec(12_000, 6, work.choices))
    planner.load()
    for _ in range(3):
        epoch = planner.advance()
    assert predicted.needed == epoch.n_needed
    assert predicted.packets == epoch.packets.n_packets
    senders = epoch.packets.senders if delivery == "peer" else route("pipelined", epoch.packets, 6, 8192).senders
    assert predicted.server_egress == 100 * np.count_nonzero(senders == SERVER)
    assert predicted.worker_egress == pytest.approx(100 * np.count_nonzero(senders >= 0))
    assert predicted.most_ingress == 100 * np.bincount(epoch.packets.destinations).max()


@pytest.mark.parametrize("chunk_rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("alpha", [None, 0.5])
def test_read_amplification_is_that_of_the_plan_with_more_samples_too(chunk_rows, alpha):
    cluster = network(5, storage=1e6, storage_over_links=False)
    work = Work(30_000, 1000, Choices(delivery="storage", cache_fraction=alpha), chunk_rows=chunk_rows)
    exact, scaled = (predict(cluster, work, most_samples=most) for most in (30_000, 10_000))
    assert scaled.read_amplification == pytest.approx(exact.read_amplification, rel=0.03)
    assert scaled.requests == pytest.approx(exact.requests, rel=0.03)
    assert exact.exchange_seconds == pytest.approx(exact.needed * 1000 * exact.read_amplification / 1e6)
    assert exact.bottleneck == "storage"
    if chunk_rows == 1:
        assert exact.read_amplification == pytest.approx(1)


def test_those_who_read_the_most_share_the_storage_at_first_and_have_their_own_links_at_last():
    cluster = network(2, storage=2e6, storage_client=1.5e6, storage_over_links=False)
    work = Work(4000, 1000, Choices(delivery="storage"))
    loads = loads_of(cluster, work)._replace(read=np.array([1e6, 3e6]), requests=np.zeros(2))
    # 1 MB/s each for a second; then 2 MB at 1.5 MB/s.
    assert timed(cluster, work, loads).exchange_seconds == pytest.approx(1 + 2 / 1.5)
    # As fast as their links alone, where nobody knows better, and those carry headers too.
    linked = dataclasses.replace(
        cluster, storage_client=None, storage_over_links=True, link_down=1.65e6, wire_overhead=0.1
    )
    assert timed(linked, work, loads).exchange_seconds == pytest.approx(1 + 2 / 1.5)
    # Alike, they share it all the time.
    loads = loads._replace(read=np.array([2e6, 2e6]))
    assert timed(cluster, work, loads).exchange_seconds == pytest.approx(2)


def test_the_largest_jobs_take_little_time():
    cluster = ClusterRates(4096, link_up=12.5e9, link_down=12.5e9, storage=1e12)
    started = time.thread_time()
    for delivery in ("peer", "server", "storage"):
        predicted = predict(cluster, Work(10**9, 4096, Choices(delivery=delivery, cache_fraction=8 / 4096)))
        assert not predicted.exact
        assert predicted.needed == pytest.approx(10**9 * (1 - 8 / 4096), rel=1e-4)
        assert predicted.exchange_seconds > 0
    assert time.thread_time() - started < 15


@pytest.mark.parametrize(
    ("assignment", "delivery", "alpha"),
    [
        ("global", "peer", None),
        ("global", "server", 0.2),
        ("global", "storage", None),
        ("chunks", "storage", None),
        ("global", "leftover", None),
    ],
)
def test_more_workers_than_are_planned_are_extrapolated(monkeypatch, assignment, delivery, alpha):
    """Beside real plans for all of them."""
    cluster = network(100, server_up=RATE, storage=1e8)
    work = Work(40_000, 1000, Choices(assignment, delivery, cache_fraction=alpha), chunk_rows=16)
    extrapolated = predict(cluster, work)
    monkeypatch.setattr(cost, "MOST_WORKERS", 100)
    counted = predict(cluster, work)
    assert extrapolated.exact is False
    for name in ("needed", "packets", "server_egress", "worker_egress", "worker_ingress", "storage_bytes", "requests"):
        assert getattr(extrapolated, name) == pytest.approx(getattr(counted, name), rel=0.1), name
    assert extrapolated.exchange_seconds == pytest.approx(counted.exchange_seconds, rel=0.1)


@pytest.mark.parametrize(("workers", "assignment"), [(4, "local"), (1, "global")])
def test_nothing_takes_no_time_where_nothing_moves(workers, assignment):
    cluster = ClusterRates(workers, 1e6, 1e6, index_seconds=1e-6, epoch_seconds=0.3, first_message_seconds=0.1)
    predicted = predict(cluster, Work(10_000, 1000, Choices(assignment=assignment)))
    assert (predicted.exchange_seconds, predicted.needed, predicted.bottleneck) == (0.0, 0.0, "")


def make_work(n_samples=1000, row_nbytes=8, chunk_rows=64, training_seconds=None, **choices):
    return Work(n_samples, row_nbytes, Choices(**choices), chunk_rows, training_seconds)


@pytest.mark.parametrize(
    ("cluster", "work", "told"),
    [
        ({}, {"delivery": "storage"}, "storage=None"),
        ({}, {"delivery": "post"}, "delivery='post'"),
        ({}, {"assignment": "best"}, "assignment='best'"),
        ({}, {"relay": "pigeon"}, "relay='pigeon'"),
        ({}, {"cache_fraction": 0.01}, "cache_fraction=0.01"),
        ({}, {"cache_fraction": 0.5, "delivery": "leftover"}, "ubershuffle"),
        ({}, {"n_samples": 3}, "fewer samples than workers"),
        ({}, {"training_seconds": -1.0}, "training_seconds=-1.0"),
        ({"link_up": 0.0}, {}, "link_up=0.0"),
        ({"link_down": (1.0, 2.0)}, {}, "one for each worker"),
        ({"link_down": (1.0, 2.0, math.nan, 1.0)}, {}, "link_down=nan"),
        ({"storage": -1.0}, {}, "storage=-1.0"),
        ({"cores": 0}, {}, "cores=0"),
        ({"request_seconds": math.inf}, {}, "request_seconds=inf"),
    ],
)
def test_bad_input_is_named(cluster, work, told):
    with pytest.raises(InvalidParameter, match=told.replace("(", r"\(").replace("[", r"\[")):
        predict(
            ClusterRates(**{"n_workers": 4, "link_up": 1e6, "link_down": 1e6, **cluster}),
            make_work(**work),
        )


def pairs_of(work, n):
    """Senders and receivers of an exchange."""
    planner = EpochPlanner(ShuffleSpec(work.n_samples, n, work.choices))
    planner.load()
    packets = planner.advance().packets
    senders = np.repeat(packets.senders, np.diff(packets.offsets)).tolist()
    return set(zip(senders, packets.destinations.tolist(), strict=True))


@pytest.mark.parametrize(("delivery", "shares_processor"), [("peer", 1), ("peer", 4), ("server", 1)])
def test_an_exchange_of_next_to_nothing_takes_its_fixed_time(delivery, shares_processor):
    """The order and the votes, and a message between every two participants of which one sends to the other."""
    n = 4
    cluster = network(
        n, link_up=1e15, link_down=1e15, server_up=1e15, machine_workers=shares_processor, epoch_seconds=0.02,
        first_message_seconds=0.003,
    )  # fmt: skip
    work = Work(400, 1, Choices(delivery=delivery))
    fixed = 0.02 + len(pairs_of(work, n)) / n * shares_processor * 0.003
    assert predict(cluster, work).exchange_seconds == pytest.approx(fixed)


@pytest.mark.parametrize(("delivery", "relay"), [("peer", "pipelined"), ("server", "pipelined"), ("clique", "unicast")])
def test_each_pair_has_one_first_message_however_many_follow(delivery, relay):
    cluster = network(4, server_up=RATE)
    work = Work(400, 1 << 22, Choices(delivery=delivery, relay=relay, cache_fraction=0.5))
    messages, firsts = message_counts(work, cluster, loads_of(cluster, work))
    assert messages > len(pairs_of(work, 4)) == firsts
