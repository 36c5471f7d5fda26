"""Tables of a comparison for a terminal of 80 columns; the HTML report shows the same cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from dshuffle.report.summary import Comparison, Figures, Spread, WayResult, figures, limited_by_processors
from dshuffle.units import UNKNOWN, human_bytes, human_count, human_error, human_ratio, human_seconds

TIME_HEADINGS = ("epoch", "exchange", "range", "predicted", "idle CPU", "training", "waited")
TRAFFIC_HEADINGS = ("samples received", "packets", "bytes sent", "by the server")
STORE_HEADINGS = ("bytes read", "read amplification", "requests", "requests/s")
SHORT_HEADINGS = ("epoch", "exchange", "predicted", "waited", "last error")
CAPTION = (
    "Medians of the epochs after the first one, whose samples are read from the store. epoch: wall time. "
    "exchange: time until every worker has its samples, while training runs; local ways only plan and switch. "
    "predicted: time of an exchange by the cost model, from rates measured before training; the model does not know "
    "that training competes for the processors. "
    "idle CPU: on the busiest host during an exchange; marked ! if the processors limit the time, not the network or "
    "the store. "
    "waited: time that training waited for the exchange. samples received: samples that a worker trained on and did "
    "not hold. packets: what was sent for them, each one sample or the XOR of several. "
    "read amplification: bytes read for each byte needed. Bytes and requests are those of one epoch on all workers; "
    "bytes sent include those sent by the server."
)
QUALITY_HEADINGS = ("co-location probability", "if random", "neighbour distance", "class spread", "epochs to mix")
QUALITY_CAPTION = (
    "How well the first epochs are mixed, according to their plans. co-location probability: the probability that two "
    "rows of a chunk that were on one worker are on one worker again in the next epoch; if random: the same in a "
    "uniform draw. neighbour distance: how far apart a worker trains on rows that are neighbours in the store, "
    "relative to a uniform permutation. class spread: how much the share of each class in a batch of 256 rows "
    "differs from its share in the dataset, relative to random batches. 1.00 is perfectly random; more is less mixed. "
    "epochs to mix: epochs until a sample's worker no longer depends on where it started (to within 1 %)."
)
MOST_ERROR_COLUMNS = 7
"""Number of epochs that fit beside the label."""


def quality_caption(comparison: Comparison) -> str:
    """What the columns of :data:`QUALITY_HEADINGS` mean, and what the classes are."""
    classes = str(comparison.dataset.get("classes", ""))
    return f"{QUALITY_CAPTION} The classes are {classes}." if classes else QUALITY_CAPTION


def time_cells(way: WayResult) -> tuple[str, ...]:
    """One cell for each of :data:`TIME_HEADINGS`."""
    found = figures(way)
    spread = found.shuffle_seconds
    return (
        human_seconds(found.epoch_seconds),
        human_seconds(None if spread is None else spread.median),
        UNKNOWN if spread is None else _range(spread),
        human_seconds(way.predicted_seconds),
        idle_cell(way, found),
        human_seconds(found.training_seconds),
        human_seconds(found.waited_seconds),
    )


def short_cells(way: WayResult) -> tuple[str, ...]:
    """One cell for each of :data:`SHORT_HEADINGS`."""
    found = figures(way)
    spread = found.shuffle_seconds
    return (
        human_seconds(found.epoch_seconds),
        human_seconds(None if spread is None else spread.median),
        human_seconds(way.predicted_seconds),
        human_seconds(found.waited_seconds),
        human_error(found.last_error),
    )


def traffic_cells(way: WayResult) -> tuple[str, ...]:
    """One cell for each of :data:`TRAFFIC_HEADINGS`."""
    found = figures(way)
    return (
        human_count(found.needed),
        human_count(found.packets),
        human_bytes(found.wire_bytes),
        human_bytes(found.server_sent_bytes),
    )


def store_cells(way: WayResult) -> tuple[str, ...]:
    """One cell for each of :data:`STORE_HEADINGS`."""
    found = figures(way)
    return (
        human_bytes(found.store_bytes),
        UNKNOWN if found.read_amplification is None else human_ratio(found.read_amplification),
        human_count(found.store_requests),
        human_count(found.requests_per_second),
    )


def idle_cell(way: WayResult, found: Figures) -> str:
    """The idle fraction of the processors, with a mark if they were the limit."""
    if found.cpu_idle is None:
        return UNKNOWN
    return f"{found.cpu_idle:.0%}".replace("%", " %") + (" !" if limited_by_processors(way, found) else "")


def quality_cells(way: WayResult) -> tuple[str, ...]:
    """One cell for each of :data:`QUALITY_HEADINGS`."""
    found = way.quality
    if found is None:
        return (UNKNOWN,) * len(QUALITY_HEADINGS)
    epochs = found.epochs_to_mix
    return (
        *(
            UNKNOWN if value is None else f"{value:.2f}"
            for value in (found.meets_again, found.by_chance, found.neighbour_distance, found.class_spread)
        ),
        UNKNOWN if epochs is None else "never" if math.isinf(epochs) else f"{epochs:.0f}",
    )


def error_cells(way: WayResult, epochs: Iterable[int]) -> tuple[str, ...]:
    """The error after each of these epochs."""
    errors = {point.epoch: point.error for point in way.history}
    return tuple(human_error(errors.get(epoch)) for epoch in epochs)


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


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Five tables with a row for each way: seconds, traffic, storage, mixing, and errors."""
    epochs = epochs_of(comparison, MOST_ERROR_COLUMNS)
    where = " (emulated, see below)" if comparison.emulated else ""
    return [
        _table(
            f"Seconds{where}",
            _but_range(TIME_HEADINGS),
            [(way, _but_range(time_cells(way))) for way in comparison.ways],
        ),
        _table("Traffic", TRAFFIC_HEADINGS, [(way, traffic_cells(way)) for way in comparison.ways]),
        _table(f"Storage{where}", STORE_HEADINGS, [(way, store_cells(way)) for way in comparison.ways]),
        _table("Mixing", QUALITY_HEADINGS, [(way, quality_cells(way)) for way in comparison.ways]),
        _table(
            "Error after each epoch",
            tuple(map(str, epochs)),
            [(way, error_cells(way, epochs)) for way in comparison.ways],
        ),
    ]


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
        table.add_row(Text(way.label), *map(Text, cells))
    return table
