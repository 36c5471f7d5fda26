"""Exchanges of next to nothing, in a session of their own: what any exchange takes, whatever it moves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from distributed import Client

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
    # Sessions choose their delivery from measurements, so their modules import this one.
    from dshuffle.runtime.client.shuffler import Shuffler

    dataset = blank_dataset(ROWS_PER_PAIR * len(workers) ** 2)
    # Every second epoch has no exchange.
    with Shuffler(client, dataset, every=2, workers=workers, server=server, on_loss="raise") as shuffler:
        ends = time.perf_counter() + seconds
        for epoch in shuffler.epochs(2 * (MOST_EXCHANGES + 1) + 1):
            client.gather(epoch.map(len))
            pairs, rest = divmod(epoch.number, 2)
            if not rest and pairs > LEAST_EXCHANGES and time.perf_counter() >= ends:
                break
        records = shuffler.records[3:]  # the first exchange opens connections
    empty, short = (
        statistics.median(record.exchange_seconds for record in records if record.exchanged is exchanged)
        for exchanged in (False, True)
    )
    return ShortExchanges(empty, short)
