"""What the scheduler makes of the figures that come with votes and reports."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest

from dshuffle.planning.sample_digest import SampleDigest
from dshuffle.records import Measures
from dshuffle.runtime.messages import Counts
from dshuffle.runtime.scheduler.votes import check_votes, next_rate, rate_of


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
def test_therate_of_the_links_is_what_workers_received(measured, cpu_idle, rate):
    assert rate_of(measured, cpu_idle) == rate


@pytest.mark.parametrize(
    ("before", "measured", "rate"),
    [(None, None, None), (None, 5.0, 5.0), (5.0, None, 5.0), (8.0, 1.0, 4.0), (8.0, 9.0, 9.0), (math.inf, 9.0, 9.0)],
)
def test_the_rate_falls_by_half_at_most(before, measured, rate):
    assert next_rate(before, measured) == rate


def counts(drawn, due, **others):
    digests = {name: SampleDigest.of(np.array(ids), 0) for name, ids in (("drawn", drawn), ("due", due))}
    return Counts(**{"digest": 1, "expected": 3, "rows": 1, **digests, **others})


SERVED = Counts(digest=1, expected=3, rows=1)  # of a server that does not train


@pytest.mark.parametrize(
    ("votes", "wrong"),
    [
        ([counts([0, 3], [0, 1]), counts([1, 2], [2, 3]), SERVED], None),
        ([counts([0, 3], [0, 1], digest=2), counts([1, 2], [2, 3]), SERVED], "the workers made different plans. Inst"),
        (
            [counts([0, 3], [0, 1]), counts([1, 3], [2, 3]), SERVED],
            r"as many samples as are due \(4\), but not the same",
        ),
        ([counts([1, 2], [0, 1]), counts([0, 3, 3], [2, 3]), SERVED], "drew 5 samples, but 4 are due"),
        (
            [counts([1, 2], [0, 1]), counts([3], [2, 3]), SERVED],
            "drew 3 samples, but 4 are due. .* the same build of d",
        ),
        (
            [counts([0, 3], [0, 1]), counts([1, 2], [2, 3]), dataclasses.replace(SERVED, rows=0)],
            "2 rows arrived, but 3 were expected",
        ),
        (
            [counts([0], [0], leaving=2, arriving=1, expected=1), counts([1], [1], leaving=0, arriving=0, expected=1)],
            "planned to send 2 rows and to receive 1",
        ),
    ],
)
def test_votes_that_do_not_fit_together(votes, wrong):
    found = check_votes(7, votes)
    assert found is None if wrong is None else re.search(f"^epoch 7: .*{wrong}", found)
