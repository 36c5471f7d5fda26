"""What an epoch asks of a delivery: the rows that each worker lacks, and where the workers are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dshuffle.planning.delivery.holder_sets import HolderSets
from dshuffle.planning.delivery.loads import CHECKSUM_NBYTES, Loads
from dshuffle.planning.types import Amounts


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What an epoch asks of a delivery, on average over all draws.

    Parameters
    ----------
    n_samples, row_nbytes, chunk_rows
        Number of samples in the dataset, bytes of a sample, and samples of a chunk of the store.
    group_rows
        Samples that move together.
    relay
        How packets of several samples travel.
    needed
        Number of samples that workers lack, all together.
    shares
        ``(n,)`` samples that each worker lacks.
    groups
        ``(n,)`` groups that each worker is assigned and that were not in its share before; None if samples move singly.
    excess
        Probability that a worker holds a sample outside its share.
    sets_of
        Number of needed samples -> distribution of their holders.
    racks, n_racks
        ``(n,)`` int64, the rack of each worker, and the number of racks.
    """

    n_samples: int
    row_nbytes: int
    chunk_rows: int
    group_rows: int
    relay: str
    needed: float
    shares: Amounts
    groups: Amounts | None
    excess: float
    sets_of: Callable[[float], HolderSets]
    racks: NDArray[np.int64]
    n_racks: int

    @property
    def n_workers(self) -> int:
        """Number of workers."""
        return len(self.racks)

    @property
    def wire_nbytes(self) -> int:
        """Bytes of a row on a link."""
        return self.row_nbytes + CHECKSUM_NBYTES

    @property
    def rack_sizes(self) -> NDArray[np.int64]:
        """``(racks,)``, number of workers in each rack."""
        return np.bincount(self.racks, minlength=self.n_racks)

    def growth(self, n_planned: int) -> float:
        """Number of samples of the job for each sample of a plan of ``n_planned`` samples."""
        return self.n_samples / n_planned

    def no_loads(self, *, exact: bool, packets: float) -> Loads:
        """Loads of an exchange of this many packets, of which no part of the cluster has any yet."""
        return Loads.none(self.n_workers, self.n_racks, exact=exact, needed=self.needed, packets=packets)
