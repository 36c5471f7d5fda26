"""The sentence about the rank for which all others wait."""

from __future__ import annotations

import dataclasses

import pytest

from dshuffle.report.slow_rank import slow_rank_of

from .conftest import make_record


def records_of(*epochs):
    record = make_record(1, "global", "peer", "random", 100, 0.1)
    return [dataclasses.replace(record, rank_training_seconds=seconds) for seconds in epochs]


def test_the_slowest_rank_is_named_with_medians():
    records = records_of((9.0, 1.0, 1.0), (0.7, 0.7, 2.5), (0.7, 0.8, 2.8), (0.7, 0.6, 2.8))
    words = "rank 2 trained 4.0 times as long as the median of the others, which waited 2.10 s an epoch"
    assert slow_rank_of(records) == words


def test_only_epochs_with_the_last_number_of_ranks_count():
    records = records_of((1.0, 1.0), (5.0, 1.0, 1.0), (1.0, 3.0))
    assert slow_rank_of(records).startswith("rank 1 trained 3.0 times")


@pytest.mark.parametrize(
    "epochs",
    [
        (),
        ((),),
        ((3.0,), (3.0,)),
        ((1.0, 1.2, 1.0), (1.0, 1.2, 1.0)),  # not slow
        ((0.01, 0.09, 0.01), (0.01, 0.09, 0.01)),  # too short to tell
    ],
)
def test_nothing_is_said_if_nobody_waits_noticeably(epochs):
    assert slow_rank_of(records_of(*epochs)) == ""


def test_only_epochs_with_the_last_shares_count():
    before, after = records_of((0.5, 2.0), (0.5, 2.0)), records_of((9.0, 0.8), (0.8, 0.8))
    after = [dataclasses.replace(record, weights=(1000, 250)) for record in after]
    assert slow_rank_of(before).startswith("rank 1 trained 4.0 times")
    assert slow_rank_of(before + after) == ""
