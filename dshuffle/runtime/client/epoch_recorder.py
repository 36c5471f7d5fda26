"""Records of the epochs of a session, from what the scheduler measures."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from dshuffle.planning import Choices, GivenSharding
from dshuffle.records import EpochRecord
from dshuffle.runtime.client.open_session import OpenSession
from dshuffle.runtime.messages import EpochExchange, TrainingTime
from dshuffle.store import Dataset


class EpochRecords(list[EpochRecord]):
    """Records of the epochs that have ended."""

    __slots__ = ()

    def __getitem__(self, place: Any) -> Any:
        """A record, or a list of some."""
        try:
            return super().__getitem__(place)
        except IndexError:
            ended = {0: "no epoch has", 1: "only one epoch has"}.get(len(self), f"only {len(self)} epochs have")
            message = f"{ended} ended, and there is no record {place}. An epoch is recorded when the next one begins"
            raise IndexError(f"{message}, or the loop ends") from None


class EpochRecorder:
    """Collects the record of each epoch: its exchange is measured when it begins, its training when it ends.

    Parameters
    ----------
    dataset, choices
        The session's dataset and way of shuffling.
    """

    def __init__(self, dataset: Dataset, choices: Choices) -> None:
        self.records = EpochRecords()
        self._dataset = dataset
        self._choices = choices
        self._exchange: EpochExchange | None = None
        self._session: dict[str, Any] = {}
        self._requested_at = time.perf_counter()

    @property
    def pending(self) -> bool:
        """Whether an epoch has begun that is not recorded yet."""
        return self._exchange is not None

    def begin(self, exchange: EpochExchange, session: OpenSession, requested_at: float) -> None:
        """Note what was measured of the exchange of an epoch that begins, and the session that trains in it.

        ``requested_at`` is when the client asked for the epoch, by ``time.perf_counter()``.
        """
        self._requested_at = requested_at
        start = session.request.start
        self._exchange = exchange
        self._session = {
            "trained_before": start.total if start.epoch == exchange.epoch else 0,
            "n_workers": session.n_workers,
            "server": session.server,
            "first_epoch": start.epoch,
            "weights": session.history.weights,
        }

    def end(self, training: tuple[TrainingTime, ...] | None, ended: float) -> None:
        """Append the record of the current epoch, if it is not recorded yet.

        Parameters
        ----------
        training
            Time of training in the epoch, by rank; None if it is not known, and the epoch is not recorded.
        ended
            When its tasks had ended, by ``time.perf_counter()``.
        """
        exchange, self._exchange = self._exchange, None
        if exchange is None or training is None:
            return
        choices = dataclasses.replace(self._choices, delivery=exchange.delivery)
        sharding = choices.sharding
        self.records.append(
            EpochRecord(
                choices=choices.by_name(),
                broadcast_samples=sharding.n_broadcast if isinstance(sharding, GivenSharding) else 0,
                n_samples=self._dataset.n_samples,
                row_nbytes=self._dataset.row_nbytes,
                training_seconds=max(rank.seconds for rank in training),
                rank_training_seconds=tuple(rank.own for rank in training),
                epoch=exchange.epoch,
                run_id=exchange.run_id,
                needed=exchange.needed,
                packets=exchange.packets,
                components=exchange.components,
                exchange_seconds=exchange.exchange_seconds,
                waited_seconds=exchange.waited_seconds,
                epoch_seconds=ended - self._requested_at,
                **exchange.measures.to_dict(),
                **self._session,
            )
        )
