"""The forwarder of a worker: receives bundles, and sends their rows on within its column of the grid."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from dshuffle.exchange.bundles import ForwardedRows
from dshuffle.exchange.endpoints import Meter, Network, RowSink, RowSource
from dshuffle.exchange.inbox import Inbox
from dshuffle.exchange.jobs import JobQueue
from dshuffle.exchange.receiver import Receiver
from dshuffle.exchange.sender import Sender
from dshuffle.planning.packets import STORE, forwarder_of

logger = logging.getLogger(__name__)


class Forwarder:
    """Forwards rows between other workers, in runs whose delivery has two hops.

    Requests for rows wait until all bundles are here, like requests for a run that has not begun. If a bundle cannot be
    fetched, the requests are refused, and the destinations read these rows from the store.

    Parameters
    ----------
    participant
        Its number as a participant.
    sender
        Sender of the forwarded rows.
    network, jobs
        Network of the session, and threads that keep bundles.
    timeout
        Seconds in which a request for a bundle must be answered.
    """

    def __init__(self, participant: int, sender: Sender, network: Network, jobs: JobQueue, *, timeout: float) -> None:
        self.sender = sender
        self.receiver = Receiver(
            Inbox(participant, window=1),
            network,
            jobs,
            store=STORE,
            report=self._received,
            timeout=timeout,
            open_gate=lambda run_id, gate: None,
        )
        self._rows: ForwardedRows | None = None
        self._at_most = self._answers = 1

    def begin(
        self, run_id: int, rows: ForwardedRows, *, requests: int, answers: int, at_most: int, resumed: bool
    ) -> None:
        """Start a run.

        Parameters
        ----------
        run_id
            Id of the run.
        rows
            Where the bundles go.
        requests, answers
            Maximum number of bundles requested at once, and of messages with their rows that are answered at once.
        at_most
            Maximum number of rows in a message to a destination.
        resumed
            Whether ``rows`` has bundles of the last run, which was aborted.
        """
        self._rows, self._at_most, self._answers = rows, at_most, answers
        self.sender.meter = Meter()
        sink: asyncio.Future[RowSink] = asyncio.get_running_loop().create_future()
        sink.set_result(rows)
        self.receiver.begin(run_id, rows.incoming, sink, window=requests, resumed=resumed)

    async def end(self) -> None:
        """End the run, finished or not. The caller of :meth:`begin` has the bundles."""
        self._rows = None
        self.sender.end()
        await self.receiver.abort()

    async def close(self) -> None:
        """End the run; no run will follow. The owner of the sender closes that one."""
        self._rows = None
        await self.receiver.close()

    def sit_out(self) -> None:
        """Measure nothing in a run whose rows take one hop."""
        self.sender.meter, self.receiver.meter = Meter(), Meter()

    def _received(self, run_id: int, reason: str | None, again: bool) -> None:
        rows = self._rows
        if rows is None:
            return
        if reason is not None:
            logger.warning("dshuffle: rows cannot be forwarded, and are read from the store: %s", reason)
            self.sender.refuse(run_id, reason)
            return
        source: asyncio.Future[RowSource] = asyncio.get_running_loop().create_future()
        source.set_result(rows)
        self.sender.begin(run_id, rows.outgoing(at_most=self._at_most), source, window=self._answers)


def with_forwarders(addresses: Mapping[int, str]) -> dict[int, str]:
    """Add the address of each rank's forwarder to the addresses of participants."""
    return dict(addresses) | {forwarder_of(rank): address for rank, address in addresses.items() if rank >= 0}
