"""One contract for every iterator that has a position: what it has given, and what is left after resuming.

The oracle is a whole pass of a new iterator that was never stopped.
"""

from __future__ import annotations

import importlib
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from dshuffle.errors import InvalidParameter
from dshuffle.integrations.sampler import ExchangeSampler
from dshuffle.rows import RowLayout
from dshuffle.runtime import Partition

EPOCH = 3
BATCH_SIZE = 4
N_SAMPLES = 39

pytestmark = [
    # PyTorch forks its worker processes, although the cluster of another test may have left threads.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata 0.11 calls it
]


def partition():
    layout = RowLayout.of({"y": (np.dtype("i8"), ())})
    rows = layout.empty(N_SAMPLES)
    layout.column(rows, "y")[:] = np.arange(N_SAMPLES)
    order = np.random.default_rng(0).permutation(N_SAMPLES)
    return Partition(layout, rows, order, order, rank=1, epoch=EPOCH, shares=(N_SAMPLES, N_SAMPLES + 1))


@dataclass
class Ids:
    """The sampler by itself."""

    options: dict[str, Any] = field(default_factory=dict)
    loads_late = False
    """Whether a state is loaded when an iteration begins, so that a set_epoch before `load` is one after it."""

    def __post_init__(self):
        options = {"assignment": "partial:0.3", **self.options}
        self.positioned: Any = ExchangeSampler(3 * N_SAMPLES + 1, rank=1, num_replicas=3, **options)
        self.items: Any = self.positioned

    def set_epoch(self, epoch):
        self.positioned.set_epoch(epoch)

    def state(self, n_given):
        return self.positioned.state_dict()

    def load(self, state):
        self.positioned.load_state_dict(state)

    def __iter__(self):
        return (item if isinstance(item, int) else item.tolist() for item in self.items)


@dataclass
class LoadedIds(Ids):
    """The sampler in a DataLoader."""

    workers: int = 0
    persistent: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.items = self.loader(importlib.import_module("torch.utils.data").DataLoader)

    def loader(self, kind):
        samples = list(range(3 * N_SAMPLES + 1))
        workers = {"num_workers": self.workers, "persistent_workers": self.persistent}
        return kind(samples, batch_size=BATCH_SIZE, sampler=self.positioned, **workers)

    def state(self, n_given):
        state = super().state(n_given)
        if self.workers:  # they ask for ids ahead of training, so the script says how many were trained on
            state["yielded"] = min(n_given * BATCH_SIZE, len(self.positioned))
        return state


@dataclass
class Batches(Ids):
    """``to_torch``, by itself."""

    mode: str = "drop"

    def __post_init__(self):
        self.items = self.positioned = partition().to_torch(BATCH_SIZE, mode=self.mode, arrays=("y",))

    def __iter__(self):
        return (y.tolist() for (y,) in self.items)


class Stateful(Ids):
    """Something in torchdata's StatefulDataLoader, which saves and loads the state itself."""

    loads_late = True

    def state(self, n_given):
        return self.items.state_dict()

    def load(self, state):
        self.items.load_state_dict(state)


class StatefulLoader(Stateful, LoadedIds):
    def __post_init__(self):
        Ids.__post_init__(self)
        self.items = self.loader(pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader)


class StatefulBatches(Stateful, Batches):
    def __post_init__(self):
        Batches.__post_init__(self)
        data = pytest.importorskip("torchdata.stateful_dataloader")
        self.items = data.StatefulDataLoader(self.positioned, batch_size=None)


class LoadedBatches(Batches):
    """``to_torch`` in a DataLoader, without worker processes, which it refuses (see test_torch.py)."""

    def __post_init__(self):
        super().__post_init__()
        data = importlib.import_module("torch.utils.data")
        self.items = data.DataLoader(self.positioned, batch_size=None)


ITERATORS = {
    "sampler": Ids,
    "sampler, classes": lambda: Ids(
        {"assignment": "global", "balance": np.arange(3 * N_SAMPLES + 1) % 3, "mode": "uneven"}
    ),
    "sampler, drop": lambda: Ids({"assignment": "global", "mode": "drop"}),
    "DataLoader of a sampler": LoadedIds,
    "StatefulDataLoader of a sampler": StatefulLoader,
    "to_torch, drop": Batches,
    "to_torch, pad": lambda: Batches(mode="pad"),
    "to_torch, uneven": lambda: Batches(mode="uneven"),
    "DataLoader of to_torch": LoadedBatches,
    "StatefulDataLoader of to_torch": StatefulBatches,
}


def named(name):
    """A parameter of tests: all iterators but the bare samplers need PyTorch."""
    return pytest.param(name, marks=() if name.startswith("sampler") else pytest.mark.torch)


@pytest.fixture(params=map(named, ITERATORS))
def make(request):
    if not request.param.startswith("sampler"):
        request.getfixturevalue("torch")
    return ITERATORS[request.param]


def whole(make, epoch):
    iterator = make()
    iterator.set_epoch(epoch)
    return list(iterator)


