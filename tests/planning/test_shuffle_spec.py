"""The specification of a shuffle."""

from __future__ import annotations

import pytest

from dshuffle.errors import InvalidParameter
from dshuffle.planning import Choices, ShuffleSpec, WorkerHistory


def test_hosts_are_those_of_all_workers():
    spec = ShuffleSpec(100, 4, Choices(), hosts=(0, 0, 1, 1))
    assert spec.with_history(WorkerHistory(5), 0).hosts == ()
    with pytest.raises(InvalidParameter, match=r"hosts=\(0, 1\) .*one host for each of 4 workers"):
        ShuffleSpec(100, 4, Choices(), hosts=(0, 1))
