"""The order in which rows on a disk are sent."""

from __future__ import annotations

import numpy as np
import pytest

from dshuffle.planning import STORE, Choices, ShuffleSpec
from dshuffle.planning.epoch_plan import in_disk_order
from dshuffle.planning.planner import OwnPlanner


def parts_of(epoch, *, stored, moves_within, delivery="peer"):
    spec = ShuffleSpec(1000, 4, Choices("global", seed=5))
    parts = [OwnPlanner(spec, rank).plan(epoch, delivery) for rank in range(4)]
    return parts, [in_disk_order(part, seed=5, stored=stored, moves_within=moves_within) for part in parts]


@pytest.mark.parametrize("stored", [None, 2])
def test_senders_and_receivers_list_the_same_samples_in_the_same_order(stored):
    _, parts = parts_of(3, stored=stored, moves_within=True)
    for sender in parts:
        for receiver in parts:
            np.testing.assert_array_equal(sender.sends[receiver.rank], receiver.receives[sender.rank])


def test_rows_leave_in_the_order_of_the_epoch_before():
    spec = ShuffleSpec(1000, 4, Choices("global", seed=5))
    _, parts = parts_of(3, stored=2, moves_within=True)
    for rank, part in enumerate(parts):
        trained_on = OwnPlanner(spec, rank).plan(2, "peer").order
        position = dict(zip(trained_on.tolist(), range(250), strict=True))
        assert sorted(np.concatenate(list(part.sends.values())).tolist()) == sorted(position)
        for samples in part.sends.values():
            assert np.all(np.diff([position[sample] for sample in samples.tolist()]) > 0)


def test_rows_that_stay_move_only_where_there_is_room():
    plain, parts = parts_of(3, stored=2, moves_within=False)
    for before, part in zip(plain, parts, strict=True):
        assert part.receives.keys() == before.receives.keys() == {0, 1, 2, 3} - {part.rank}
        assert np.array_equal(np.sort(part.sends[(part.rank + 1) % 4]), before.sends[(part.rank + 1) % 4])


def test_rows_of_the_store_keep_their_order_and_nothing_moves():
    for epoch, delivery in ((0, "peer"), (3, "storage")):
        plain, parts = parts_of(epoch, stored=2, moves_within=True, delivery=delivery)
        for before, part in zip(plain, parts, strict=True):
            assert part.sends == {}
            assert list(part.receives) == [STORE]
            np.testing.assert_array_equal(part.receives[STORE], before.receives[STORE])
