"""How busy a host's processors are: a time that was measured without any idle ones says nothing about the network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Seconds that all processors of this host together have been idle, and have been at all, since it started."""

    idle: float
    total: float

    @classmethod
    def now(cls) -> ProcessorTimes:
        """Read the operating system's counters."""
        times = psutil.cpu_times()._asdict()
        waiting = times.get("iowait", 0.0)
        # Linux counts what guests take twice: as theirs, and as user time.
        total = sum(seconds for name, seconds in times.items() if not name.startswith("guest"))
        return cls(times["idle"] + waiting, total)

    def idle_since(self, before: ProcessorTimes) -> float:
        """The idle share of the time from ``before`` to now, in [0, 1].

        Examples
        --------
        >>> ProcessorTimes(idle=12.0, total=108.0).idle_since(ProcessorTimes(idle=10.0, total=100.0))
        0.25

        Counters tick a hundred times a second; where none has moved, nothing was seen to be busy:

        >>> now = ProcessorTimes(idle=12.0, total=108.0)
        >>> now.idle_since(now)
        1.0
        """
        passed = self.total - before.total
        return min(1.0, max(0.0, (self.idle - before.idle) / passed)) if passed > 0 else 1.0


def least_idle(watched: Iterable[tuple[float, float]]) -> float:
    """The idle share on the busiest host, of (seconds watched, idle share) of all members.

    Those that were done long before the others saw too little of an exchange: a server that sends nothing watches for
    some milliseconds, all of them busy with planning.

    Examples
    --------
    >>> least_idle([(2.0, 0.5), (1.8, 0.4), (0.01, 0.0)])
    0.4
    """
    seen = list(watched)
    longest = max(seconds for seconds, _ in seen)
    return min(idle for seconds, idle in seen if seconds >= longest / 2)
