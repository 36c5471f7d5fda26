from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.planning.exchange_epochs import ClassOrder

from ..conftest import at_most


@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=8), seed=st.integers(0, 9), data=st.data())
@at_most(100)
def test_every_stretch_has_its_share_of_every_class(counts, seed, data):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    order = ClassOrder.of(labels, seed)
    q = len(labels)
    assert np.array_equal(np.sort(order.samples), np.arange(q))
    assert np.array_equal(order.forward(order.samples), np.arange(q))
    assert np.array_equal(order.inverse(order.positions), np.arange(q))
    first = data.draw(st.integers(0, q - 1))
    last = data.draw(st.integers(first + 1, q))
    found = np.bincount(labels[order.samples[first:last]], minlength=len(counts))
    assert (abs(found - np.array(counts) * (last - first) / q) < 4).all()
