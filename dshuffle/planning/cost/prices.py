"""What the bytes and the requests of a job cost, where a provider charges for them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from dshuffle.planning.cost.cluster import ClusterRates, as_number
from dshuffle.planning.cost.loads_expected import first_load
from dshuffle.planning.cost.prediction import Prediction

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
    def of(cls, prices: Prices, prediction: Prediction, cluster: ClusterRates, epochs: int | None = None) -> Self:
        """The bill of a job on a cluster, from the prediction of an exchange.

        Samples that are read again after a fault are not in it, nor is what a server reads.

        Examples
        --------
        >>> from dshuffle.planning import Choices
        >>> from dshuffle.planning.cost import ClusterRates, Work, predict
        >>> cluster = ClusterRates(4, link_up=1e8, link_down=1e8)
        >>> work = Work(1_000_000, 1000, Choices("global", every=2), chunk_rows=100)
        >>> prediction = predict(cluster, work, precision="closed")
        >>> bill = Bill.of(Prices(egress=0.1, worker_egress=0.01), prediction, cluster, epochs=11)
        >>> round(bill.load, 4), round(bill.epoch, 6), round(bill.run, 4)
        (0.1075, 0.003765, 0.1452)
        """
        exchange = prices.of(
            egress_bytes=prediction.server_egress + prediction.storage_bytes,
            worker_bytes=prediction.worker_egress,
            requests=prediction.requests,
        )
        first = first_load(prediction.work, cluster)
        load = prices.of(
            egress_bytes=float(first.read.sum()),
            worker_bytes=float(first.worker_out.sum()),
            requests=float(first.requests.sum()),
        )
        epochs_with_one = None if epochs is None else len(prediction.work.choices.exchange_epochs.after(0, epochs - 1))
        run = None if epochs_with_one is None else load + exchange * epochs_with_one
        return cls(load, exchange / prediction.work.choices.every, run)

    def to_dict(self) -> dict[str, float | None]:
        """The amounts by name, as JSON can hold them."""
        return {f"price_of_{name}": value for name, value in dataclasses.asdict(self).items()}
