"""Exchanges of next to nothing, in a session of their own: what any exchange takes, whatever it moves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from distributed import Client

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


def rehearse(client: Client, workers: Sequence[str], server: str | None, seconds: float) -> ShortExchanges:
    """Time short exchanges of at least two workers, and of a dedicated server, for about some seconds."""
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
    return ShortExchanges(*(statistics.median(each.exchange_seconds for each in kind) for kind in (empty, short)))


def _opened(client: Client, workers: Sequence[str], server: str | None, dataset: Dataset) -> OpenSession:
    """Open a session in which every second epoch has an exchange."""
    options = SessionOptions(workers=tuple(workers), server=server, on_loss="raise")
    choices = resolved(dataset, Choices(every=2))
    install_plugin(client)
    request = SessionRequest(
        session_id=new_id(),
        client_id=client.id,
        dataset=DatasetReference.of(dataset),
        choices=choices,
        deliveries={choices.delivery: 0.0},
        options=options,
        settings=Settings.from_config(adaptive=is_adaptive(client)),
        start=Remainder(0, ()),
        choice=resolved_choice(client, options),
    )
    return OpenSession(client, request)
