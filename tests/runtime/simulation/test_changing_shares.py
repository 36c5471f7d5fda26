"""Sessions whose shares change before every other epoch, in virtual time, under random workloads and faults."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from dshuffle.errors import DShuffleError
from dshuffle.planning import Remainder
from dshuffle.planning.exchange_epochs import Weights, as_weights
from dshuffle.records import EpochRecord
from dshuffle.runtime.client import session_client
from dshuffle.runtime.client.session_client import ATTEMPTS, Membership, OpenSession
from dshuffle.runtime.messages import EpochExchange

from .script import Trained
from .simulation import Simulation, planned, simulate

pytestmark = pytest.mark.filterwarnings("ignore:.*never awaited:RuntimeWarning")  # of processes that are killed


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let shares change, and count the sessions that follow with other ones."""
    seen: Counter[str] = Counter()
    rng = random.Random(5)

    def proposed(session: OpenSession, records: Sequence[EpochRecord]) -> Weights | None:
        if rng.random() < 0.5:
            return None
        seen["proposed"] += 1
        if rng.random() < 0.3:
            return ()
        return as_weights([rng.uniform(0.6, 1) for _ in range(session.n_workers)])

    open_with_other_shares = Membership._open_with_other_shares

    def counted(self: Membership, epoch: int, records: Sequence[EpochRecord]) -> None:
        open_with_other_shares(self, epoch, records)
        seen["opened"] += self._following is not None

    def expected(self: Simulation, way: int, epoch: int, trained: Trained) -> dict[int, list[int]]:
        return planned(way, epoch, trained)  # a session without faults would have other shares

    take_over = Membership._take_over

    def counted_take_over(self: Membership, start: Remainder, training: Any, attempts: int = ATTEMPTS) -> EpochExchange:
        try:
            return take_over(self, start, training, attempts)
        except DShuffleError:
            seen["kept"] += attempts == 1
            raise

    monkeypatch.setattr(session_client, "proposed_weights", proposed)
    monkeypatch.setattr(Membership, "_take_over", counted_take_over)
    monkeypatch.setattr(Simulation, "_expected", expected)
    monkeypatch.setattr(Membership, "_open_with_other_shares", counted)
    return seen


@pytest.mark.slow
def test_many_schedules_while_shares_change(changes: Counter[str]) -> None:
    seen = simulate(range(1300, 1420)).seen
    assert min(seen["epochs"], changes["opened"]) > 100
    assert seen["resumed"] > 10
    assert changes["kept"] > 0, "sessions that lost a worker before they took over, so that the one before went on"
