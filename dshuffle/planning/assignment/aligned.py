"""``aligned``: a random draw made so that coded deliveries pack it perfectly."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Self

import numpy as np

from dshuffle.checks import as_ratio
from dshuffle.errors import InvalidParameter
from dshuffle.planning.assignment.aligned_draw import draw_aligned
from dshuffle.planning.assignment.draws import balanced_sizes
from dshuffle.planning.assignment.partial import Partial
from dshuffle.planning.assignment.rule import Assignment, Draw, EpochDraw
from dshuffle.planning.grouping import group_by
from dshuffle.planning.packets import SERVER, Packets
from dshuffle.planning.randomness import choose
from dshuffle.planning.share_sizes import share_sizes


@dataclass(frozen=True, slots=True)
class Aligned(Assignment):
    """A random draw over all or some samples, made so that coded deliveries pack perfectly.

    It needs fewer packets than ``global``, and far fewer with the caching policy ``even``. Samples with the same worker
    and the same holders meet again less often than with ``global``, and hardly ever if few samples share their holders.

    Parameters
    ----------
    fraction
        Q in [0, 1]. Below 1, every worker puts as many of its samples into the draw as ``partial`` exchanges, and gets
        the same number from it, about 1/n of which were its own.

    Examples
    --------
    >>> str(Aligned()), str(Aligned(0.3))
    ('aligned', 'aligned:0.3')
    """

    name: ClassVar[str] = "aligned"
    forms: ClassVar[str] = "'aligned', 'aligned:Q' (Q in [0, 1])"
    needs_holders: ClassVar[bool] = True
    preferred_caching: ClassVar[str] = "even"
    can_weigh: ClassVar[bool] = True

    fraction: float = 1.0

    def __post_init__(self) -> None:
        as_ratio("assignment.fraction", self.fraction, Fraction(0))
        object.__setattr__(self, "fraction", float(self.fraction))

    def __str__(self) -> str:
        return "aligned" if self.fraction == 1 else f"aligned:{self.fraction}"

    def most_drawn(self, n_samples: int, n_workers: int) -> int:
        """Largest number of samples that a worker gets from the draw.

        Examples
        --------
        >>> Aligned().most_drawn(1001, 10), Aligned(0.1).most_drawn(1001, 10)
        (101, 11)
        """
        if self.fraction == 1:
            return -(-n_samples // n_workers)
        return Partial(self.fraction).n_exchanged(n_samples, n_workers)

    @classmethod
    def parse(cls, parameter: str | None) -> Self:
        return cls() if parameter is None else cls(float(parameter))

    @property
    def shuffled_fraction(self) -> float:
        """Q."""
        return self.fraction

    @property
    def redraws_all(self) -> bool:
        return self.fraction == 1

    def least_share(self, n_samples: int, n_workers: int) -> int:
        """Below Q = 1, every rank puts as many samples into the draw."""
        return 1 if self.fraction == 1 else max(1, self.most_drawn(n_samples, n_workers))

    def most_incoming(self, n_samples: int, n_workers: int, largest_share: int) -> int:
        return largest_share if self.fraction == 1 else self.most_drawn(n_samples, n_workers)

    def draw(self, draw: Draw) -> EpochDraw:
        if draw.holders is None:
            raise InvalidParameter.of("holders", None, "the holder masks, which the assignment 'aligned' needs")
        n_workers = draw.n_workers
        if self.fraction == 1:
            pool = np.arange(draw.n_samples)
            if draw.weights:
                room = share_sizes(draw.n_samples, draw.weights)
            else:
                room = balanced_sizes(draw.n_samples, n_workers, "aligned", draw.seed, draw.epoch)
        else:
            count = self.most_drawn(draw.n_samples, n_workers)
            order, offsets = group_by(draw.previous, n_workers)
            owns = [order[offsets[rank] : offsets[rank + 1]] for rank in range(n_workers)]
            pool = np.concatenate(
                [choose(own, count, "aligned", draw.seed, draw.epoch, rank) for rank, own in enumerate(owns)]
            )
            room = np.full(n_workers, count)
        assigned = draw_aligned(draw.holders[pool], room, draw.seed, draw.epoch)
        ranks = draw.previous.copy()
        ranks[pool] = assigned.destinations
        senders = np.full(len(assigned.offsets) - 1, SERVER, dtype=np.int32)
        packets = Packets(assigned.offsets, pool[assigned.members], assigned.destinations[assigned.members], senders)
        return EpochDraw(ranks, packets)
