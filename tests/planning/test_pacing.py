"""Lengths of messages follow the rate of links, within the limits that users set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.planning.delivery.relay import LINK_SECONDS, MOST_MESSAGES, UNDER_WAY, Pacing

MIB = 2**20


@given(
    rate=st.none() | st.floats(1),
    message_bytes=st.integers(1, 64 * MIB),
    times=st.integers(1, 20),
    longest=st.integers(0, 100 * MIB),
)
def test_limits_hold(rate, message_bytes, times, longest):
    window = message_bytes * times
    pacing = Pacing.of(rate, message_bytes=message_bytes, window_bytes=window)
    assert 1 <= pacing.message_nbytes <= message_bytes
    assert pacing.message_nbytes <= pacing.under_way_nbytes <= window
    asked = pacing.asked(longest)
    assert 1 <= asked <= MOST_MESSAGES
    assert asked == 1 or asked * longest <= pacing.under_way_nbytes
    assert asked == MOST_MESSAGES or (asked + 1) * max(1, longest) > pacing.under_way_nbytes


@pytest.mark.parametrize("mbit", [20, 50, 100, 1000])
def test_a_message_takes_some_milliseconds_of_a_slow_link(mbit):
    rate = mbit * 1e6 / 8
    pacing = Pacing.of(rate, message_bytes=8 * MIB, window_bytes=32 * MIB)
    assert pacing.message_nbytes == int(rate * LINK_SECONDS)
    assert pacing.asked(pacing.message_nbytes) == UNDER_WAY
