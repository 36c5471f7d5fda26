"""The specification of a shuffle."""

from __future__ import annotations

import dataclasses

import pytest

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices, Remainder, ShuffleSpec, WorkerHistory


def test_hosts_are_those_of_all_workers():
    spec = ShuffleSpec(100, 4, Choices(), hosts=(0, 0, 1, 1))
    assert spec.with_history(WorkerHistory(5), 0).hosts == spec.with_workers(3).hosts == ()
    resumed, remainder = dataclasses.replace(spec.with_workers(3), hosts=(0, 0, 1)), Remainder(1, ((10, 10, 10, 10),))
    assert sum(remainder.left(resumed, rank)[0].sum() for rank in range(3)) == 60
    with pytest.raises(InvalidParameter, match=r"hosts=\(0, 1\) .*one host for each of 4 workers"):
        ShuffleSpec(100, 4, Choices(), hosts=(0, 1))
