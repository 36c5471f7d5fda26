"""Prices of what a job moves, against plans that are counted sample by sample."""

from __future__ import annotations

import numpy as np
import pytest

from dshuffle.errors import InvalidParameter
from dshuffle.planning import SERVER, STORE, Choices, EpochPlanner, ShuffleSpec
from dshuffle.planning.cost import Bill, ClusterRates, Prices, Work, predict
from dshuffle.planning.delivery.definition import CHECKSUM_NBYTES

Q, N, ROW, CHUNK = 6000, 4, 100, 20
CLUSTER = ClusterRates(N, link_up=1e8, link_down=1e8, server_up=1e8, storage=1e8)
PRICES = Prices(egress=90.0, worker_egress=10.0, requests=0.4)


def counted_run(choices, epochs):
    """Price of the first load, and of all epochs: every packet and every chunk counted in the plans of a session."""
    planner = EpochPlanner(ShuffleSpec(Q, N, choices))
    plan = planner.load()
    total = 0.0
    load = None
    for epoch in range(epochs):
        if epoch:
            plan = planner.advance()
        packets = plan.packets
        senders = np.repeat(packets.senders, np.diff(packets.offsets))
        from_store = senders == STORE
        chunks = {
            (worker, sample // CHUNK)
            for worker, sample in zip(
                packets.destinations[from_store].tolist(), packets.samples[from_store].tolist(), strict=True
            )
        }
        sent = (ROW + CHECKSUM_NBYTES) / 1e9
        if not epoch:  # each chunk is read by one worker, which sends its rows to the others that hold them
            holders = {}
            for worker, chunk in chunks:
                holders.setdefault(chunk, set()).add(worker)
            samples, workers = packets.samples[from_store], packets.destinations[from_store]
            for worker, sample in zip(workers.tolist(), samples.tolist(), strict=True):
                readers = holders[sample // CHUNK]
                reader = next(iter(readers)) if len(readers) == 1 else sample // CHUNK % N
                total += PRICES.worker_egress * sent * (worker != reader)
            chunks = holders
        total += len(chunks) * (CHUNK * ROW * PRICES.egress / 1e9 + PRICES.requests / 1000)
        total += PRICES.egress * sent * np.count_nonzero(packets.senders == SERVER)
        total += PRICES.worker_egress * sent * np.count_nonzero(packets.senders >= 0)
        load = total if load is None else load
    return load, total


@pytest.mark.parametrize("precision", ["exact", "closed"])
@pytest.mark.parametrize("delivery", ["peer", "server", "storage"])
@pytest.mark.parametrize(("assignment", "every"), [("global", 1), ("global", 3), ("partial:0.2", 2), ("local", 1)])
def test_a_run_costs_what_its_plans_move(precision, delivery, assignment, every):
    choices = Choices(assignment, delivery, every=every)
    prediction = predict(CLUSTER, Work(Q, ROW, choices, chunk_rows=CHUNK), precision=precision)
    bill = Bill.of(PRICES, prediction, CLUSTER, epochs=9)
    load, total = counted_run(choices, 9)
    assert bill.load == pytest.approx(load, rel=0.01)
    assert bill.run == pytest.approx(total, rel=0.03)
    exchanges = 8 // every
    assert bill.epoch * every == pytest.approx((total - load) / exchanges, rel=0.03, abs=1e-12)


@pytest.mark.parametrize(
    ("choices", "sends"),
    [
        (Choices("global", sharding="contiguous"), False),
        (Choices("chunks:20"), False),
        (Choices(cache_fraction=0.5), True),
    ],
)
def test_the_first_load(choices, sends):
    work = Work(Q, ROW, choices, chunk_rows=CHUNK)
    bill = Bill.of(PRICES, predict(CLUSTER, work, precision="closed"), CLUSTER)
    load, _ = counted_run(choices, 1)
    assert bill.load == pytest.approx(load, rel=0.01)
    once = Q / CHUNK * (CHUNK * ROW * PRICES.egress / 1e9 + PRICES.requests / 1000)
    assert (bill.load > 1.01 * once) == sends
    assert bill.run is None


def test_relayed_packets_leave_the_server_once_and_workers_for_the_rest():
    work = Work(Q, ROW, Choices("global", "clique", cache_fraction=0.5))
    for_server, for_workers = (
        Bill.of(prices, predict(CLUSTER, work), CLUSTER).epoch
        for prices in (Prices(egress=1.0), Prices(worker_egress=1.0))
    )
    plain = Bill.of(Prices(egress=1.0), predict(CLUSTER, work.with_choices(delivery="server")), CLUSTER).epoch
    assert 0 < for_server < plain
    assert for_server + for_workers == pytest.approx(plain, rel=0.05)


@pytest.mark.parametrize("name", ["egress", "worker_egress", "requests"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "dear", None])
def test_prices_that_cannot_be(name, value):
    with pytest.raises(InvalidParameter, match=rf"prices\.{name}=.* a finite number >= 0"):
        Prices(**{name: value})


def test_an_epoch_between_exchanges_takes_as_long_as_training():
    def prediction(every, training):
        return predict(CLUSTER, Work(Q, ROW, Choices(every=every), training_seconds=training), precision="closed")

    always, sparse = prediction(1, 0.001), prediction(4, 0.001)
    assert always.exchange_seconds == sparse.exchange_seconds == always.epoch_seconds > 0.001
    assert sparse.epoch_seconds == pytest.approx((always.exchange_seconds + 3 * 0.001) / 4)
    assert prediction(4, 5.0).epoch_seconds == 5.0
