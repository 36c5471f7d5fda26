"""Loads: bytes and counts that an epoch's exchange puts on each part of a cluster, independent of all rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from dshuffle.planning.types import Amounts

CHECKSUM_NBYTES = 4
"""Size in bytes of the checksum that is sent with each row."""


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Bytes and counts of one epoch's exchange. Arrays of shape ``(n,)`` are per worker.

    Parameters
    ----------
    needed, packets
        Number of samples that a worker lacks, and of packets sent to deliver them.
    server_out
        Bytes out of the server.
    encoded
        Bytes of rows that the server reads to encode packets.
    worker_out, worker_in
        ``(n,)`` bytes out of and into each worker for the exchange of rows.
    decoded
        ``(n,)`` bytes of packets and rows that each worker reads to decode its rows.
    read, requests
        ``(n,)`` bytes and number of objects that each worker reads from the storage.
    passed_on
        For the ring relay, the bytes that its second stage sends over a link; otherwise 0.
    needed_nbytes
        Bytes of the rows needed from the storage. ``read`` counts their whole chunks.
    """

    needed: float
    packets: float
    server_out: float
    encoded: float
    worker_out: Amounts
    worker_in: Amounts
    decoded: Amounts
    read: Amounts
    requests: Amounts
    passed_on: float = 0.0
    needed_nbytes: float = 0.0

    @property
    def amplification(self) -> float:
        """Bytes read from the storage per byte needed; 1 if none are needed."""
        return float(self.read.sum()) / self.needed_nbytes if self.needed_nbytes else 1.0

    @classmethod
    def none(cls, n_workers: int, *, packets: float = 0.0) -> Self:
        """No bytes at all."""
        workers = np.zeros(n_workers)
        return cls(0.0, packets, 0.0, 0.0, workers, workers, workers, workers, workers)

    def rows_received(self, row_nbytes: int) -> float:
        """Number of rows that workers receive from other participants."""
        return float(self.worker_in.sum()) / (row_nbytes + CHECKSUM_NBYTES)
