"""Times very short exchanges in a separate session: the part of an exchange that does not depend on what it moves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from distributed import Client

from dshuffle.errors import CacheBudgetError, ClusterError, InvalidParameter
from dshuffle.planning import Choices, Remainder
from dshuffle.runtime.client.cluster_view import is_adaptive, resolved_choice
from dshuffle.runtime.client.open_session import OpenSession, new_id
from dshuffle.runtime.client.session_client import install_plugin
from dshuffle.runtime.dataset_inputs import resolved
from dshuffle.runtime.measure.task_results import task_results
from dshuffle.runtime.messages import EpochExchange
from dshuffle.runtime.session_options import SessionOptions
from dshuffle.runtime.session_spec import DatasetReference, SessionRequest
from dshuffle.runtime.settings import Settings
from dshuffle.store import Dataset
from dshuffle.store.blank import blank_dataset

ROWS_PER_PAIR = 16
"""Rows, of one byte each, that every worker has for every other one. With fewer, some pairs would have none."""

LEAST_EXCHANGES, MOST_EXCHANGES = 5, 15
"""How many exchanges of each kind are timed. The median counts."""


@dataclass(frozen=True, slots=True)
class ShortExchanges:
    """What two kinds of short exchanges took, in seconds.

    Parameters
    ----------
    empty
        An epoch in which no rows move: the order to begin, what workers prepare, and their votes.
    short
        An exchange of one short message from every worker to every other one.
    """

    empty: float
    short: float

    def message_seconds(self, messages: float) -> float:
        """Return what a message adds to an exchange, of which a processor handles this many in a short one.

        Examples
        --------
        >>> round(ShortExchanges(empty=0.010, short=0.018).message_seconds(4.0), 6)
        0.002
        """
        return max(0.0, self.short - self.empty) / messages


def time_short_exchanges(client: Client, workers: Sequence[str], server: str | None, seconds: float) -> ShortExchanges:
    """Time short exchanges of at least two workers, and of a dedicated server, for about some seconds.

    Raises
    ------
    ClusterError
        If one of the workers has left or is paused, or has no room for a few rows.
    """
    exchanges: list[EpochExchange] = []
    session = _opened(client, workers, server, blank_dataset(ROWS_PER_PAIR * len(workers) ** 2))
    try:
        ends = time.perf_counter() + seconds
        for epoch in range(2 * MOST_EXCHANGES + 3):
            exchanges.append(session.calls.ask(EpochExchange, "advance", epoch=epoch))
            if epoch % 2 == 0 and epoch // 2 > LEAST_EXCHANGES and time.perf_counter() >= ends:
                break
            session.calls.tell("prefetch")
            # Tasks are submitted while an exchange begins, and take time of the scheduler and of the workers.
            task_results(client, [client.submit(len, "", workers=[worker], pure=False) for worker in workers], workers)
    finally:
        session.close()
    # The first exchange opens connections.
    empty, short = exchanges[3::2], exchanges[4::2]
    medians = (statistics.median(exchange.exchange_seconds for exchange in kind) for kind in (empty, short))
    return ShortExchanges(*medians)


def _opened(client: Client, workers: Sequence[str], server: str | None, dataset: Dataset) -> OpenSession:
    """Open a session of all these workers in which every second epoch has an exchange."""
    options = SessionOptions(workers=tuple(workers), server=server, on_loss="raise")
    choices = resolved(dataset, Choices(every=2))
    install_plugin(client)
    lost = "a worker was lost while the cluster was measured"
    try:
        choice = resolved_choice(client, options)
    except InvalidParameter as error:  # these workers were there at the start
        raise ClusterError(f"{lost}: {error}") from error
    request = SessionRequest(
        session_id=new_id(),
        client_id=client.id,
        dataset=DatasetReference.of(dataset),
        choices=choices,
        deliveries={choices.delivery: 0.0},
        options=options,
        settings=Settings.from_config(adaptive=is_adaptive(client)),
        start=Remainder(0, ()),
        choice=choice,
    )
    try:
        session = OpenSession(client, request)
    except CacheBudgetError as error:
        raise ClusterError(f"short exchanges cannot be measured: {error}") from error
    if session.n_workers != len(workers):
        session.close()
        raise ClusterError(f"{lost}, or is paused: {session.n_workers} of {len(workers)} take part in short exchanges")
    return session
