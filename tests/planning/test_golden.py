"""Plans that were recorded: no release, machine or NumPy version draws others from the same seed."""

import zlib

import numpy as np
import pytest

from dshuffle.planning import Choices, Classes, EpochPlanner, ShuffleSpec
from dshuffle.planning.exchange_epochs import row_permutation
from dshuffle.planning.randomness import Bijection, random_words

EXCESS = {"cache_fraction": 0.5}
RECORDED = [
    ("local", "peer", {}, 2901871757),
    ("partial:0.3", "peer", {}, 1212399862),
    ("global", "peer", {}, 2375891763),
    ("global", "peer", {"balance": 7}, 1852671634),
    ("aligned", "peer", {}, 3062233515),
    ("chunks:8", "peer", {}, 2139657213),
    ("global", "server", EXCESS, 3151946473),
    ("global", "storage", EXCESS, 1304321111),
    ("global", "clique", EXCESS, 3103810805),
    ("global", "ubershuffle", EXCESS, 606874624),
    ("global", "coded", EXCESS, 3120350882),
    ("global", "leftover", {}, 1395111323),
    ("aligned", "clique", {**EXCESS, "caching": "uniform"}, 415420781),
    ("aligned", "clique", {**EXCESS, "caching": "recent"}, 1442095758),
    ("aligned", "clique", {**EXCESS, "caching": "even"}, 1081274262),
]


@pytest.mark.parametrize(("assignment", "delivery", "options", "recorded"), RECORDED)
def test_the_second_exchange(assignment, delivery, options, recorded):
    if "balance" in options:
        options = {"balance": Classes.of("y", np.arange(301) % options["balance"])}
    planner = EpochPlanner(ShuffleSpec(301, 5, Choices(assignment, delivery, seed=3, **options)))
    plan = [planner.load(), planner.advance(), planner.advance()][-1]
    assert zlib.crc32(plan.holders.data, plan.digest()) == recorded


def test_more_than_64_workers():
    planner = EpochPlanner(ShuffleSpec(900, 70, Choices("global", "peer", seed=3, cache_fraction=0.2)))
    planner.load()
    assert planner.advance().digest() == 66825150


def test_random_numbers():
    assert random_words(2, "golden", 1).tolist() == [14974619098842461278, 650286512627052439]
    assert row_permutation(8, 1).tolist() == [3, 2, 0, 1, 5, 7, 4, 6]
    points = Bijection.of(2**40, "golden", 1).forward(np.arange(3)).tolist()
    assert points == [1039636157668, 30970037832, 1074776041295]
