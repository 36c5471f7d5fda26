"""Which values and pairs of values of schedules have been covered."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

from .schedule import Schedule

Value = tuple[str, str]
MANY = 5_000
"""Seeds whose schedules say what is possible. They are only drawn."""


class Coverage:
    """Counts values of schedules, and pairs of them."""

    def __init__(self) -> None:
        self.values: Counter[Value] = Counter()
        self.pairs: Counter[tuple[Value, Value]] = Counter()

    def add(self, values: list[Value]) -> None:
        """Count a schedule; ``values`` are sorted."""
        self.values.update(values)
        self.pairs.update(itertools.combinations(values, 2))

    def update(self, other: Coverage) -> None:
        """Add what another process has counted."""
        self.values.update(other.values)
        self.pairs.update(other.pairs)

    def missing(self, possible: Coverage) -> list[Value]:
        """Values that have not been covered."""
        return sorted(possible.values.keys() - self.values.keys())

    def share_of_pairs(self, possible: Coverage) -> float:
        """Share of the pairs that have been covered."""
        return len(self.pairs.keys() & possible.pairs.keys()) / len(possible.pairs)

    def summary(self, possible: Coverage) -> str:
        """How much has been covered, in words."""
        n_values = len(possible.values) - len(self.missing(possible))
        missing = ", ".join(f"{aspect}: {value}" for aspect, value in self.missing(possible))
        return (
            f"{n_values} of {len(possible.values)} values, {100 * self.share_of_pairs(possible):.1f} % of "
            f"{len(possible.pairs)} pairs" + (f"; missing: {missing}" if missing else "")
        )


@functools.cache
def possible() -> Coverage:
    """What can be covered: schedules of many seeds, all of whose faults happen."""
    coverage = Coverage()
    for seed in range(MANY):
        schedule = Schedule.of(seed)
        coverage.add(schedule.values(schedule.faults))
    return coverage
