"""``coded``: one sample of every column of an encoding table makes a packet (paper 000, Algorithms 1 to 3)."""

from __future__ import annotations

import numba
import numpy as np

from dshuffle.planning.delivery.encoding_tables import Tables
from dshuffle.planning.plan import Plan
from dshuffle.planning.types import Holders, Ranks


def plan_coded(holders: Holders, destinations: Ranks, n_workers: int, *, seed: int) -> Plan:
    """As many packets from the server for every encoding table as its longest column has samples.

    Its rate is that of Theorem 2 where the columns of a table are equally long, as they are for very many samples;
    otherwise the packets at the end of each table serve fewer and fewer workers.

    References
    ----------
    Paper 000, Algorithms 1 and 2. Algorithm 3, the decoding, is the peeling that
    :func:`~dshuffle.planning.check_plan` does: here every packet is decoded with cached samples alone.
    """
    tables = Tables.of(holders, destinations, n_workers)
    packet_of = np.empty(len(tables.samples), dtype=np.int64)
    n_packets = _encode(tables.columns, tables.starts, packet_of)
    return tables.plan(packet_of, n_packets, destinations)


@numba.njit(nogil=True, cache=True)
def _encode(columns, starts, packet_of):  # type: ignore[no-untyped-def]
    """Give every sample its packet and return how many there are (Algorithm 2)."""
    n_packets = 0
    for table in range(columns.size - 1):
        longest = 0
        for column in range(columns[table], columns[table + 1]):
            for i in range(starts[column], starts[column + 1]):
                packet_of[i] = n_packets + i - starts[column]
            longest = max(longest, starts[column + 1] - starts[column])
        n_packets += longest
    return n_packets
