"""Workers on the same machine share its link. The cost model treats such a machine like a rack with a thin uplink."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedLinks:
    """The machines of a cluster, as far as their workers share links.

    Parameters
    ----------
    machine_workers
        Most workers on a machine.
    outside
        Fraction of a worker's peers that are on other machines; 0 if links are not shared equally.

    Examples
    --------
    >>> shared = SharedLinks.of({"a": "node1", "b": "node1", "c": "node2", "d": "node2"})
    >>> shared.machine_workers, round(shared.outside, 2), shared.exist
    (2, 0.67, True)
    >>> shared.oversubscription(link=100.0, received=75.0, limited=True)
    2.0
    """

    machine_workers: int
    outside: float

    @classmethod
    def of(cls, machines: Mapping[str, str]) -> SharedLinks:
        """From the machine of each worker. Machines with different numbers of workers count as sharing no links."""
        counts, n_workers = set(Counter(machines.values()).values()), len(machines)
        most = max(counts)
        return cls(most, (n_workers - most) / max(1, n_workers - 1) if len(counts) == 1 else 0.0)

    @property
    def exist(self) -> bool:
        """Whether there are links between machines that several workers share."""
        return self.machine_workers > 1 and self.outside > 0

    def oversubscription(self, link: float, received: float, *, limited: bool) -> float:
        """Rates that the workers of a machine could use one after the other, divided by the rate of its link.

        Parameters
        ----------
        link
            Bytes per second from a worker to one on another machine, without other traffic.
        received
            Bytes per second into a worker, from all others, while all workers exchange.
        limited
            Whether processors limited that exchange. Then the workers of a machine count as sharing one link.
        """
        if limited or not received:
            return float(self.machine_workers)
        return min(float(self.machine_workers), max(1.0, link / (received * self.outside)))


def pairs_between_machines(workers: Sequence[str], machines: Mapping[str, str], at_most: int) -> list[tuple[str, str]]:
    """Pairs of workers on different machines; of any workers if there is one machine.

    Examples
    --------
    >>> pairs_between_machines("abcd", {"a": "node1", "b": "node1", "c": "node2", "d": "node2"}, 2)
    [('a', 'c'), ('b', 'd')]
    >>> pairs_between_machines("abc", dict.fromkeys("abc", "node1"), 2)
    [('a', 'b'), ('b', 'c')]
    """
    if len({machines[worker] for worker in workers}) == 1:
        return list(itertools.islice(itertools.pairwise(workers), at_most))
    half = len(workers) // 2  # the workers of a machine are adjacent
    ahead = zip(workers, [*workers[half:], *workers[:half]], strict=True)
    return list(
        itertools.islice(
            ((worker, partner) for worker, partner in ahead if machines[worker] != machines[partner]), at_most
        )
    )
