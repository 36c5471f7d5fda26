"""The delivery of each epoch of a session."""

from __future__ import annotations

from dshuffle.planning import AutoDelivery, ExchangeEpochs, get_delivery
from dshuffle.runtime.scheduler.machine.epochs import ATTEMPTS
from dshuffle.runtime.scheduler.machine.instructions import Run


class EpochDeliveries:
    """The delivery of each epoch. It is chosen once, because a retry may find the epoch already planned.

    Parameters
    ----------
    auto
        Chooses a delivery from the times of those before.
    first_epoch
        Number of the first epoch. It is read from the store, whatever its delivery.
    exchanges
        Which epochs have an exchange. The others have the delivery of the next one, and say nothing about its time.
    """

    def __init__(self, auto: AutoDelivery, first_epoch: int, exchanges: ExchangeEpochs) -> None:
        self._auto = auto
        self._first_epoch = first_epoch
        self._exchanges = exchanges
        self._chosen: dict[int, str] = {}
        self._has_server = True

    def lose_server(self) -> None:
        """Use deliveries that need no server from now on."""
        self._has_server = False

    def of(self, epoch: int) -> str:
        """Delivery of an epoch."""
        if epoch not in self._chosen:
            self._chosen = {planned: name for planned, name in self._chosen.items() if planned >= epoch - 2}
            self._chosen[epoch] = self._auto.choose()
        name = self._chosen[epoch]
        return name if self._has_server else get_delivery(name).without_server

    def of_run(self, run: Run) -> str:
        """Delivery of a run. The last attempt at an epoch may use another one."""
        name = self.of(run.epoch)
        last = run.epoch != self._first_epoch and run.attempt == ATTEMPTS
        return get_delivery(name).last_resort if last else name

    def observe(self, run: Run) -> None:
        """Note how long a run took. Repeated runs do not count, because they may have less to receive."""
        if not self._exchanges.has_exchange(run.epoch):
            return
        chosen = self._chosen.get(run.epoch)
        if run.epoch != self._first_epoch and run.attempt == 1 and chosen is not None and chosen == self.of(run.epoch):
            self._auto.observe(chosen, run.ready_after)
