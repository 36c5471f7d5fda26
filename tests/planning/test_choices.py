"""One value for a way of shuffling: it checks itself, travels, and compares by what was chosen."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Aligned, Choices, Classes, GivenSharding, Partial

GIVEN = Choices(
    "global", sharding=GivenSharding.of("stratified:y", [0, 1, 0, 1]), balance=Classes.of("y", [0, 0, 1, 1])
)


@pytest.mark.parametrize(
    "choices", [Choices(), Choices("partial:0.3", "clique", relay="ring", cache_fraction=0.5), GIVEN]
)
def test_it_travels_and_is_equal_to_itself(choices):
    assert pickle.loads(pickle.dumps(choices)) == copy.deepcopy(choices) == choices
    assert hash(pickle.loads(pickle.dumps(choices))) == hash(choices)
    assert Choices.from_dict(choices.to_dict()) == choices.by_name()
    assert Choices.from_dict(choices.to_dict()).to_dict() == choices.to_dict()


def test_names_are_parsed_and_policies_filled_in():
    choices = Choices("global", balance="y")
    assert Choices("partial:0.3").assignment == Partial(0.3)
    assert choices.balance == Classes("y")
    assert Choices(Aligned(), caching=None).caching == "even"
    assert Choices("global", caching=None).caching == "uniform"
    assert Choices(delivery="auto").is_auto
    assert not Choices(delivery="auto").reads_store


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"assignment": "globl"}, "assignment='globl' is not allowed; it must be 'local', 'partial:Q'"),
        ({"delivery": "pear"}, "delivery='pear' .*'auto'.*'peer'"),
        ({"caching": "odd"}, "caching='odd' .*'even'"),
        ({"relay": "baton"}, "relay='baton' .*'ring'"),
        ({"cache_fraction": 0}, "cache_fraction=0 .*above 0"),
        ({"cache_fraction": 1.5}, "cache_fraction=1.5"),
        ({"sharding": 5}, "sharding is not allowed"),
        ({"sharding": np.arange(4)}, "sharding is not allowed"),
        ({"balance": 5}, "balance is not allowed"),
        ({"seed": "a"}, "seed='a' .*integer"),
        ({"sharding": "contiguous", "balance": "y"}, "sharding='contiguous' .*'random' or 'stratified:y'"),
        ({"assignment": "chunks", "balance": "y"}, "balance='y' .*'chunks' cannot preserve"),
        ({"assignment": "chunks:2", "sharding": GIVEN.sharding}, "whole chunks from the first epoch"),
    ],
)
def test_what_is_not_allowed_is_named(wrong, message):
    with pytest.raises(InvalidParameter, match=message):
        Choices(**wrong)
