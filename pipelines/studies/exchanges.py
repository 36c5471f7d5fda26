"""Exchanges alone: any way of shuffling a dataset, with tasks that only sleep."""

from __future__ import annotations

import time

from distributed import Client

from dshuffle import Dataset, EpochRecord, Shuffler
from dshuffle.compare import Way


def measure_exchanges(
    client: Client, dataset: Dataset, way: Way, *, epochs: int, training_seconds: float
) -> list[EpochRecord]:
    """Records of the exchanges of a way of shuffling, beside tasks that only sleep."""
    with Shuffler(client, dataset, **way.choices.keywords()) as shuffler:
        for epoch in shuffler.epochs(epochs + 1):
            for task in epoch.map(lambda _: time.sleep(training_seconds)):
                task.result()
    return shuffler.records[1:]
