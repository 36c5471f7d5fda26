"""An exchange in every K-th epoch only, against plans that are worked out here sample by sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.compare.simulated import orders_of_first_epochs
from dshuffle.errors import InvalidParameter
from dshuffle.planning import SERVER, STORE, Choices, EpochPlanner, ShuffleSpec
from dshuffle.planning.delivery import DELIVERIES
from dshuffle.planning.planner import OwnPlanner
from dshuffle.planning.remainder import training_orders

EPOCHS = 7


def orders_in(spec, epoch):
    return [order.tolist() for order in training_orders(spec, epoch)]


def shares_of_every_epoch(choices, q, n, epochs):
    """The set of samples of each rank, for assignments that do not depend on the epochs before."""
    spec = ShuffleSpec(q, n, choices)
    return [[set(order) for order in orders_in(spec, epoch)] for epoch in range(epochs)]


@given(data=st.data())
def test_ranks_of_a_new_draw_are_those_of_the_last_exchange(data):
    n, every = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 4))
    q, seed = data.draw(st.integers(3 * n, 60)), data.draw(st.integers(0, 99))
    assignment = data.draw(st.sampled_from(["global", "chunks:3"]))
    always = shares_of_every_epoch(Choices(assignment, seed=seed), q, n, EPOCHS)
    sparse = shares_of_every_epoch(Choices(assignment, seed=seed, every=every), q, n, EPOCHS)
    for epoch in range(EPOCHS):
        assert sparse[epoch] == always[epoch // every * every]


@pytest.mark.parametrize("assignment", ["global", "partial:0.4", "chunks:3"])
@pytest.mark.parametrize("every", [2, 3, 4])
def test_the_order_between_is_that_of_the_epoch_before_backwards(assignment, every):
    spec = ShuffleSpec(40, 3, Choices(assignment, every=every, between="reverse"))
    redrawn = ShuffleSpec(40, 3, Choices(assignment, every=every))
    before = None
    for epoch in range(EPOCHS):
        orders = orders_in(spec, epoch)
        if epoch % every:
            assert orders == [order[::-1] for order in before]
            assert orders_in(redrawn, epoch) not in (before, orders)
        else:
            assert orders == orders_in(redrawn, epoch)
        before = orders


@pytest.mark.parametrize("delivery", sorted(DELIVERIES))
@given(data=st.data())
def test_every_sample_once_and_only_what_was_sent(delivery, data):
    """Caches that are followed from epoch to epoch: whoever sends a sample has it, and whoever trains on it has it."""
    n = 4
    needs_excess = delivery in ("clique", "ubershuffle", "coded")
    fraction = 0.6 if needs_excess or (data.draw(st.booleans()) and delivery != "leftover") else None
    every = data.draw(st.integers(2, 3))
    assignment = data.draw(st.sampled_from(["global", "partial:0.4"]))
    caching = data.draw(st.sampled_from(["uniform", "recent", "even"]))
    between = data.draw(st.sampled_from(["redraw", "reverse"]))
    choices = Choices(assignment, delivery, caching, fraction, every=every, between=between)
    planner = EpochPlanner(ShuffleSpec(48, n, choices))
    plan = planner.load()
    held = [set(plan.for_worker(rank).held.tolist()) for rank in range(n)]
    for epoch in range(EPOCHS):
        if epoch:
            plan = planner.advance()
        packets = plan.packets
        if epoch % every:
            assert packets.n_packets == packets.n_components == plan.n_needed == 0
        elif epoch:
            senders = np.repeat(packets.senders, np.diff(packets.offsets))
            for sample, destination, sender in zip(
                packets.samples.tolist(), packets.destinations.tolist(), senders.tolist(), strict=True
            ):
                assert sender in (SERVER, STORE) or sample in held[sender]
                held[destination].add(sample)
        parts = [plan.for_worker(rank) for rank in range(n)]
        for rank, part in enumerate(parts):
            assert set(part.own.tolist()) <= set(part.held.tolist()) <= held[rank]
            held[rank] = set(part.held.tolist())
        assert sorted(sample for part in parts for sample in part.order.tolist()) == list(range(48))


@given(data=st.data())
def test_an_epoch_is_a_function_of_its_number(data):
    """Sessions that begin with an epoch, or go through all before it, train alike."""
    n = data.draw(st.integers(2, 4))
    choices = Choices(
        data.draw(st.sampled_from(["global", "partial:0.3", "chunks:2"])),
        every=data.draw(st.integers(2, 4)),
        between=data.draw(st.sampled_from(["redraw", "reverse"])),
    )
    spec = ShuffleSpec(40, n, choices)
    from_0 = [[order.tolist() for order in orders] for orders in orders_of_first_epochs(spec, EPOCHS)]
    first = data.draw(st.integers(0, EPOCHS - 1))
    later = ShuffleSpec(40, n, choices, first_epoch=first)
    planners = [OwnPlanner(later, rank) for rank in range(n)]
    for epoch in range(first, EPOCHS):
        assert [planner.plan(epoch, "peer").order.tolist() for planner in planners] == from_0[epoch]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"every": 0}, r"every=0 is not allowed; it must be an integer >= 1"),
        ({"every": 1.5}, r"every=1.5 is not allowed"),
        ({"every": 2, "assignment": "local"}, r"every=2 .* 1 with assignment='local'.* has no exchange in any epoch"),
        ({"every": 2, "between": "forwards"}, r"between='forwards' .* one of \['redraw', 'reverse'\]"),
        ({"between": "reverse"}, r"between='reverse' .* 'redraw' with every=1.*Set every to 2 or more"),
    ],
)
def test_what_cannot_be(fields, message):
    with pytest.raises(InvalidParameter, match=message):
        Choices(**fields)
