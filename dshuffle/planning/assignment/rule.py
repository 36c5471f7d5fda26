"""The interface of an assignment to the rest of dshuffle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from dshuffle.errors import PlanError
from dshuffle.planning.assignment.balance import Classes
from dshuffle.planning.assignment.slots import Blocks, Slots, WorkerChange
from dshuffle.planning.epoch_plan import Packets
from dshuffle.planning.exchange_epochs import Weights
from dshuffle.planning.types import Holders, Ranks, Samples


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """What the ranks of one epoch depend on."""

    # n_samples, n_workers, seed, epoch: Numbers of samples and workers, seed of the shuffle, and the epoch to draw.
    n_samples: int
    n_workers: int
    seed: int
    epoch: int
    # ``(q,)`` int32, the worker that trained on each sample in epoch ``epoch - 1``; None for rules that ``forget``.
    ranks_before: Ranks | None = None
    # ``(q, words)`` masks of who holds what in epoch ``epoch - 1``, for rules with ``needs_holders``.
    holders: Holders | None = None
    classes: Classes | None = None  # Classes to keep balanced, for rules with ``can_balance``.
    # ``(q,)`` int64, the samples in the slots of worker 0, then of worker 1, and so on, for rules with slots. None
    # means ascending samples.
    slots: Samples | None = None
    weights: Weights = ()  # Relative share of each rank, for rules with ``can_weigh``; none for equal shares.

    @property
    def previous(self) -> Ranks:
        """The ranks of the epoch before."""
        if self.ranks_before is None:
            raise PlanError("the assignment declares forgets = True, so draw.previous does not exist. Remove forgets")
        return self.ranks_before


@dataclass(frozen=True, slots=True, eq=False)
class EpochDraw:
    """The ranks of one epoch, and what was drawn with them."""

    ranks: Ranks  # ``(q,)`` int32, the worker that trains on each sample.
    # Perfect packets that deliver some of the samples that workers need, with ``aligned``.
    packets: Packets | None = None
    slots: Samples | None = None  # ``(q,)`` int64, the samples in the slots, for rules with slots.


class Assignment(ABC):
    """A rule for which worker trains on which sample in each epoch.

    Attributes
    ----------
    name
        What users call it, without a parameter.
    forms
        How it can be written, for error messages.
    moves
        Whether samples change workers.
    forgets
        Whether the ranks of an epoch do not depend on the epochs before. Sessions then draw any epoch at once, and
        ``draw`` gets no ``previous``. Without this declaration, a session that begins later draws all earlier epochs.
    needs_holders
        Whether the draw depends on who holds what.
    in_chunks
        Whether it moves whole chunks.
    preferred_caching
        The caching policy to use unless another one is chosen.
    can_weigh
        Whether it can draw unequal shares. :class:`dshuffle.planning.ShuffleSpec` refuses them otherwise.
    """

    __slots__ = ()

    name: ClassVar[str]
    forms: ClassVar[str]
    moves: ClassVar[bool] = True
    forgets: ClassVar[bool] = False
    needs_holders: ClassVar[bool] = False
    in_chunks: ClassVar[bool] = False
    preferred_caching: ClassVar[str] = "uniform"
    can_weigh: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, parameter: str | None) -> Self:
        """The rule with the parameter that followed its name, if any. Rules that have one override this method.

        Raises
        ------
        ValueError
            If it cannot be written like this.
        """
        if parameter is not None:
            raise ValueError(parameter)
        return cls()

    @abstractmethod
    def draw(self, draw: Draw) -> EpochDraw:
        """Draw the ranks of an epoch."""

    def blocks(self, n_samples: int, n_workers: int, seed: int, epoch: int, weights: Weights = ()) -> Blocks | None:
        """The ranks of an epoch from 1 as a function; None if they depend on the epoch before."""
        return None

    def slots(self, first: Blocks, seed: int, changes: Sequence[WorkerChange] = ()) -> Slots | None:
        """The samples in all slots as a function, from the ranks of epoch 0; None for rules without slots.

        Workers that stay keep their samples when workers change.
        """
        return None

    def first_blocks(
        self, sharding: object, n_samples: int, n_workers: int, seed: int, weights: Weights = ()
    ) -> Blocks | None:
        """The ranks of epoch 0 as a function; None if the sharding is given, or deals samples out in turn."""
        unit = self.unit_for(n_samples, n_workers)
        if sharding == "random":
            return Blocks.drawn(n_samples, n_workers, unit, "sharding", seed, weights=weights)
        return Blocks.contiguous(n_samples, n_workers, unit, weights) if sharding == "contiguous" else None

    @property
    def can_balance(self) -> bool:
        """Whether the rule can keep classes balanced."""
        return False

    def warning(self, n_workers: int) -> str:
        """What a user should know about this rule on this many workers; empty if nothing."""
        return ""

    @property
    def shuffled_fraction(self) -> float:
        """Q, the fraction of its share that every worker gives up and receives again; 1 for a draw over all samples."""
        return 1.0

    @property
    def redraws_all(self) -> bool:
        """Whether every epoch is a new draw over all single samples."""
        return self.forgets and not self.in_chunks

    @property
    def unit(self) -> int | None:
        """Samples that always have the same worker: 1, or the rows of a chunk; None if only a dataset tells."""
        return 1

    def with_unit(self, rows: int) -> Assignment:
        """The same rule with chunks of this many rows; a rule for single samples is left as it is."""
        return self

    def unit_for(self, n_samples: int, n_workers: int) -> int:
        """:attr:`unit`, once it is known and every worker gets one.

        Raises
        ------
        InvalidParameter
            If it is unknown, or there are fewer chunks than workers.
        """
        return 1

    def least_share(self, n_samples: int, n_workers: int) -> int:
        """Smallest number of samples that a rank must have."""
        return self.unit_for(n_samples, n_workers)

    def most_incoming(self, n_samples: int, n_workers: int, largest_share: int) -> int:
        """Largest number of samples that a worker can receive in one exchange."""
        return largest_share

    def missing_fraction(self, cached: float, excess: float) -> float:
        """Expected fraction of all samples whose new worker does not hold them.

        Parameters
        ----------
        cached
            Fraction of the samples that each worker holds.
        excess
            Probability that a worker holds a given sample outside its share.

        References
        ----------
        Chung et al. (2017), Theorem 1 (equation 1): ``q - s`` samples for a new draw over all of them, whatever the
        excess, since a worker holds any sample with probability s/q.
        """
        return self.shuffled_fraction * (1 - cached)
