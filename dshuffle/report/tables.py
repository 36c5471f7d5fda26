"""Tables of a comparison for a terminal of 80 columns; the HTML report shows the same cells."""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.containers import Lines
from rich.table import Table
from rich.text import Text

from dshuffle.noninferiority import PairedOutcome, PairedRuns
from dshuffle.report.summary import (
    Comparison,
    Figures,
    Spread,
    WayResult,
    figures,
    has_errors,
    last_errors_in_words,
    limited_by_processors,
)
from dshuffle.units import (
    ERROR_DIGITS,
    METRIC_DIGITS,
    NO_BREAK,
    UNKNOWN,
    human_bytes,
    human_count,
    human_numbers,
    human_ratio,
    human_seconds,
    kept_together,
)

TIME_HEADINGS = ("epoch", "exchange", "range", "predicted", "idle CPU", "training", "waited")
TRAFFIC_HEADINGS = ("samples received", "packets", "bytes sent", "by the server")
STORE_HEADINGS = ("bytes read", "read amplification", "requests", "requests/s")
SHORT_HEADINGS = ("epoch", "exchange", "predicted", "waited")
ERROR_HEADING = "last error"
TIME_CAPTION = (
    "Medians of the epochs after the first one, whose samples are read from the store. epoch: wall time; a mean of "
    "epochs with and without an exchange, if only every K-th has one. "
    "exchange: time until every worker has its samples, while training runs; local ways only plan and switch. "
    "predicted: time of an exchange by the cost model, from rates measured before training; the model does not know "
    "that training competes for the processors. "
    "idle CPU: on the busiest host during an exchange; marked ! where samples move, if it is below 15 % and links and "
    "store alone would take less than half of the exchange, or are not predicted: then the processors limit the time. "
    "waited: time that training waited for the exchange."
)
TRAFFIC_CAPTION = (
    "In one epoch, on all workers. samples received: samples that a worker trained on and did not hold. "
    "packets: what was sent for them, each one sample or the XOR of several. "
    "bytes sent: includes those sent by the server."
)
STORE_MEANING = "read amplification: bytes read for each byte needed."
STORE_CAPTION = f"In one epoch, on all workers. {STORE_MEANING}"
QUALITY_MEANINGS = {
    "co-location probability": "the probability that two rows of a chunk that were on one worker are on one worker "
    "again in the next epoch",
    "if random": "the same in a uniform draw",
    "neighbour distance": "how far apart a worker trains on rows that are neighbours in the store, relative to a "
    "uniform permutation",
    "class spread": "how much the share of each class in a batch of 256 rows differs from its share in the dataset, "
    "relative to random batches. 1.00 is perfectly random; more is less mixed",
    "epochs to mix": "epochs until a sample's worker no longer depends on where it started (to within 1 %); never if "
    "no sample moves, and - if samples move only in whole chunks",
}
QUALITY_HEADINGS = tuple(QUALITY_MEANINGS)
PAIR_HEADINGS = ("mean", "difference", "bounds", "pairs", "answer")
MOST_ERROR_COLUMNS = 7
"""Number of epochs that fit beside the label."""


def mean_note(ways: Iterable[WayResult]) -> str:
    """What the time of an epoch means, if only every K-th epoch of a way has an exchange; empty otherwise."""
    if all(way.choices.every == 1 for way in ways):
        return ""
    return (
        "The time of a way that exchanges for every K-th epoch only is a mean of epochs with and without an exchange."
    )


def quality_headings(comparison: Comparison) -> tuple[str, ...]:
    """The headings of :data:`QUALITY_HEADINGS`. The neighbour distance is left out if it is 1.00 for all ways.

    It differs only for ways that train in stored order, or nearly.
    """
    distances = {f"{way.quality.neighbour_distance:.2f}" for way in comparison.ways if way.quality is not None}
    return tuple(name for name in QUALITY_HEADINGS if name != "neighbour distance" or distances - {"1.00"})


def quality_caption(comparison: Comparison) -> str:
    """What the columns of :func:`quality_headings` mean, and what the classes are."""
    meanings = [f"{heading}: {QUALITY_MEANINGS[heading]}." for heading in quality_headings(comparison)]
    classes = str(comparison.dataset.get("classes", ""))
    return " ".join(
        [
            "How well the first epochs are mixed, according to their plans.",
            *meanings,
            *([f"The classes are {classes}."] if classes else []),
        ]
    )


