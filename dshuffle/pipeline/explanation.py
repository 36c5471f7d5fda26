"""What a pipeline will do: who holds and receives how much, and how long an exchange takes."""

from __future__ import annotations

import dataclasses
import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from dshuffle.compare import Way
from dshuffle.compare.comparison import predicted
from dshuffle.errors import InvalidParameter
from dshuffle.notebook import html_summary
from dshuffle.planning import ShuffleSpec
from dshuffle.planning.cost import ClusterRates, all_ways, recommend
from dshuffle.runtime.dataset_inputs import resolved
from dshuffle.runtime.measure.measurement import work_of
from dshuffle.runtime.memory import member_nbytes
from dshuffle.store import Dataset
from dshuffle.units import human_bytes, human_count, human_rate, human_seconds

ASSUMED_LINK = 125e6
"""Bytes per second of a worker's link in predictions for a cluster that was not measured: 1 Gbit/s."""

ASSUMED_STORAGE = 500e6
"""Bytes per second of the storage in such predictions, for all workers together."""

WORTH_SAYING = 0.8
"""Another way is mentioned if its exchange takes less than this part of the time."""

HEADINGS = ("way", "memory", "first load", "exchange", "seconds", "limited by")

CAPTION = (
    "memory: bytes that a worker needs. first load: bytes that all workers read. exchange: bytes that all workers "
    "receive before an epoch, and the seconds that it takes."
)

WIDTH = 80
"""Columns of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayExplanation:
    """What one way of shuffling costs.

    Parameters
    ----------
    label
        Name of the way.
    memory_nbytes
        Largest number of bytes of a worker's partition and plans.
    load_nbytes
        Bytes that all workers together read from the dataset for the first epoch.
    exchange_nbytes
        Expected bytes of rows that workers receive in an epoch, all together.
    exchange_seconds, bottleneck
        Predicted seconds of an exchange, and the busiest part of the cluster. None for ``auto``, which chooses later.
    """

    label: str
    memory_nbytes: int
    load_nbytes: int
    exchange_nbytes: float | None
    exchange_seconds: float | None
    bottleneck: str

    @property
    def cells(self) -> tuple[str, ...]:
        """Texts of a row of a table with :data:`HEADINGS`."""
        return (
            self.label,
            human_bytes(self.memory_nbytes),
            human_bytes(self.load_nbytes),
            human_bytes(self.exchange_nbytes),
            human_seconds(self.exchange_seconds),
            self.bottleneck or "-",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a pipeline will do. Its text has a table with a row for each way.

    Parameters
    ----------
    dataset, cluster, training
        Descriptions in words.
    n_workers
        Number of workers that train.
    ways
        What each way costs.
    notes
        Sentences: the rates that predictions assume, and what would be faster.
    """

    dataset: str
    cluster: str
    training: str
    n_workers: int
    ways: tuple[WayExplanation, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        table = Table(*HEADINGS, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
        table.columns[0].no_wrap = True
        for column in table.columns[1:-1]:
            column.justify, column.no_wrap = "right", True
        for way in self.ways:
            table.add_row(*way.cells)
        text = io.StringIO()
        Console(file=text, width=WIDTH).print(table)
        facts = [f"{name:<8}  {value}" for name, value in self._facts().items()]
        lines = [textwrap.fill(line, WIDTH, subsequent_indent=" " * 10, break_long_words=False) for line in facts]
        sentences = [textwrap.fill(note, WIDTH) for note in (CAPTION, *self.notes)]
        return "\n".join([*lines, "", text.getvalue().rstrip(), "", *sentences])

    def _repr_html_(self) -> str:
        rows = [way.cells for way in self.ways]
        return html_summary("Pipeline", {**self._facts(), "notes": " ".join(self.notes)}, HEADINGS, rows)

    def _facts(self) -> dict[str, str]:
        return {"dataset": self.dataset, "cluster": self.cluster, "training": self.training}


def explain(
    dataset: Dataset,
    ways: Sequence[Way],
    n_workers: int,
    *,
    cluster: str,
    training: str,
    rates: ClusterRates | None,
    on_disk: bool,
) -> Explanation:
    """Explain what training on a dataset with each of several ways does.

    Parameters
    ----------
    cluster, training
        Descriptions in words.
    rates
        Speed of the cluster. If None, links of 1 Gbit/s are assumed, and the notes say so.
    on_disk
        Whether partitions are on a local disk.
    """
    notes = []
    if rates is None:
        rates = ClusterRates(n_workers, ASSUMED_LINK, ASSUMED_LINK, server_up=ASSUMED_LINK, storage=ASSUMED_STORAGE)
        notes.append(
            f"The seconds assume links of {human_rate(ASSUMED_LINK)} and storage of {human_rate(ASSUMED_STORAGE)}. "
            "Measure your cluster with dshuffle.measure_cluster, and pass rates=."
        )
    elif rates.n_workers != n_workers:
        raise InvalidParameter.of("rates.n_workers", rates.n_workers, f"{n_workers}, the number of workers that train")
    explained = tuple(_explained(way.dataset(dataset), way, n_workers, rates, on_disk) for way in ways)
    return Explanation(
        dataset=(
            f"{human_count(dataset.n_samples)} samples of {human_bytes(dataset.row_nbytes)} "
            f"({human_bytes(dataset.n_samples * dataset.row_nbytes)}) at {dataset.url}"
        ),
        cluster=cluster,
        training=training,
        n_workers=n_workers,
        ways=explained,
        notes=(*notes, *_faster(dataset, ways, rates, explained)),
    )


def _explained(dataset: Dataset, way: Way, n_workers: int, rates: ClusterRates, on_disk: bool) -> WayExplanation:
    auto, choices = way.choices.is_auto, way.choices.with_one_delivery()
    spec = ShuffleSpec.at_first(dataset.n_samples, n_workers, resolved(dataset, choices))
    prediction = predicted(rates, dataset, Way(way.label, choices))
    return WayExplanation(
        label=way.label,
        memory_nbytes=member_nbytes(spec, dataset.layout, on_disk=on_disk),
        load_nbytes=dataset.n_samples * dataset.row_nbytes,
        exchange_nbytes=prediction.needed * dataset.row_nbytes,
        exchange_seconds=None if auto else prediction.exchange_seconds,
        bottleneck="" if auto else prediction.bottleneck,
    )


def _faster(
    dataset: Dataset, ways: Sequence[Way], rates: ClusterRates, explained: Sequence[WayExplanation]
) -> list[str]:
    """What would be faster than the fastest of several ways that shuffle globally."""
    times = [
        explanation.exchange_seconds
        for way, explanation in zip(ways, explained, strict=True)
        if way.choices.assignment.redraws_all and explanation.exchange_seconds
    ]
    if not times:
        return []
    work = work_of(dataset, dataclasses.replace(ways[0].choices, sharding="random", balance=None, delivery="peer"))
    best = recommend(rates, all_ways(rates, work)).best
    if best.exchange_seconds >= WORTH_SAYING * min(times):
        return []
    seconds = human_seconds(best.exchange_seconds)
    return [f"{best.work.way} would be faster: {seconds} for an exchange instead of {human_seconds(min(times))}."]
