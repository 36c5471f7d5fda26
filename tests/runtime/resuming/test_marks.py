"""Tasks mark how far they have trained."""

from __future__ import annotations

import pytest

from dshuffle import Shuffler
from dshuffle.errors import InvalidParameter

from .stopping import trained

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("n_samples", [-1, 1000, 1.5])
def test_marks_that_cannot_be(clusters, labelled, n_samples):
    with Shuffler(clusters[3], labelled) as shuffler:
        epoch = next(shuffler.epochs(1))
        futures = epoch.map(lambda partition: partition.mark_trained(n_samples))
        epoch.accept(futures)
        with pytest.raises(InvalidParameter, match="n_samples="):
            clusters[3].gather(futures)


def test_marks_follow_the_last_attempt(clusters, labelled):
    with Shuffler(clusters[3], labelled) as shuffler:
        epoch = next(shuffler.epochs(1))
        trained(clusters[3], epoch, [9] * 3)
        trained(clusters[3], epoch, [4, 1, 2])  # the task is run again
        assert shuffler.state_dict()["trained"] == [[24, 0, 8]]


OPEN = {}


def leave_open(partition):
    OPEN[partition.rank] = partition.batches(8, mark=True)
    next(OPEN[partition.rank])


def close_late(partition):
    try:
        next(OPEN[partition.rank])
    except Exception as error:
        return type(error).__name__


def test_a_mark_after_the_task_has_ended(clusters, labelled):
    """It would count for the next epoch."""
    with Shuffler(clusters[3], labelled) as shuffler:
        for epoch in shuffler.epochs(2):
            if epoch.number == 0:
                clusters[3].gather(epoch.map(leave_open))
            else:
                assert clusters[3].gather(epoch.map(close_late)) == ["StaleEpoch"] * 3
                assert shuffler.state_dict()["trained"] == []


def test_the_stored_order_is_marked_as_a_whole(clusters, labelled):
    def in_order(partition, n_samples):
        stored = partition.as_stored()
        for _ in stored.batches(8, mark=n_samples is None):
            stored.mark_trained(n_samples or 0)

    with Shuffler(clusters[3], labelled) as shuffler:
        epoch = next(shuffler.epochs(1))
        for count, expected in ((5, []), (None, [700])):
            clusters[3].gather(epoch.map(in_order, count))
            assert list(map(sum, shuffler.state_dict()["trained"])) == expected
