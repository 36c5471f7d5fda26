"""Changes of workers: everybody keeps what fits, nothing else moves, and every sample stays somewhere."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import NEW, Choices, EpochPlanner, ShuffleSpec, WorkerHistory
from dshuffle.planning.assignment.slots import WorkerChange
from dshuffle.planning.planner import OwnPlanner, plans_own_parts
from dshuffle.planning.remainder import workers_of

KEEPING = [
    Choices("local"),
    Choices("local", sharding="contiguous"),
    Choices("partial:0.3"),
    Choices("partial:1"),
    Choices("partial:0.3", every=2, between="reverse"),
]


def drawn_change(data, n_before, epoch=1, carried=0):
    """Some of the workers stay, with other ranks, and some join."""
    stay = data.draw(st.lists(st.integers(0, n_before - 1), unique=True, max_size=n_before))
    join = data.draw(st.integers(0 if stay else 1, 4))
    former = data.draw(st.permutations(stay + [NEW] * join))
    return WorkerChange(epoch, carried, n_before, tuple(former))


def fewest_moves(before, former):
    """The fewest samples that change workers, over all ways to give out shares that differ by at most one."""
    each, extra = divmod(sum(before), len(former))
    had = [0 if rank == NEW else before[rank] for rank in former]
    # A larger share saves a move only where more than the smaller one was held.
    kept = sum(min(size, each) for size in had) + min(extra, sum(size > each for size in had))
    return sum(before) - kept


def drawn_history(data, epochs):
    """A history, and the workers of each epoch by name: (first epoch, names by rank)."""
    history = WorkerHistory(data.draw(st.integers(1, 5)))
    names, unused = [list(range(history.n_workers))], history.n_workers
    for epoch in range(1, epochs):
        names.append(names[-1])
        if data.draw(st.booleans()):
            change = drawn_change(data, history.n_workers)
            changed = history.changed(change.former, epoch=epoch, carried=epoch - 1)
            if changed != history:
                names[-1] = [names[-1][rank] if rank != NEW else (unused := unused + 1) for rank in change.former]
            history = changed
    return history, names


def history_at(history, epoch):
    """The history as it was in an earlier epoch."""
    while history.epoch > epoch:
        history = history.before
    return history


@pytest.mark.parametrize("choices", KEEPING, ids=lambda choices: f"{choices.label}-{choices.sharding}")
@given(data=st.data())
def test_every_epoch_follows_from_the_one_before(choices, data):
    """As few samples as possible move in a change, as many as the assignment says otherwise, and all are somewhere."""
    q, epochs = 120, 7
    history, names = drawn_history(data, epochs)
    before = None
    for epoch in range(epochs):
        now = history_at(history, epoch)
        spec = ShuffleSpec(q, now.n_workers, choices, first_epoch=epoch, changes=now.changes)
        ranks = workers_of(spec, epoch, np.arange(q))
        for rank in range(now.n_workers):
            own = OwnPlanner(spec, rank).plan(epoch, "peer").own
            assert own.tolist() == np.flatnonzero(ranks == rank).tolist()
        sizes = np.bincount(ranks, minlength=now.n_workers)
        assert sizes.max() - sizes.min() <= 1
        where = np.array(names[epoch])[ranks]
        if before is not None:
            moved = int((where != before[0]).sum())
            if names[epoch] == names[epoch - 1]:
                stays = str(choices.assignment) == "local" or epoch % choices.every
                count = 0 if stays else choices.assignment.n_exchanged(q, now.n_workers)
                assert moved == count * now.n_workers
            else:
                assert moved == fewest_moves(before[1], now.changes[-1].former)
        before = where, sizes.tolist()


@pytest.mark.parametrize("fraction", [None, 0.9])
@pytest.mark.parametrize("assignment", ["local", "partial:0.3"])
@pytest.mark.parametrize("every", [1, 2, 3])
@given(data=st.data())
def test_plans_of_all_samples_say_the_same(assignment, every, fraction, data):
    """Excess needs plans of all samples, which begin with the present workers."""
    history, _ = drawn_history(data, 4)
    fraction = None if history.n_workers == 1 else fraction
    choices = Choices(cache_fraction=fraction, every=every).with_assignment(assignment)
    spec = ShuffleSpec(90, history.n_workers, choices, first_epoch=4, changes=history.changes)
    assert plans_own_parts(spec, "peer") == (not spec.has_excess)
    planner = EpochPlanner(spec)
    for plan in (planner.load(), planner.advance(), planner.advance()):
        assert plan.ranks.tolist() == workers_of(spec, plan.epoch, np.arange(90)).tolist()
        if not spec.has_excess:
            own = OwnPlanner(spec, 0).plan(plan.epoch, "peer")
            mine = plan.for_worker(0)
            assert own.order.tolist() == mine.order.tolist()
            assert {who: ids.tolist() for who, ids in own.receives.items()} == {
                who: ids.tolist() for who, ids in mine.receives.items()
            }


def test_a_history_as_json():
    history = WorkerHistory(3).changed([2, 0], epoch=4, carried=4).changed([0, NEW, 1, NEW], epoch=9, carried=8)
    assert WorkerHistory.from_dict(history.to_dict()) == history
    assert (history.first_n_workers, history.n_workers, history.epoch, history.before.n_workers) == (3, 4, 9, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epoch": 3}, "epoch=3 is not allowed; it must be 0 or 1"),
        ({"carried": -1, "epoch": 0}, "epoch=0"),
        ({"n_before": 0}, "n_before=0"),
        ({"former": (0, 0)}, "each at most once, or -1"),
        ({"former": (2,)}, "ranks below n_before=2"),
        ({"former": (-2,)}, r"former=\(-2,\)"),
        ({"former": ()}, r"former=\(\)"),
    ],
)
def test_a_change_that_cannot_be(changes, message):
    change = WorkerChange(1, 0, 2, (1, NEW))
    with pytest.raises(InvalidParameter, match=message):
        dataclasses.replace(change, **changes)


def test_a_history_that_cannot_be():
    one = WorkerChange(3, 2, 2, (1,))
    with pytest.raises(InvalidParameter, match="a change of 1 workers after epoch 3"):
        WorkerHistory(1, (one, one))
    with pytest.raises(InvalidParameter, match="n_workers=2 is not allowed; it must be 1, as after the last change"):
        WorkerHistory(2, (one,))
    with pytest.raises(InvalidParameter, match=r"first_epoch=2 .* The last change of workers is in epoch 3"):
        ShuffleSpec(10, 1, Choices("local"), first_epoch=2, changes=(one,))
