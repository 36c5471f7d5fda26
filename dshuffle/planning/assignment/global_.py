"""``global``: a new uniform draw over all samples in every epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dshuffle.planning.assignment.balance import draw_classes
from dshuffle.planning.assignment.rule import Assignment, Draw, EpochDraw
from dshuffle.planning.assignment.slots import Blocks
from dshuffle.planning.exchange_epochs import Weights


@dataclass(frozen=True, slots=True)
class Global(Assignment):
    """A new uniform draw over all samples in every epoch."""

    name: ClassVar[str] = "global"
    forms: ClassVar[str] = "'global'"
    forgets: ClassVar[bool] = True
    can_weigh: ClassVar[bool] = True

    def draw(self, draw: Draw) -> EpochDraw:
        if draw.classes is not None:
            return EpochDraw(draw_classes(draw.classes, draw.n_workers, "global", draw.seed, draw.epoch))
        return EpochDraw(self.blocks(draw.n_samples, draw.n_workers, draw.seed, draw.epoch, draw.weights).all_ranks())

    def blocks(self, n_samples: int, n_workers: int, seed: int, epoch: int, weights: Weights = ()) -> Blocks:
        return Blocks.drawn(n_samples, n_workers, 1, "global", seed, epoch, weights=weights)

    @property
    def can_balance(self) -> bool:
        return True
