"""Idle time of a host's processors. If no processor was idle, a measured time does not describe the network."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class ProcessorTimes:
    """Idle, total and stolen processor seconds of this host since it started, summed over all processors.

    Stolen time was used by other virtual machines.
    """

    idle: float
    total: float
    stolen: float = 0.0

    @classmethod
    def now(cls) -> ProcessorTimes:
        """Read the operating system's counters."""
        times = psutil.cpu_times()._asdict()
        waiting = times.get("iowait", 0.0)
        # Linux counts the time of guests twice: as guest time and as user time.
        total = sum(seconds for name, seconds in times.items() if not name.startswith("guest"))
        return cls(times["idle"] + waiting, total, times.get("steal", 0.0))

    @property
    def used(self) -> float:
        """Seconds that this host itself used its processors."""
        return self.total - self.idle - self.stolen

    def idle_since(self, before: ProcessorTimes) -> float:
        """Idle fraction of the time from ``before`` to now, in [0, 1].

        Examples
        --------
        >>> ProcessorTimes(idle=12.0, total=108.0).idle_since(ProcessorTimes(idle=10.0, total=100.0))
        0.25

        Counters tick a hundred times per second. If none has changed, the processors count as idle:

        >>> now = ProcessorTimes(idle=12.0, total=108.0)
        >>> now.idle_since(now)
        1.0
        """
        passed = self.total - before.total
        return min(1.0, max(0.0, (self.idle - before.idle) / passed)) if passed > 0 else 1.0
