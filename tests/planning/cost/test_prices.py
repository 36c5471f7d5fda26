"""Prices of what a job moves, against plans that are counted sample by sample."""

from __future__ import annotations

import numpy as np
import pytest

from dshuffle.errors import InvalidParameter
from dshuffle.planning import SERVER, STORE, Choices, EpochPlanner, ShuffleSpec
from dshuffle.planning.cost import CHECKSUM_NBYTES, Bill, ClusterRates, Work, predict

Q, N, ROW, CHUNK = 6000, 4, 100, 20
CLUSTER = ClusterRates(N, link_up=1e8, link_down=1e8, server_up=1e8, storage=1e8)
PRICE = 90.0


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
            chunks = {chunk for _, chunk in chunks}
        total += len(chunks) * CHUNK * ROW * PRICE / 1e9
        total += PRICE * sent * np.count_nonzero(packets.senders == SERVER)
        load = total if load is None else load
    return load, total


@pytest.mark.parametrize("delivery", ["peer", "server", "storage"])
@pytest.mark.parametrize(("assignment", "every"), [("global", 1), ("global", 3), ("partial:0.2", 2), ("local", 1)])
def test_a_run_costs_what_its_plans_move(delivery, assignment, every):
    choices = Choices(assignment, delivery, every=every)
    prediction = predict(CLUSTER, Work(Q, ROW, choices, chunk_rows=CHUNK))
    bill = Bill.of(PRICE, prediction, CLUSTER)
    load, total = counted_run(choices, 9)
    assert bill.load == pytest.approx(load, rel=0.01)
    exchanges = 8 // every
    assert bill.epoch * every == pytest.approx((total - load) / exchanges, rel=0.03, abs=1e-12)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "dear", None])
def test_prices_that_cannot_be(value):
    with pytest.raises(InvalidParameter, match=r"egress_price=.* a finite number >= 0"):
        Bill.of(value, predict(CLUSTER, Work(Q, ROW)), CLUSTER)
