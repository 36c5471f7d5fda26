"""Records of the epochs of a session, from what the scheduler measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dshuffle.planning import Choices, GivenSharding
from dshuffle.records import EpochRecord, Measures
from dshuffle.runtime.open_session import OpenSession
from dshuffle.store import Dataset


class EpochRecorder:
    """Collects the record of each epoch: its exchange is measured when it begins, its training when it ends.

    Parameters
    ----------
    dataset, choices
        The session's dataset and way of shuffling.
    """

    def __init__(self, dataset: Dataset, choices: Choices) -> None:
        self.records: list[EpochRecord] = []
        self._dataset = dataset
        self._choices = choices
        self._exchange: dict[str, Any] = {}

    @property
    def pending(self) -> bool:
        """Whether an epoch has begun that is not recorded yet."""
        return bool(self._exchange)

    def begin(self, exchange: Mapping[str, Any], session: OpenSession) -> None:
        """Note what was measured of the exchange of an epoch that begins, and the session that trains in it."""
        start = session.request.start
        self._exchange = {
            **exchange,
            "trained_before": start.total if start.epoch == exchange["epoch"] else 0,
            "n_workers": session.n_workers,
            "server": session.server,
            "first_epoch": start.epoch,
        }

    def end(self, training_seconds: list[float] | None) -> None:
        """Append the record of the current epoch, if it is not recorded yet.

        Parameters
        ----------
        training_seconds
            Seconds of training in the epoch, by rank; None if they are not known, and the epoch is not recorded.
        """
        measured, self._exchange = self._exchange, {}
        if not measured or training_seconds is None:
            return
        choices = dataclasses.replace(self._choices, delivery=measured.pop("delivery"))
        sharding = choices.sharding
        self.records.append(
            EpochRecord(
                choices=choices.by_name(),
                broadcast_samples=sharding.n_broadcast if isinstance(sharding, GivenSharding) else 0,
                n_samples=self._dataset.n_samples,
                row_nbytes=self._dataset.row_nbytes,
                training_seconds=max(training_seconds),
                **Measures.from_dict(measured.pop("measures")).to_dict(),
                **measured,
            )
        )
