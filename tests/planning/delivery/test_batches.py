"""When batches of a relay have gone through a worker's links, beside a simulation packet by packet."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.planning.delivery.relay import Batches


def simulated(sizes: list[int], server: float, to_others: float) -> float:
    """When a worker has passed on everything: packets leave the server evenly, and batches pass one after the other."""
    total, arrived, free = sum(sizes), 0, 0.0
    for size in sizes:
        arrived += size
        free = max(free, server * arrived / total) + to_others * size / total
    return free


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_link_out_of_a_worker_passes_one_batch_after_the_other(sizes, server, to_others):
    seconds = Batches.of(sizes).seconds(server=server, to_others=to_others, from_others=0.0, from_server=0.0)
    assert seconds == pytest.approx(simulated(sizes, server, to_others))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 4))
def test_more_batches_at_a_time_arrive_later_and_without_pauses(sizes, at_a_time):
    alone, together = Batches.of(sizes), Batches.of(sizes, at_a_time)
    assert (together.sent >= alone.sent).all()
    assert together.sent[-1] == pytest.approx(1)
    np.testing.assert_array_equal(together.left, alone.left)
    assert together.pauses == (len(sizes) - 1 if at_a_time == 1 else 0)


def test_a_link_into_a_worker_is_idle_until_the_first_batch_is_passed_on():
    """Two equal batches of two workers: the server takes 1 s, and each worker's link in 0.5 + 0.5 s."""
    seconds = Batches.of([1, 1]).seconds(server=1.0, to_others=0.5, from_others=0.5, from_server=0.5)
    assert seconds == pytest.approx(0.5 + 0.5 + 0.25)
