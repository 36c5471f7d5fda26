"""A sign of life names few others, and the signs of all workers together name everybody."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dshuffle.runtime.worker.reports import MOST_HEARD, SignsOfLife

HEARTBEAT = 15.0


class Reports(SimpleNamespace):
    """What a participant would send."""

    def __init__(self, participant: int) -> None:
        super().__init__(participant=participant, signs=[])

    async def send_sign_of_life(self, ages: dict[int, float]) -> None:
        self.signs.append(ages)


def signs_of(participant: int, ages: dict[int, float], count: int = 1) -> list[dict[int, float]]:
    async def give() -> Any:
        reports: Any = Reports(participant)
        signs = SignsOfLife(reports, HEARTBEAT, lambda: ages)
        for _ in range(count):
            signs._give()
            await asyncio.sleep(0)
        signs.close()
        return reports.signs

    return asyncio.run(give())


def test_few_are_all_named_but_for_those_that_were_silent_for_a_heartbeat() -> None:
    assert signs_of(0, {}) == [{}]
    assert signs_of(0, {1: 0.5, 2: 14.9, 3: 15.0, 4: 70.0}) == [{1: 0.5, 2: 14.9}]


@pytest.mark.parametrize("count", [MOST_HEARD + 1, 1000])
def test_each_sign_names_as_many_and_three_signs_of_each_worker_name_everybody(count: int) -> None:
    named: set[int] = set()
    for participant in range(count):
        for sign in signs_of(participant, dict.fromkeys(range(count), 1.0), count=3):
            assert len(sign) == MOST_HEARD
            named |= sign.keys()
    assert named == set(range(count))


def test_one_worker_names_everybody_in_turn() -> None:
    signs = signs_of(7, dict.fromkeys(range(200), 1.0), count=4)
    assert set().union(*signs) == set(range(200))
