"""Exchanges between slots: traced samples are where a plain simulation puts them, and draws are uniform."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.planning import Partial
from dshuffle.planning.assignment.slots import Blocks


def simulated(slots, epochs):
    """The samples of all slots, by moving one sample at a time: ``[worker][slot]``, for each epoch."""
    first = slots.first
    held = [first.samples_at(np.full(m, w), np.arange(m)).tolist() for w, m in enumerate(first.sizes.tolist())]
    yield held
    for epoch in range(1, epochs):
        exchange = slots.exchange(slots.last, epoch)
        sent = {}
        for i in range(slots.last.count):
            for worker in range(first.n_workers):
                place = int(exchange.emptied(np.array([worker]), np.array([i]))[0])
                receiver = int(exchange.shifted(np.array([worker]), np.array([i]), 1)[0])
                assert (receiver, i) not in sent
                sent[receiver, i] = held[worker][place]
        held = [list(samples) for samples in held]
        for (receiver, i), sample in sent.items():
            held[receiver][int(exchange.emptied(np.array([receiver]), np.array([i]))[0])] = sample
        yield held


@given(st.data())
def test_traces_lead_to_the_samples_of_a_simulation(data):
    n = data.draw(st.integers(2, 6))
    q = data.draw(st.integers(n, 60))
    partial = Partial(data.draw(st.sampled_from([0.2, 0.5, 1.0])), data.draw(st.booleans()))
    drawn, seed = data.draw(st.booleans()), data.draw(st.integers())
    first = Blocks.drawn(q, n, 1, "test", seed) if drawn else Blocks.contiguous(q, n)
    slots = partial.slots(first, seed)
    for epoch, held in enumerate(simulated(slots, 5)):
        for worker in range(n):
            assert slots.samples_of(worker, epoch).tolist() == held[worker]
        assert sorted(sample for samples in held for sample in samples) == list(range(q))
