"""The mathematics of unequal shares: sizes, weights, bounds, and when measured shares change."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices
from dshuffle.planning.exchange_epochs import share_sizes
from dshuffle.planning.shares import (
    LEAST_GAIN,
    LEAST_SAVING,
    MEASURED_EPOCHS,
    ShareBounds,
    SharePolicy,
    parse_shares,
)

WEIGHTS = st.lists(st.integers(1, 1000), min_size=1, max_size=9).map(tuple)
SPEEDS = st.lists(st.floats(0.01, 100), min_size=2, max_size=9)
WIDE = ShareBounds(least=0, most=1)
MEASURED = SharePolicy(measures=True)


@given(weights=WEIGHTS, more=st.integers(0, 10**12))
def test_sizes_are_the_proportions_rounded(weights, more):
    n_units = len(weights) + more
    sizes = share_sizes(n_units, weights).tolist()
    assert sum(sizes) == n_units
    assert min(sizes) >= 1
    exact = [Fraction(weight * n_units, sum(weights)) for weight in weights]
    if min(exact) >= 1:
        assert all(abs(size - part) < 1 for size, part in zip(sizes, exact, strict=True))
        # No unit could be given to a rank that is further below its part.
        raised = [part - int(part) for size, part in zip(sizes, exact, strict=True) if size > part]
        lowered = [part - int(part) for size, part in zip(sizes, exact, strict=True) if size < part]
        assert not raised or not lowered or min(raised) >= max(lowered)


@given(speeds=SPEEDS)
def test_shares_end_when_the_speeds_are_those_that_were_measured(speeds):
    """Ranks of constant speed get shares that take them equally long, in one change, and keep them."""
    policy, weights, changes = MEASURED, (), 0
    for _ in range(4):
        fractions = np.array(weights or (1,) * len(speeds), float)
        seconds = tuple(100 * fractions / fractions.sum() / speeds)
        following = policy.following(weights, [seconds] * MEASURED_EPOCHS, WIDE)
        changes += following != weights
        weights = following
    assert changes <= 1
    fractions = np.array(weights or (1,) * len(speeds), float)
    lasts = (fractions / fractions.sum() / speeds).max()
    ideal = 1 / sum(speeds)
    # A weight is rounded to a thousandth of the largest one, and the smallest weight is one thousandth.
    rounding = 1 + 0.5 / (min(weights) if weights else 1000)
    assume(min(speeds) * 1000 >= max(speeds))
    assert lasts <= max(ideal / (1 - LEAST_GAIN), ideal + LEAST_SAVING / 100) * rounding * 1.001


@pytest.mark.parametrize(
    ("epochs", "follows"),
    [
        ([(9, 1), (4, 1)], ()),  # too few
        ([(1, 9), (4, 1), (4, 1)], (250, 1000)),  # the first one does not count
        ([(9, 1), (1.15, 1), (1.15, 1)], ()),  # saves 7 %
        ([(9, 1), (0.04, 0.01), (0.04, 0.01)], ()),  # saves 24 ms
        ([(9, 1), (4, 0), (4, 0)], ()),  # a rank had no task
        ([(9, 1), (9, 1), (1, 1), (1, 1), (1, 1)], ()),  # it is fast again
        ([(9, 1), (4, 0), (4, 1)], ()),  # too few in which both have a time
        ([(2, 2), (2, 0), (2, 2)], ()),  # the second rank has lost its worker, and is no faster
        ([(9, 1), (4, 0), (4, 1), (0, 1), (4, 1)], (250, 1000)),
    ],
)
def test_when_shares_change(epochs, follows):
    assert MEASURED.following((), epochs, WIDE) == follows


@pytest.mark.parametrize(
    "shares",
    ["a=0", "a=x", "=1", "a=1,a=2", "a=1,2", {}, {"a": -1}, {"a": "1"}, {"a,b": 1}, {"a=b": 1}, {"a": True}, {" a": 1}],
)
def test_refused_shares_by_name(shares):
    with pytest.raises(InvalidParameter, match=r"shares=.*or a number for each worker by name"):
        parse_shares(shares)


def test_shares_by_name():
    shares = parse_shares({"b": 0.5, 7: 2, "tcp://10.0.0.1:4000": 4})
    assert str(shares) == "b=0.5,7=2,tcp://10.0.0.1:4000=4"
    assert parse_shares(" b=0.5, 7=2,tcp://10.0.0.1:4000=4") == shares
    choices = Choices(shares=shares)
    assert Choices.from_dict(choices.to_dict()) == choices
    names = [{"7", "x"}, {"c"}, {"b"}, {"d", "tcp://10.0.0.1:4000"}]
    assert shares.first(4, (), names) == (500, 250, 125, 1000)
    assert shares.first(1, (500, 1000), [{"c"}]) == shares.first(4, ()) == ()
    assert shares.names == ("b", "7", "tcp://10.0.0.1:4000")
    assert parse_shares("measured").names == parse_shares("2,1").names == ()


@pytest.mark.parametrize("shares", ["fast", "", "1,", "1,-1", [1, 0], [], [1, float("inf")], [1, "2"], [True], 3, None])
def test_refused_shares(shares):
    with pytest.raises(InvalidParameter, match=r"shares=.*'even', 'measured', positive numbers, one for each rank"):
        parse_shares(shares)


def test_shares_as_text():
    for shares in ("even", "measured", "1,1,0.25"):
        assert str(parse_shares(shares)) == shares
        choices = Choices(shares=shares)
        assert Choices.from_dict(choices.to_dict()) == choices
    assert parse_shares([1, 1, 0.25]) == parse_shares("1,1,0.25") == SharePolicy((1, 1, 0.25))
    earlier = {name: value for name, value in Choices().to_dict().items() if name != "shares"}
    assert Choices.from_dict(earlier) == Choices()


def test_with_which_weights_measured_shares_begin():
    """With those before, if they are for as many workers. Equal ones are none."""
    assert [MEASURED.first(3, before) for before in [(500, 1000, 250), (250, 250, 250), (1000, 250)]] == [
        (500, 1000, 250),
        (),
        (),
    ]
