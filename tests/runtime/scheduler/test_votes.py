"""Whether the votes on a run fit together."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from dshuffle.planning.remainder import SampleDigest
from dshuffle.runtime.messages import Counts
from dshuffle.runtime.scheduler.machine import check_votes


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
    reason = check_votes(7, votes)
    assert reason is None if wrong is None else re.search(f"^epoch 7: .*{wrong}", reason)
