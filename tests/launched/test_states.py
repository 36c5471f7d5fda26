"""States of a job for another one."""

from __future__ import annotations

import threading

import pytest

from dshuffle.errors import CheckpointError, ClusterError, InvalidParameter, PeerFailed


def ids_of(batches):
    return [int(sample) for ids, _ in batches for sample in ids]


def epochs(loader, total):
    return {epoch.number: ids_of(epoch) for epoch in loader.epochs(total)}


class Model:
    def __init__(self, weights):
        self.weights = weights

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = state["weights"]


@pytest.fixture
def state(in_threads):
    """A state after the first of two epochs, with a model."""

    def loop(loader):
        loader.attach(model=Model(loader.rank))
        for epoch in loader.epochs(1):
            ids_of(epoch)
        return loader.state_dict() if loader.rank == 0 else None

    return in_threads(2, loop, seed=1)[0]


def test_only_rank_0_needs_the_state(in_threads, state):
    def loop(loader):
        model = Model(10 + loader.rank)
        loader.load_state_dict(state if loader.rank == 0 else None)
        loader.attach(model=model)
        return model.weights, sorted(epochs(loader, 2))

    assert in_threads(2, loop) == [(0, [1]), (0, [1])]


def test_a_rank_that_does_not_load_the_state(in_threads, state):
    def loop(loader):
        if loader.rank == 0:
            loader.load_state_dict(state)
        loader.attach(model=Model(10))
        epochs(loader, 2)

    results = in_threads(2, loop)
    assert "Call load_state_dict on all ranks, before attach" in str(results[1])
    assert isinstance(results[1], ClusterError)
    assert isinstance(results[0], PeerFailed)


def test_a_state_after_attach(in_threads, state):
    def loop(loader):
        loader.attach(model=Model(10))
        loader.load_state_dict(state)

    [error] = in_threads(1, loop)
    assert isinstance(error, ClusterError)
    assert "load its state before" in str(error)


def test_rank_0_needs_a_state(in_threads):
    [error] = in_threads(1, lambda loader: loader.load_state_dict(None))
    assert isinstance(error, InvalidParameter)
    assert "state=None is not allowed" in str(error)


def test_a_state_of_another_way_of_shuffling(in_threads, state):
    def loop(loader):
        loader.load_state_dict(state)
        return sorted(epochs(loader, 2))

    [error] = in_threads(1, loop, seed=99, assignment="local")
    assert isinstance(error, CheckpointError)
    assert "the state has assignment=" in str(error)
    assert in_threads(1, loop, seed=1) == [[1]]


def test_states_at_the_start_of_an_epoch_and_after_the_loop(in_threads):
    begins = threading.Event()

    def loop(loader):
        states = []
        if loader.rank:
            assert begins.wait(60)
        for epoch in loader.epochs(2):
            if loader.rank == 0:
                states.append(loader.state_dict())
                begins.set()
            ids_of(epoch)
        if loader.rank == 0:
            states.append(loader.state_dict())
        return [(state["epoch"], state["trained"]) for state in states]

    assert in_threads(2, loop)[0] == [(0, []), (1, []), (2, [])]