def stopped(make, n_given, epoch=EPOCH):
    """An iterator that has given some items (None for all), these items, and its state."""
    iterator = make()
    iterator.set_epoch(epoch)
    items = iter(iterator)
    given = list(items if n_given is None else itertools.islice(items, n_given))
    state = iterator.state(len(given))
    assert iterator.state(len(given)) == state  # saving changes nothing
    return iterator, given, state


@pytest.mark.parametrize("stop", ["start", "middle", "last", "end"])
@pytest.mark.parametrize("sets_epoch", [False, True])
def test_what_is_left_is_given_and_then_whole_epochs(make, stop, sets_epoch):
    expected = whole(make, EPOCH)
    n_given = {"start": 0, "middle": len(expected) // 2, "last": len(expected) - 1, "end": None}[stop]
    _, given, state = stopped(make, n_given)
    for _ in range(2):  # a state may be loaded by several iterators
        resumed = make()
        resumed.set_epoch(EPOCH)
        resumed.load(state)
        if sets_epoch:
            resumed.set_epoch(EPOCH)
        assert given + list(resumed) == expected
    if sets_epoch:
        resumed.set_epoch(EPOCH)
    assert list(resumed) == expected
    resumed.set_epoch(EPOCH + 1)
    assert list(resumed) == whole(make, EPOCH + 1) != expected


def test_a_resumed_iterator_may_stop_again(make):
    expected = whole(make, EPOCH)
    _, given, state = stopped(make, 2)
    for count in (0, 1, 2, 0):
        resumed = make()
        resumed.load(state)
        resumed.set_epoch(EPOCH)
        given += list(itertools.islice(resumed, count))
        # An iterator that has not begun yet is where its state was.
        state = resumed.state(len(given)) if count else state
    last = make()
    last.load(state)
    last.set_epoch(EPOCH)
    assert given + list(last) == expected


@pytest.mark.parametrize("n_given", [2, None])
def test_another_epoch_begins_at_its_start(make, n_given):
    _, _, state = stopped(make, n_given)
    resumed = make()
    resumed.load(state)
    resumed.set_epoch(EPOCH + 1)
    assert list(resumed) == whole(make, EPOCH + 1)
    if resumed.loads_late:
        return
    resumed.load(state)
    resumed.set_epoch(EPOCH + 1)
    resumed.set_epoch(EPOCH)  # the position was left
    assert list(resumed) == whole(make, EPOCH)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [LoadedIds, StatefulLoader])
def test_loaders_with_processes_of_their_own_do_the_same(torch, kind, persistent):
    def make():
        return kind(workers=2, persistent=persistent)

    expected = {epoch: whole(LoadedIds, epoch) for epoch in (EPOCH, EPOCH + 1)}
    for n_given in (2, None):
        _, given, state = stopped(make, n_given)
        assert given == expected[EPOCH][:n_given]
        orders = [(None, None), (EPOCH, None), (EPOCH + 1, None), (None, EPOCH + 1), (None, EPOCH)]
        for before, after in orders:
            resumed = make()
            if before is not None:
                resumed.set_epoch(before)
            resumed.load(state)
            if after is not None:
                resumed.set_epoch(after)
            epoch = after or (before if resumed.loads_late else None) or EPOCH
            n_done = len(given) if epoch == EPOCH else 0
            assert list(resumed) == expected[epoch][n_done:], f"{before=}, {after=}, {n_given=}"
        assert list(resumed) == expected[EPOCH]


@pytest.mark.parametrize("make", [named("sampler"), named("to_torch, drop")], indirect=True)
def test_the_end_of_an_epoch_differs_from_every_start(make):
    _, given, at_end = stopped(make, None)
    assert (at_end["epoch"], at_end["yielded"]) == (EPOCH, len(given))
    assert json.loads(json.dumps(at_end)) == at_end
    for epoch in (EPOCH, EPOCH + 1):
        _, _, at_start = stopped(make, 0, epoch)
        assert (at_start["epoch"], at_start["yielded"]) == (epoch, 0)
    with pytest.raises(InvalidParameter, match=rf"state\['yielded'\]={len(given) + 1}"):
        make().load({**at_end, "yielded": len(given) + 1})


@pytest.mark.parametrize("make", [named("sampler"), named("to_torch, drop")], indirect=True)
def test_an_earlier_iteration_that_is_still_open_changes_nothing(make):
    expected = whole(make, EPOCH)
    iterator, given, _ = stopped(make, 0)
    earlier = iter(iterator)
    given.append(next(earlier))
    iterator.set_epoch(EPOCH + 1)
    given += list(earlier)
    assert given == expected
    state = iterator.state(0)
    assert state["epoch"] == EPOCH + 1
    resumed = make()
    resumed.load(state)
    assert list(resumed) == list(iterator) == whole(make, EPOCH + 1)


@pytest.mark.parametrize("change", [{"sharding": "contiguous"}, {"every": 2}])
def test_a_state_of_a_sampler_that_gives_other_ids(change):
    [name] = change
    with pytest.raises(InvalidParameter, match=rf"state\['{name}"):
        Ids(change).load(Ids().state(0))
