"""What the bytes of a job cost, where a provider charges for what leaves the store or the server."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from dshuffle.planning.cost.cluster import ClusterRates, as_number
from dshuffle.planning.cost.loads_expected import first_load
from dshuffle.planning.cost.prediction import Prediction

GIGABYTE = 1e9


@dataclass(frozen=True, slots=True)
class Bill:
    """What a job costs, in the currency of the price.

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
    def of(cls, egress_price: float, prediction: Prediction, cluster: ClusterRates, epochs: int | None = None) -> Self:
        """The bill of a job, from the price of a gigabyte (1e9 bytes) that leaves the store or the server.

        What a server reads is not in it, nor what is read again after a fault.

        Raises
        ------
        InvalidParameter
            If the price is not a finite number of at least 0.

        Examples
        --------
        >>> from dshuffle.planning import Choices
        >>> from dshuffle.planning.cost import ClusterRates, Work, predict
        >>> cluster = ClusterRates(4, link_up=1e8, link_down=1e8, server_up=1e8)
        >>> work = Work(1_000_000, 1000, Choices("global", "server", every=2), chunk_rows=100)
        >>> bill = Bill.of(0.1, predict(cluster, work), cluster, epochs=11)
        >>> round(bill.load, 2), round(bill.epoch, 3), round(bill.run, 2)
        (0.1, 0.038, 0.48)
        """
        price = as_number("egress_price", egress_price, 0.0) / GIGABYTE
        exchange = price * (prediction.server_egress + prediction.storage_bytes)
        load = price * float(first_load(prediction.work, cluster).read.sum())
        epochs_with_one = None if epochs is None else len(prediction.work.choices.exchange_epochs.after(0, epochs - 1))
        run = None if epochs_with_one is None else load + exchange * epochs_with_one
        return cls(load, exchange / prediction.work.choices.every, run)

    def to_dict(self) -> dict[str, float | None]:
        """The amounts by name, as JSON can hold them."""
        return {f"price_of_{name}": value for name, value in dataclasses.asdict(self).items()}
