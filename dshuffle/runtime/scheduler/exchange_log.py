"""What the exchanges of a session moved and took, from what participants report with each commit."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from dshuffle.planning import SERVER, get_delivery, name_of
from dshuffle.runtime.messages import EpochExchange, Report
from dshuffle.runtime.scheduler.machine.instructions import Run
from dshuffle.runtime.scheduler.machine.votes import Totals
from dshuffle.runtime.scheduler.participants import Participants
from dshuffle.runtime.scheduler.reports import combined_reports, next_rate, rate_of

KEPT = 200
"""Epochs that a session keeps measurements of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """What one participant received from another one in an exchange, from its first request to the last answer."""

    receiver: str
    sender: str
    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds if self.seconds else 0.0


class ExchangeLog:
    """The last exchanges of a session.

    Parameters
    ----------
    participants
        The workers of the session.
    n_workers
        Number of ranks.
    """

    def __init__(self, participants: Participants, n_workers: int) -> None:
        self.exchanges: deque[EpochExchange] = deque(maxlen=KEPT)
        self.links: tuple[LinkFigures, ...] = ()  # of the last exchange
        self.n_held: dict[int, int] = {}  # samples that each rank holds
        self.rate: float | None = None  # of links into workers, in bytes per second
        self.client_asked = 0.0  # when the client began to wait for the epoch
        self._participants = participants
        self._n_workers = n_workers

    def add(
        self, run: Run, reports: Mapping[int, Report], participants: tuple[int, ...], delivery: str
    ) -> EpochExchange:
        """Add the exchange of a run, from the reports of the participants that have swapped to its epoch."""
        combined = combined_reports(reports, participants)
        self.links = tuple(
            LinkFigures(receiver=name_of(receiver), sender=name_of(sender), nbytes=nbytes, seconds=seconds)
            for receiver, report in sorted(reports.items())
            for sender, (nbytes, seconds) in sorted(report.links.items())
        )
        self.n_held = {rank: report.held for rank, report in reports.items() if rank != SERVER}
        if get_delivery(delivery).shows_link_rates:
            self.rate = next_rate(self.rate, rate_of(combined.measured, combined.measures.cpu_idle))
        totals = Totals.of(run.votes.values())
        exchange = EpochExchange(
            epoch=run.epoch,
            run_id=run.run_id,
            delivery=delivery,
            needed=totals.needed,
            packets=totals.packets,
            components=totals.expected,
            exchange_seconds=run.ready_after,
            waited_seconds=max(0.0, run.started + run.ready_after - self.client_asked),
            measures=combined.measures,
            addresses=self._participants.snapshot,
            training_before=tuple(combined.training[: self._n_workers]),
        )
        self.exchanges.append(exchange)
        return exchange
