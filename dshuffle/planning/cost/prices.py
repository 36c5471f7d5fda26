"""What the bytes and the requests of a job cost, where a provider charges for them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Self

from dshuffle.planning.cost.cluster import as_number
from dshuffle.planning.cost.job import Work
from dshuffle.planning.cost.prediction import Prediction
from dshuffle.planning.delivery.storage import chunks_hit

GIGABYTE = 1e9
REQUESTS = 1000
"""Number of requests that a price is for, as providers state it."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in one currency, whichever it is.

    Parameters
    ----------
    egress
        Of a gigabyte (1e9 bytes) that leaves the store or the server, such as one in another region.
    worker_egress
        Of a gigabyte that leaves a worker, such as for another zone.
    requests
        Of 1,000 requests to the store.

    Raises
    ------
    InvalidParameter
        If one is not a finite number of at least 0.

    Examples
    --------
    >>> Prices(egress=0.09, requests=0.0004).of(egress_bytes=5e9, worker_bytes=1e9, requests=10_000)
    0.454
    """

    egress: float = 0.0
    worker_egress: float = 0.0
    requests: float = 0.0

    def __post_init__(self) -> None:
        for name in ("egress", "worker_egress", "requests"):
            object.__setattr__(self, name, as_number(f"prices.{name}", getattr(self, name), 0.0))

    def of(self, *, egress_bytes: float, worker_bytes: float, requests: float) -> float:
        """The price of so many bytes out of the store and the server, bytes out of workers, and requests."""
        gigabytes = (self.egress * egress_bytes + self.worker_egress * worker_bytes) / GIGABYTE
        return gigabytes + self.requests * requests / REQUESTS


@dataclass(frozen=True, slots=True)
class Bill:
    """What a job costs, in the currency of the prices.

    Parameters
    ----------
    load
        Loading the samples of the first epoch from the store.
    epoch
        Any later epoch, on average.
    run
        All epochs; None if their number is unknown.
    """

    load: float
    epoch: float
    run: float | None

    @classmethod
    def of(cls, prices: Prices, prediction: Prediction, n_workers: int, epochs: int | None = None) -> Self:
        """The bill of a job on a number of workers, from the prediction of an exchange.

        Samples that are read again after a fault are not in it, nor is what a server reads.

        Examples
        --------
        >>> from dshuffle.planning import Choices
        >>> from dshuffle.planning.cost import ClusterRates, Work, predict
        >>> cluster = ClusterRates(4, link_up=1e8, link_down=1e8)
        >>> work = Work(1_000_000, 1000, Choices("global", every=2), chunk_rows=100)
        >>> bill = Bill.of(Prices(egress=0.1, worker_egress=0.01), predict(cluster, work, precision="closed"), 4, 11)
        >>> round(bill.load, 4), round(bill.epoch, 6), round(bill.run, 4)
        (0.4, 0.003765, 0.4376)
        """
        exchange = prices.of(
            egress_bytes=prediction.server_egress + prediction.storage_bytes,
            worker_bytes=prediction.worker_egress,
            requests=prediction.requests,
        )
        read, requests = first_load(prediction.work, n_workers)
        load = prices.of(egress_bytes=read, worker_bytes=0.0, requests=requests)
        epochs_with_one = None if epochs is None else len(prediction.work.choices.exchange_epochs.after(0, epochs - 1))
        run = None if epochs_with_one is None else load + exchange * epochs_with_one
        return cls(load, exchange / prediction.work.choices.every, run)

    def to_dict(self) -> dict[str, float | None]:
        """The amounts by name, as JSON can hold them."""
        return {f"price_of_{name}": value for name, value in dataclasses.asdict(self).items()}


def first_load(work: Work, n_workers: int) -> tuple[float, float]:
    """Bytes and chunks that all workers read for the first epoch; each reads every chunk with a sample that it holds.

    Examples
    --------
    >>> from dshuffle.planning import Choices
    >>> work = Work(6400, 100, chunk_rows=64)
    >>> [round(figure) for figure in first_load(work, 4)], first_load(work.with_choices(sharding="contiguous"), 4)
    ([2560000, 400], (640000.0, 100.0))
    """
    rows, chunk_rows = work.alpha(n_workers) * work.n_samples, min(work.chunk_rows, work.n_samples)
    if work.excess(n_workers) == 0 and (work.in_chunks or work.choices.sharding == "contiguous"):
        return float(work.n_samples * work.row_nbytes), float(math.ceil(work.n_samples / chunk_rows))
    chunks = n_workers * chunks_hit(work.n_samples, chunk_rows, rows)
    return chunks * chunk_rows * work.row_nbytes, chunks
