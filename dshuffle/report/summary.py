"""What a comparison found, and the figures of each way."""

from __future__ import annotations

import functools
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from dshuffle.errors import InvalidParameter
from dshuffle.noninferiority import PairedRuns
from dshuffle.planning import Choices
from dshuffle.records import EpochRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPoint:
    """Where training stood after an epoch.

    Parameters
    ----------
    seconds
        Since the fit began; loading the first epoch's samples included.
    error
        The quantity that training minimizes, over the whole dataset: for a regression the relative residual
        ``||X w - y|| / ||y||``.
    validation
        Metrics of the model after the epoch by name, where some were asked for.
    """

    epoch: int
    seconds: float
    error: float
    validation: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class WayResult:
    """One strategy: its choices, and for every epoch a record and a training point.

    Also the predicted time of an exchange, and how much of it links and the store take; the pairs of runs that compare
    it with reshuffling, by what the training averages ("gradients", "models" or "unknown"); whether it trains on a copy
    in random order, and how long it took to make that, if it was made for the comparison.
    """

    label: str
    choices: Choices
    records: tuple[EpochRecord, ...]
    history: tuple[TrainingPoint, ...]
    predicted_seconds: float | None = None
    predicted_wire_seconds: float | None = None
    pairs: Mapping[str, PairedRuns] = field(default_factory=dict)
    is_copy: bool = False
    copy_seconds: float | None = None

    @functools.cached_property
    def figures(self) -> Figures:
        """The strategy in numbers."""
        epochs = self.choices.exchange_epochs
        later = [record for record in self.records if not record.loaded]
        exchanged = [record for record in later if epochs.has_exchange(record.epoch)]
        between = [record for record in later if not epochs.has_exchange(record.epoch)]

        def mean(name: str) -> float | None:
            if not exchanged or (epochs.every > 1 and not between):
                return None
            found: float = statistics.median(getattr(record, name) for record in exchanged) / epochs.every
            if between:
                found += statistics.median(getattr(record, name) for record in between) * (1 - 1 / epochs.every)
            return found

        def reads(value: Callable[[EpochRecord], float | None]) -> float | None:
            """The median of epochs that read; None where most do not, such as those of a server that keeps rows."""
            found = [value(record) for record in exchanged if record.store_seconds > 0]
            values = [figure for figure in found if figure is not None]
            return statistics.median(values) if 2 * len(values) > len(exchanged) else None

        return Figures(
            **{name: mean(name) for name in MEANS},
            epoch_spread=Spread.of([record.epoch_seconds for record in exchanged]),
            shuffle_seconds=Spread.of([record.exchange_seconds for record in exchanged]),
            requests_per_second=reads(lambda record: record.store_requests / record.store_seconds),
            read_amplification=reads(lambda record: record.read_amplification),
        )

    @property
    def limited_by_processors(self) -> bool:
        """Whether processors rather than links or the store limit the exchanges.

        They were busy, and the links and the store by themselves take less than half of the time, as far as is known.
        """
        of = self.figures
        if of.cpu_idle is None or of.cpu_idle >= CPU_BOUND or of.shuffle_seconds is None or of.needed == 0:
            return False
        return self.predicted_wire_seconds is None or self.predicted_wire_seconds < of.shuffle_seconds.median / 2


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """All strategies that were run, and what is needed to run them again.

    Parameters
    ----------
    ways
        In the order they were run.
    settings
        Settings of the training by name, such as the step. Shared by all strategies.
    command
        The command line, as it can be typed again.
    dataset, cluster, versions, machine
        Facts by name, as JSON can hold them.
    emulated
        What was emulated (links, stores), in words; empty if nothing was.
    error_meaning
        What the error of a training point is, in words.
    averages
        What the training that was timed averages: ``"gradients"`` in every step, ``"models"`` once an epoch, or
        ``"unknown"``.
    error_at_start
        Error before the first epoch, if it is known.
    """

    ways: tuple[WayResult, ...]
    seed: int
    command: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    dataset: Mapping[str, Any] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    emulated: str = ""
    error_meaning: str = "the error that the training function reports"
    averages: str = "unknown"
    error_at_start: float | None = None

    def __post_init__(self) -> None:
        labels = [way.label for way in self.ways]
        if len({*labels}) < len(labels):
            raise InvalidParameter.of("ways", labels, "strategies with different labels")

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(f'“{way.label}”' for way in self.ways)}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, least and greatest of some epochs."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """Summarise values, if there are any."""
        return cls(median=statistics.median(values), least=min(values), greatest=max(values)) if values else None


MEANS = (
    *("epoch_seconds", "training_seconds", "waited_seconds", "needed", "packets", "wire_bytes", "server_sent_bytes"),
    *("store_bytes", "store_requests", "cpu_idle"),
)
"""Figures that are means of what records have by the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A strategy in numbers: medians of the epochs after the first, which is loaded and not exchanged.

    ``epoch_seconds`` is wall time; see :class:`~dshuffle.records.EpochRecord`. If only every K-th epoch has an
    exchange, ``epoch_spread`` and seconds of exchanges are those of such epochs. All other figures are means
    per epoch: a K-th of the median of such epochs, and the rest from the median of the other ones.
    ``None`` stands where a strategy ran for too few epochs to tell.
    """

    epoch_seconds: float | None
    epoch_spread: Spread | None
    shuffle_seconds: Spread | None
    training_seconds: float | None
    waited_seconds: float | None
    needed: float | None
    packets: float | None
    wire_bytes: float | None
    server_sent_bytes: float | None
    store_bytes: float | None
    store_requests: float | None
    requests_per_second: float | None
    read_amplification: float | None
    cpu_idle: float | None


CPU_BOUND = 0.15
"""With a smaller share of idle processors, a time says nothing about the network or the store."""


def has_errors(comparison: Comparison) -> bool:
    """Whether a function that trains has reported an error after some epoch."""
    return any(math.isfinite(point.error) for way in comparison.ways for point in way.history)


FACTS = ("command", "seed", "settings", "dataset", "cluster", "versions", "machine", "emulated", "averages")
PREDICTIONS = ("predicted_seconds", "predicted_wire_seconds", "copy_seconds")
"""What a summary has of a comparison, and of a strategy, beside its figures."""


def to_dict(comparison: Comparison, story: Sequence[str]) -> dict[str, Any]:
    """Everything in a comparison except the epoch records, as ``summary.json`` and ``--json`` have it."""
    ways = [
        {
            "label": way.label,
            **way.choices.to_dict(),
            "figures": asdict(way.figures),
            **{name: getattr(way, name) for name in PREDICTIONS},
            "history": [asdict(point) for point in way.history],
            "pairs": {name: runs.to_dict() for name, runs in way.pairs.items()},
        }
        for way in comparison.ways
    ]
    facts = {name: getattr(comparison, name) for name in FACTS}
    answer: dict[str, Any] = finite({"answer": story[0], "verdict": " ".join(story), **facts, "ways": ways})
    return answer


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: what never happens, and an error that is not a number, is None."""
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_folder(folder: str | Path) -> None:
    """Make the folder of a report before a long run, and the folders above it. It must allow new files."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def records_of(label: str, records: Iterable[EpochRecord], points: Iterable[TrainingPoint]) -> Iterator[str]:
    """A line of JSON for each epoch of a strategy: its label as ``way``, the record's fields, and what training said.

    An epoch whose error or validation metrics are known has them as ``error`` and ``validation``.
    """
    by_epoch = {point.epoch: point for point in points}
    for record in records:
        fields = {"way": label, **record.to_dict()}
        if (point := by_epoch.get(record.epoch)) is not None:
            fields |= finite({"error": point.error} | ({"validation": point.validation} if point.validation else {}))
        yield json.dumps(fields)
