"""Records of the epochs of a session, from what the scheduler measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dshuffle.planning import Choices, GivenSharding
from dshuffle.records import EpochRecord, Measures
from dshuffle.store import Dataset


class EpochRecorder:
    """Collects the record of each epoch: its exchange is measured when it begins, its training when it ends.

    Parameters
    ----------
    dataset, choices
        The session's dataset and way of shuffling.
    n_workers
        Number of workers that train.
    first_epoch
        Number of the first epoch.
    """

    def __init__(self, dataset: Dataset, choices: Choices, n_workers: int, first_epoch: int) -> None:
        self.records: list[EpochRecord] = []
        self._dataset = dataset
        self._choices = choices
        self._n_workers = n_workers
        self._first_epoch = first_epoch
        self._exchange: dict[str, Any] = {}

    @property
    def pending(self) -> bool:
        """Whether an epoch has begun that is not recorded yet."""
        return bool(self._exchange)

    def begin(self, exchange: Mapping[str, Any]) -> None:
        """Note what was measured of the exchange of an epoch that begins."""
        self._exchange = dict(exchange)

    def drop(self) -> None:
        """Do not record the current epoch."""
        self._exchange = {}

    def end(self, training_seconds: list[float], server: str) -> None:
        """Append the record of the current epoch, if it is not recorded yet.

        Parameters
        ----------
        training_seconds
            Seconds of training in the epoch, by rank.
        server
            Role of the server: ``"dedicated"``, ``"beside rank 0"``, or empty if there is none.
        """
        measured, self._exchange = self._exchange, {}
        if not measured:
            return
        choices = dataclasses.replace(self._choices, delivery=measured.pop("delivery"))
        sharding = choices.sharding
        self.records.append(
            EpochRecord(
                choices=choices.by_name(),
                broadcast_samples=sharding.n_broadcast if isinstance(sharding, GivenSharding) else 0,
                n_workers=self._n_workers,
                n_samples=self._dataset.n_samples,
                row_nbytes=self._dataset.row_nbytes,
                server=server,
                first_epoch=self._first_epoch,
                training_seconds=max(training_seconds),
                **Measures.from_dict(measured.pop("measures")).to_dict(),
                **measured,
            )
        )