def time_cells(way: WayResult) -> tuple[str, ...]:
    """One cell for each of :data:`TIME_HEADINGS`."""
    medians = figures(way)
    spread = medians.shuffle_seconds
    return (
        human_seconds(medians.epoch_seconds),
        human_seconds(None if spread is None else spread.median),
        UNKNOWN if spread is None else _range(spread),
        human_seconds(way.predicted_seconds),
        idle_cell(way, medians),
        human_seconds(medians.training_seconds),
        human_seconds(medians.waited_seconds),
    )


def short_headings(comparison: Comparison) -> tuple[str, ...]:
    """The headings of :data:`SHORT_HEADINGS`, and that of the last error if errors were reported."""
    return (*SHORT_HEADINGS, ERROR_HEADING) if has_errors(comparison) else SHORT_HEADINGS


def short_cells(comparison: Comparison) -> dict[str, tuple[str, ...]]:
    """One cell for each of :func:`short_headings`, by the label of each way."""
    errors = last_errors_in_words(comparison) if has_errors(comparison) else {}
    return {way.label: (*_short_times(way), *([errors[way.label]] if errors else [])) for way in comparison.ways}


def short_caption(comparison: Comparison) -> str:
    """What the columns of :func:`short_headings` mean."""
    sentences = [
        "Medians of the epochs after the first one. epoch: wall time.",
        mean_note(comparison.ways),
        "exchange: time until every worker has its samples, while training runs. predicted: the same by the cost "
        "model. waited: time that training waited for it.",
        f"{ERROR_HEADING}: {comparison.error_meaning}, after the last epoch." if has_errors(comparison) else "",
    ]
    return " ".join(filter(None, sentences))


def _short_times(way: WayResult) -> tuple[str, ...]:
    medians = figures(way)
    spread = medians.shuffle_seconds
    return (
        human_seconds(medians.epoch_seconds),
        human_seconds(None if spread is None else spread.median),
        human_seconds(way.predicted_seconds),
        human_seconds(medians.waited_seconds),
    )


def traffic_cells(way: WayResult) -> tuple[str, ...]:
    """One cell for each of :data:`TRAFFIC_HEADINGS`."""
    medians = figures(way)
    return (
        human_count(medians.needed),
        human_count(0 if medians.wire_bytes == 0 else medians.packets),
        human_bytes(medians.wire_bytes),
        human_bytes(medians.server_sent_bytes),
    )


def store_cells(way: WayResult) -> tuple[str, ...]:
    """One cell for each of :data:`STORE_HEADINGS`."""
    medians = figures(way)
    return (
        human_bytes(medians.store_bytes),
        UNKNOWN if medians.read_amplification is None else human_ratio(medians.read_amplification),
        human_count(medians.store_requests),
        human_count(medians.requests_per_second),
    )


def idle_cell(way: WayResult, medians: Figures) -> str:
    """The idle fraction of the processors, with a mark if they were the limit."""
    if medians.cpu_idle is None:
        return UNKNOWN
    return f"{medians.cpu_idle:.0%}".replace("%", " %") + (" !" if limited_by_processors(way, medians) else "")


def quality_cells(way: WayResult, headings: Sequence[str] = QUALITY_HEADINGS) -> tuple[str, ...]:
    """One cell for each of some :data:`QUALITY_HEADINGS`."""
    quality = way.quality
    if quality is None:
        return (UNKNOWN,) * len(headings)
    epochs = quality.epochs_to_mix
    values = (quality.meets_again, quality.by_chance, quality.neighbour_distance, quality.class_spread)
    cells = (
        *(UNKNOWN if value is None else f"{value:.2f}" for value in values),
        UNKNOWN if epochs is None else "never" if math.isinf(epochs) else f"{epochs:.0f}",
    )
    return tuple(cell for heading, cell in zip(QUALITY_HEADINGS, cells, strict=True) if heading in headings)


def error_cells(comparison: Comparison, epochs: Iterable[int]) -> dict[str, tuple[str, ...]]:
    """The error after each of these epochs, by the label of each way."""
    errors = {way.label: {point.epoch: point.error for point in way.history} for way in comparison.ways}
    return _number_cells(
        {label: [points.get(epoch) for epoch in epochs] for label, points in errors.items()}, ERROR_DIGITS
    )


