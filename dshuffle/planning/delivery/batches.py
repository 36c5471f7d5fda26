"""When the batches of a relay arrive, and what is left to pass on then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """The batches of a worker that relays packets. It passes on a batch once all of it has arrived.

    Parameters
    ----------
    sent
        ``(K,)`` float64. Fraction of all packets that the server has sent when batch k has arrived, if all workers get
        their batches at the same time.
    left
        ``(K,)`` float64. Fraction of the packets that the worker has not begun to pass on until then: batch k and
        those after it.
    pauses
        Number of times that the server waits for workers to ask for their next batches.
    """

    sent: NDArray[np.float64]
    left: NDArray[np.float64]
    pauses: int = 0

    @classmethod
    def of(cls, sizes: Sequence[int] | NDArray[np.integer], at_a_time: int = 1) -> Self:
        """Return the batches of these numbers of packets, of which the server sends several at a time to each worker.

        Batches that are sent at a time share the link, so each arrives later than alone. If all workers have one at a
        time, the server pauses after each. With ``at_a_time=0``, requests of other workers wait already.

        Examples
        --------
        >>> batches = Batches.of([5, 3, 2])
        >>> batches.sent, batches.left, batches.pauses
        (array([0.5, 0.8, 1. ]), array([1. , 0.5, 0.2]), 2)
        >>> Batches.of([5, 3, 2], at_a_time=2).sent
        array([0.8, 1. , 1. ])
        """
        parts = np.asarray(sizes) / np.sum(sizes)
        until = np.cumsum(parts)
        places = np.minimum(np.arange(len(parts)) + max(1, at_a_time) - 1, len(parts) - 1)
        return cls(until[places], 1 - until + parts, len(parts) - 1 if at_a_time == 1 else 0)

    def seconds(self, server: float, to_others: float, from_others: float, from_server: float) -> float:
        """Return how long an exchange takes at least.

        After each batch has arrived, all that is left has to go through the links of the worker.

        Parameters
        ----------
        server
            Seconds in which the server sends all packets.
        to_others, from_others
            Seconds in which the links of a worker pass what it sends to other workers, and receives from them.
        from_server
            Seconds in which the link into a worker passes what the server sends to it.

        Examples
        --------
        >>> Batches.of([5, 3, 2]).seconds(server=1.0, to_others=0.5, from_others=0.6, from_server=0.25)  # the first one
        1.225
        """
        arriving = self.left * from_others + (1 - self.sent) * from_server
        return float((self.sent * server + np.maximum(self.left * to_others, arriving)).max())
