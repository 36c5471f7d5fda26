"""What an epoch asks of a delivery."""

from __future__ import annotations

from dataclasses import dataclass

from dshuffle.planning.delivery.loads import CHECKSUM_NBYTES, Loads


@dataclass(frozen=True, slots=True)
class Demand:
    """A job, and how its plan relates to it. A large job is planned with fewer samples, and with at most 64 workers.

    Parameters
    ----------
    n_workers
        Number of workers of the plan.
    n_samples, row_nbytes, chunk_rows
        Number of samples in the dataset, bytes of a sample, and samples of a chunk of the store.
    relay
        How packets of several samples travel.
    in_chunks
        Whether whole chunks move.
    n_planned
        Number of samples that were planned.
    growth
        Rows that a worker receives in the job, for each row in the plan.
    fewer
        Packets for each sample in the job, divided by those in the plan.
    """

    n_workers: int
    n_samples: int
    row_nbytes: int
    chunk_rows: int
    relay: str
    in_chunks: bool
    n_planned: int
    growth: float
    fewer: float = 1.0

    @property
    def wire_nbytes(self) -> int:
        """Bytes of a row on a link."""
        return self.row_nbytes + CHECKSUM_NBYTES

    def no_loads(self, *, packets: float) -> Loads:
        """Loads of an exchange of this many packets, of which no part of the cluster has any yet."""
        return Loads.none(self.n_workers, packets=packets)
