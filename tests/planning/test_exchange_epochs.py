"""An exchange in every K-th epoch only, against plans that are worked out here sample by sample."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices, ShuffleSpec
from dshuffle.planning.remainder import training_orders

EPOCHS = 7


def orders_in(spec, epoch):
    return [order.tolist() for order in training_orders(spec, epoch)]


@given(data=st.data())
def test_ranks_of_a_new_draw_are_those_of_the_last_exchange(data):
    n, every = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 4))
    q, seed = data.draw(st.integers(3 * n, 60)), data.draw(st.integers(0, 99))
    assignment = data.draw(st.sampled_from(["global", "chunks:3"]))
    always, sparse = (ShuffleSpec(q, n, Choices(assignment, seed=seed, every=k)) for k in (1, every))
    for epoch in range(EPOCHS):
        expected = orders_in(always, epoch // every * every)
        assert list(map(sorted, orders_in(sparse, epoch))) == list(map(sorted, expected))


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
