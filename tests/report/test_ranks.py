"""Sentences about ranks: their shares, and the one for which all others wait."""

from __future__ import annotations

import dataclasses

import pytest

from dshuffle.planning.shares import parse_shares
from dshuffle.records import shares_in_words, slow_rank_of

from .conftest import make_record


def records_of(shares, weights, n_workers=2):
    record = make_record(1, "global", "peer", "random", 100, 0.1)
    choices = dataclasses.replace(record.choices, shares=parse_shares(shares))
    return [
        dataclasses.replace(record, epoch=epoch, choices=choices, n_workers=n_workers, weights=each)
        for epoch, each in enumerate(weights)
    ]


@pytest.mark.parametrize(
    ("shares", "weights", "words"),
    [
        ("even", [()] * 2, ""),
        ("3,1", [(1000, 333)] * 2, "shares: 75.0 % (rank 0), 25.0 % (rank 1)"),
        ("measured", [()] * 4, "shares: equal, because 4 epochs are too few to measure them; 5 are needed"),
        ("measured", [()] * 5, "shares: equal"),
        ("measured", [()] * 4 + [(250, 1000)] * 3, "shares since epoch 4: 20.0 % (rank 0), 80.0 % (rank 1)"),
        ("measured", [()] * 4 + [(250, 1000), (), ()], "shares: equal"),
        ("measured", [()], "shares: equal, because 1 epoch is too few to measure them; 5 are needed"),
        (
            "measured",
            [(250, 1000)] * 3 + [(1000, 1000)] * 2 + [(250, 1000)] * 2,
            "shares since epoch 5: 20.0 % (rank 0), 80.0 % (rank 1)",
        ),
    ],
)
def test_shares_of_the_last_epoch(shares, weights, words):
    assert shares_in_words(records_of(shares, weights)) == words


def test_of_many_ranks_only_the_smallest_and_the_largest_share_are_said():
    weights = (500, *[750] * 10, 1000)
    assert shares_in_words(records_of("measured", [weights], 12)) == "shares: 5.6 % (rank 0) to 11.1 % (rank 11)"
    assert shares_in_words([]) == ""


def trained_for(*epochs):
    record = make_record(1, "global", "peer", "random", 100, 0.1)
    return [dataclasses.replace(record, rank_training_seconds=seconds) for seconds in epochs]


def test_the_slowest_rank_is_named_with_medians():
    records = trained_for((9.0, 1.0, 1.0), (0.7, 0.7, 2.5), (0.7, 0.8, 2.8), (0.7, 0.6, 2.8))
    words = "rank 2 trained 4.0 times as long as the median of the others, which waited 2.10 s an epoch"
    assert slow_rank_of(records) == words


def test_only_epochs_with_the_last_number_of_ranks_count():
    records = trained_for((1.0, 1.0), (5.0, 1.0, 1.0), (1.0, 3.0))
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
    assert slow_rank_of(trained_for(*epochs)) == ""


def test_only_epochs_with_the_last_shares_count():
    before, after = trained_for((0.5, 2.0), (0.5, 2.0)), trained_for((9.0, 0.8), (0.8, 0.8))
    after = [dataclasses.replace(record, weights=(1000, 250)) for record in after]
    assert slow_rank_of(before).startswith("rank 1 trained 4.0 times")
    assert slow_rank_of(before + after) == ""
