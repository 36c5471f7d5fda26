"""What the cost model has to know of a job: the samples, and the way of shuffling them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from dshuffle.checks import as_integer, as_ratio
from dshuffle.errors import InvalidParameter
from dshuffle.planning.assignment import Assignment, Local, Partial, parse_assignment
from dshuffle.planning.caching import CACHINGS
from dshuffle.planning.cost.cluster import as_number
from dshuffle.planning.delivery import DELIVERIES, UNCODED
from dshuffle.planning.delivery.relay import RELAYS

CHUNKS = "chunks"
"""The assignment of whole chunks to random workers."""


@dataclass(frozen=True, slots=True)
class Work:
    """An epoch of a job.

    Parameters
    ----------
    n_samples
        Samples of the dataset.
    row_nbytes
        Bytes of a sample.
    cache_fraction
        Fraction of the samples that each worker holds, in [1/n, 1]; None for its share alone.
    chunk_rows
        Samples of a chunk; with several arrays, of the one that has the most bytes. A chunk is one request.
    assignment
        ``"local"``, ``"partial:Q"``, ``"global"``, ``"aligned"``, ``"aligned:Q"``, ``"chunks"``, or
        ``"chunks:ROWS"``, which moves groups of so many samples, whatever the chunks of the store.
    delivery, relay, caching
        As of :class:`~dshuffle.planning.ShufflePlanSpec`.
    training_seconds
        What the workers do with an epoch's samples while the next ones are exchanged; None if that is not known.

    Raises
    ------
    InvalidParameter
        Naming the parameter, its value and what is allowed.

    Examples
    --------
    >>> work = Work(100_000, 1024, assignment="partial:0.1")
    >>> work.kind, work.fraction, work.way
    ('partial', 0.1, 'partial:0.1 + peer')
    """

    n_samples: int
    row_nbytes: int
    cache_fraction: float | None = None
    chunk_rows: int = 64
    assignment: str = "global"
    delivery: str = "peer"
    relay: str = "pipelined"
    caching: str = "uniform"
    training_seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "assignment", str(parse_assignment(self.assignment)))
        for name in ("n_samples", "row_nbytes", "chunk_rows"):
            as_integer(name, getattr(self, name), 1)
        for name, known in (("delivery", DELIVERIES), ("relay", RELAYS), ("caching", CACHINGS)):
            if getattr(self, name) not in known:
                raise InvalidParameter.of(name, getattr(self, name), f"one of {sorted(known)}")
        if self.training_seconds is not None:
            as_number("training_seconds", self.training_seconds, 0.0)

    @property
    def kind(self) -> str:
        """The assignment without its Q."""
        return self.assignment.partition(":")[0]

    @property
    def fraction(self) -> float:
        """Q: the part of its share that every worker exchanges; 1 unless the assignment says otherwise."""
        return _fraction(parse_assignment(self.assignment))

    @property
    def group_rows(self) -> int:
        """Samples that ``chunks`` and ``chunks:ROWS`` move together; 1 of other assignments."""
        if self.kind != CHUNKS:
            return 1
        return min(self.n_samples, int(self.assignment.partition(":")[2] or self.chunk_rows))

    @property
    def coded(self) -> bool:
        """Whether the delivery XORs rows."""
        return self.delivery not in UNCODED

    @property
    def way(self) -> str:
        """Assignment, delivery and relay in one word for tables."""
        if self.kind == "local":
            return "local"
        relay = f", {self.relay}" if self.coded else ""
        return f"{self.assignment} + {self.delivery}{relay}"

    def alpha(self, n_workers: int) -> float:
        """The cache fraction of so many workers."""
        least = Fraction(1, n_workers)
        if self.cache_fraction is None:
            return float(least)
        hint = f"Each of the {n_workers} workers must hold its own share of the samples."
        return float(as_ratio("cache_fraction", self.cache_fraction, least, hint))

    def excess(self, n_workers: int) -> float:
        """The probability that a worker holds a sample which is not of its share.

        Examples
        --------
        >>> Work(1000, 8, cache_fraction=0.55).excess(10), Work(1000, 8).excess(10)
        (0.5, 0.0)
        """
        if n_workers == 1:
            return 0.0
        share = 1 / n_workers
        return max(0.0, round((self.alpha(n_workers) - share) / (1 - share), 15))


def _fraction(assignment: Assignment) -> float:
    match assignment:
        case Local():
            return 0.0
        case Partial():
            return assignment.fraction
    return float(getattr(assignment, "fraction", 1.0))
