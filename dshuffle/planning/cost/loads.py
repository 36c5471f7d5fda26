"""What an epoch's exchange asks of each part of a cluster, in bytes; how fast the parts are plays no role here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dshuffle.planning.cost.cluster import Amounts

CHECKSUM_NBYTES = 4
"""Bytes that travel beside each row."""


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Bytes and counts of one epoch's exchange; ``(n,)`` arrays are of workers, ``(racks,)`` arrays of racks.

    Parameters
    ----------
    exact
        Whether they were counted in a real plan (of no fewer samples), not expected.
    needed, packets
        Samples that some worker lacks, and what is sent for them.
    server_out
        What leaves the server.
    encoded
        Bytes of rows that the server reads to make packets.
    worker_out, worker_in
        ``(n,)`` what leaves, and enters, each worker for the sake of others' rows.
    decoded
        ``(n,)`` bytes of packets and rows that each worker reads to take its rows out of packets.
    read, requests
        ``(n,)`` bytes, and objects, that each worker reads from the storage.
    rack_out, rack_in
        ``(racks,)`` what leaves, and enters, each rack, apart from the storage's.
    passed_on
        For a ring: what its second stage sends over a link, after the first one; otherwise 0.
    wanted
        Bytes of the rows that are read from the storage; ``read`` has their chunks.
    """

    exact: bool
    needed: float
    packets: float
    server_out: float
    encoded: float
    worker_out: Amounts
    worker_in: Amounts
    decoded: Amounts
    read: Amounts
    requests: Amounts
    rack_out: Amounts
    rack_in: Amounts
    passed_on: float = 0.0
    wanted: float = 0.0

    @property
    def amplification(self) -> float:
        """Bytes read from the storage for each byte wanted; 1 if nothing is."""
        return float(self.read.sum()) / self.wanted if self.wanted else 1.0


def nothing(n_workers: int, n_racks: int, *, exact: bool) -> dict[str, object]:
    """The arguments of loads of nothing at all, to fill in what there is."""
    zeros = np.zeros(n_workers)
    return {
        "exact": exact,
        "needed": 0.0,
        "packets": 0.0,
        "server_out": 0.0,
        "encoded": 0.0,
        **dict.fromkeys(("worker_out", "worker_in", "decoded", "read", "requests"), zeros),
        **dict.fromkeys(("rack_out", "rack_in"), np.zeros(n_racks)),
    }
