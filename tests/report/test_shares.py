"""The words about the shares of the ranks."""

from __future__ import annotations

import dataclasses

import pytest

from dshuffle.planning.shares import parse_shares
from dshuffle.report.shares import shares_in_words

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
