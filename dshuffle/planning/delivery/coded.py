"""``coded``: packets of one sample from every column of an encoding table.

References
----------
Chung et al. (2017), Algorithms 1 to 3; see docs/papers.md. :func:`~dshuffle.planning.epoch_plan` does the decoding of
Algorithm 3. Here workers decode every packet with cached samples alone.
"""

from __future__ import annotations

import numpy as np

from dshuffle.kernels import kernel
from dshuffle.planning.delivery.definition import PlanInput
from dshuffle.planning.delivery.packets_from_server import (
    MOST_WORKERS,
    PacketsFromServer,
    Tables,
)
from dshuffle.planning.epoch_plan import Packets


def plan_coded(plan_input: PlanInput) -> Packets:
    """Plan as many packets from the server for every encoding table as its longest column has samples.

    The rate is that of Theorem 2 if the columns of a table are equally long, as they are for very many samples.
    Otherwise the packets at the end of each table serve fewer and fewer workers.
    """
    tables = Tables.of(plan_input.holders, plan_input.destinations, plan_input.n_workers)
    packet_of = np.empty(len(tables.samples), dtype=np.int64)
    n_packets = _encode(tables.columns, tables.starts, packet_of)
    return tables.plan(packet_of, n_packets, plan_input.destinations)


@kernel("(i8[::1], i8[::1], i8[::1])")
def _encode(columns, starts, packet_of):  # type: ignore[no-untyped-def]
    """Assign every sample to a packet and return the number of packets (Algorithm 2)."""
    n_packets = 0
    for table in range(columns.size - 1):
        longest = 0
        for column in range(columns[table], columns[table + 1]):
            for i in range(starts[column], starts[column + 1]):
                packet_of[i] = n_packets + i - starts[column]
            longest = max(longest, starts[column + 1] - starts[column])
        n_packets += longest
    return n_packets


class Coded(PacketsFromServer):
    """Packets of one sample from every column of an encoding table."""

    name = "coded"
    plan = staticmethod(plan_coded)
    most_workers = MOST_WORKERS


CODED = Coded()