def _number_cells(rows: Mapping[str, Sequence[float | None]], digits: int) -> dict[str, tuple[str, ...]]:
    """Cells of a table of numbers that are compared."""
    cells = iter(human_numbers([value for row in rows.values() for value in row], digits))
    return {label: tuple(itertools.islice(cells, len(row))) for label, row in rows.items()}


def metrics_of(comparison: Comparison) -> tuple[str, ...]:
    """Names of the validation metrics, in the order of their first occurrence."""
    points = (point for way in comparison.ways for point in way.history)
    return tuple(dict.fromkeys(name for point in points for name in point.validation))


def metric_cells(comparison: Comparison, metric: str, epochs: Iterable[int]) -> dict[str, tuple[str, ...]]:
    """A validation metric after each of these epochs, by the label of each way."""
    values = {
        way.label: {point.epoch: point.validation.get(metric) for point in way.history} for way in comparison.ways
    }
    return _number_cells(
        {label: [points.get(epoch) for epoch in epochs] for label, points in values.items()}, METRIC_DIGITS
    )


def pair_cells(comparison: Comparison) -> dict[str, tuple[str, ...]]:
    """One cell for each of :data:`PAIR_HEADINGS`, by the label of each tested way."""
    tested = tested_ways(comparison)
    *means, _ = _mean_metrics([runs for _, _, runs in tested])
    return {
        way.label: (
            mean,
            *((_signed(runs.shown_mean), runs.shown_bounds) if runs.n_pairs else (UNKNOWN, UNKNOWN)),
            str(runs.n_pairs),
            "" if runs.outcome is None else runs.outcome.value,
        )
        for (_, way, runs), mean in zip(tested, means, strict=True)
    }


def _mean_metrics(tested: Sequence[PairedRuns]) -> list[str]:
    """The mean metric of the runs with each way, and last that of the runs that reshuffle everything."""
    means = [statistics.mean(runs.way) if runs.n_pairs else None for runs in tested]
    return human_numbers([*means, statistics.mean(_longest(tested).reference)], METRIC_DIGITS)


def _longest(tested: Sequence[PairedRuns]) -> PairedRuns:
    """The pairs with the most runs of the reference, which all ways share."""
    return max(tested, key=lambda runs: len(runs.reference))


def _signed(text: str) -> str:
    return text if text.startswith(("-", "nan")) else f"+{text}"


def pair_caption(comparison: Comparison) -> str:
    """What the metric and the columns of :data:`PAIR_HEADINGS` mean, the margin, and the null pair."""
    tested = [runs for _, _, runs in tested_ways(comparison)]
    runs = _longest(tested)
    metric, noise = runs.test.metric, runs.not_deterministic_by
    untested = [f"“{way.label}”" for way in comparison.ways if way.pairs is None and not way.choices.reshuffles_all]
    return " ".join(
        [
            f"{metric}: {runs.test.meaning or 'what the training returns by this name'}.",
            *([_pair_meanings(tested)] if any(runs.n_pairs for runs in tested) else []),
            f"The margin is {runs.shown_margin}.",
            f"Two runs that reshuffle everything with different seeds differ by {runs.shown(runs.null_difference)}.",
            *([f"Training is not deterministic by {runs.shown(noise)}."] if noise else []),
            *([f"Not tested: {', '.join(untested)}."] if untested else []),
        ]
    )


def _pair_meanings(tested: Sequence[PairedRuns]) -> str:
    *_, mean = _mean_metrics(tested)
    metric, direction = tested[0].test.metric, tested[0].test.direction
    one_sided = any(runs.outcome is PairedOutcome.NOT_WORSE for runs in tested)
    return (
        f"mean: of {metric} over the runs with the way; {direction}. The other runs of the pairs reshuffle everything "
        f"and have the same seeds; their mean is {mean}. difference: positive if the way is worse. bounds: of the mean "
        "difference, with 95 % confidence"
        + (": an interval, or for a way that is not worse the upper bound alone." if one_sided else ".")
    )


