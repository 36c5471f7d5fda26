"""``local``: every worker keeps its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dshuffle.planning.assignment.rule import Assignment, Draw, EpochDraw
from dshuffle.planning.assignment.slots import Blocks, Slots, WorkerChange


@dataclass(frozen=True, slots=True)
class Local(Assignment):
    """Every worker keeps its samples; only the order in which it trains on them changes."""

    name: ClassVar[str] = "local"
    forms: ClassVar[str] = "'local'"
    moves: ClassVar[bool] = False
    can_weigh: ClassVar[bool] = True

    def draw(self, draw: Draw) -> EpochDraw:
        return EpochDraw(draw.previous.copy())

    def slots(self, first: Blocks, seed: int, changes: Sequence[WorkerChange] = ()) -> Slots:
        return Slots.of(first, changes, lambda n_workers: 0, fixed_points=False, seed=seed)

    @property
    def shuffled_fraction(self) -> float:
        """Nothing is exchanged."""
        return 0.0

    def most_incoming(self, n_samples: int, n_workers: int, largest_share: int) -> int:
        return 0

    @property
    def can_balance(self) -> bool:
        return True
