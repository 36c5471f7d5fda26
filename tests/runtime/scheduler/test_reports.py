"""What the scheduler makes of the measurements that participants report."""

from __future__ import annotations

import math

import pytest

from dshuffle.records import Measures
from dshuffle.runtime.scheduler.snapshot import next_rate, rate_of


def measures(nbytes, seconds):
    return Measures(wire_received_bytes=(nbytes,), transfer_seconds=seconds)


@pytest.mark.parametrize(
    ("measured", "cpu_idle", "rate"),
    [
        ([measures(10**6, 1.0), measures(10**6, 0.5), measures(10**6, 0.1)], 0.6, 2e6),
        ([measures(10**6, 1.0), measures(0, 0.0)], 0.6, 1e6),  # a server receives nothing
        ([measures(10**6, 1.0)], 0.1, math.inf),  # the processors were busy, so the link may be faster
        ([measures(1000, 1.0)], 0.6, None),
        ([], 1.0, None),
    ],
)
def test_the_rate_of_the_links_is_what_workers_received(measured, cpu_idle, rate):
    assert rate_of(measured, cpu_idle) == rate


@pytest.mark.parametrize(
    ("before", "measured", "rate"),
    [(None, None, None), (None, 5.0, 5.0), (5.0, None, 5.0), (8.0, 1.0, 4.0), (8.0, 9.0, 9.0), (math.inf, 9.0, 9.0)],
)
def test_the_rate_falls_by_half_at_most(before, measured, rate):
    assert next_rate(before, measured) == rate