def epochs_of(comparison: Comparison, most: int | None = None) -> tuple[int, ...]:
    """The epochs after which an error is known: at most ``most`` of them, evenly spaced, with the first and the last.

    Examples
    --------
    >>> from dshuffle.report.summary import TrainingPoint
    >>> history = tuple(TrainingPoint(epoch=e, seconds=e, error=1.0) for e in range(30))
    >>> from dshuffle.planning import Choices
    >>> way = WayResult(label="", choices=Choices(), records=(), history=history)
    >>> epochs_of(Comparison(ways=(way,), seed=0, command=""), most=4)
    (0, 10, 19, 29)
    """
    epochs = sorted({point.epoch for way in comparison.ways for point in way.history})
    if most is None or len(epochs) <= most:
        return tuple(epochs)
    return tuple(epochs[round(place * (len(epochs) - 1) / (most - 1))] for place in range(most))


def comparison_tables(comparison: Comparison) -> list[tuple[Table, str]]:
    """Tables with a row for each way, and the note below each.

    Seconds, traffic, storage, mixing, errors, each validation metric, and pairs of runs.
    """
    epochs, mixing = epochs_of(comparison, MOST_ERROR_COLUMNS), quality_headings(comparison)
    emulated = f"Emulated: {comparison.emulated}. " if comparison.emulated else ""
    errors = error_cells(comparison, epochs)
    cells: tuple[tuple[str, Sequence[str], Callable[[WayResult], tuple[str, ...]], str], ...] = (
        ("Seconds", _but_range(TIME_HEADINGS), lambda way: _but_range(time_cells(way)), emulated + TIME_CAPTION),
        ("Traffic", TRAFFIC_HEADINGS, traffic_cells, TRAFFIC_CAPTION),
        ("Storage", STORE_HEADINGS, store_cells, emulated + STORE_CAPTION),
        ("Mixing", mixing, lambda way: quality_cells(way, mixing), quality_caption(comparison)),
        (
            "Error after each epoch",
            tuple(map(str, epochs)) if has_errors(comparison) else (),
            lambda way: errors[way.label],
            f"{comparison.error_meaning[0].upper()}{comparison.error_meaning[1:]}.",
        ),
    )
    tables = [
        (_table(title, headings, [(way, row(way)) for way in comparison.ways]), note)
        for title, headings, row, note in cells
        if headings  # a function may report no errors
    ]
    for metric in metrics_of(comparison):
        values = metric_cells(comparison, metric, epochs)
        rows = [(way, values[way.label]) for way in comparison.ways]
        tables.append((_table(f"{metric} after each epoch", tuple(map(str, epochs)), rows), ""))
    if tested := tested_ways(comparison):
        pairs = pair_cells(comparison)
        rows = [(way, pairs[way.label]) for _, way, _ in tested]
        tables.append(
            (_table(f"{tested[0][2].test.metric} in pairs of runs", PAIR_HEADINGS, rows), pair_caption(comparison))
        )
    return tables


def tested_ways(comparison: Comparison) -> list[tuple[int, WayResult, PairedRuns]]:
    """The ways that were compared in pairs of runs, with their places and their pairs."""
    return [(place, way, way.pairs) for place, way in enumerate(comparison.ways) if way.pairs is not None]


def _but_range(cells: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out the range, which does not fit into 80 columns."""
    place = TIME_HEADINGS.index("range")
    return cells[:place] + cells[place + 1 :]


def _range(spread: Spread) -> str:
    least, greatest = human_seconds(spread.least), human_seconds(spread.greatest)
    least_unit, greatest_unit = least.split()[1], greatest.split()[1]
    return f"{least.split()[0] if least_unit == greatest_unit else least}-{greatest}"


def _table(title: str, headings: Sequence[str], rows: Iterable[tuple[WayResult, tuple[str, ...]]]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
    )
    table.add_column("way")
    for heading in headings:
        table.add_column(heading.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for way, cells in rows:
        # Text, not str: a label is data, never markup.
        table.add_row(_Label(way.label), *map(Text, cells))
    return table


class _Label(Text):
    """The name of a way. No line of it ends between a number and its unit, where Rich would end one."""

    def wrap(self, console: Console, width: int, **_: Any) -> Lines:
        lines = textwrap.wrap(kept_together(self.plain), width)
        return Lines(Text(line.replace(NO_BREAK, " ")) for line in lines)
