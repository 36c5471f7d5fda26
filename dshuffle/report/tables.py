"""The comparison as tables for a terminal, 80 columns wide; the HTML report shows the same cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from dshuffle.report.summary import CPU_BOUND, Comparison, Figures, Spread, WayResult, figures
from dshuffle.units import UNKNOWN, human_bytes, human_count, human_error, human_ratio, human_seconds

TIME_HEADINGS = ("epoch", "shuffle", "range", "predicted", "idle CPU", "training", "waited")
TRAFFIC_HEADINGS = ("needed", "packets", "on the wire", "by the server")
STORE_HEADINGS = ("from the store", "read amplification", "requests", "a second")
CAPTION = (
    "Medians of the epochs after the first, which is loaded and not exchanged. epoch: wall time. "
    "shuffle: from the start of an exchange until every worker is ready, mostly while training. "
    "predicted: the same by the cost model, from a few seconds of measurement before; not in it is what training takes "
    "from processors that an exchange wants as well. "
    "idle CPU: of the busiest host during an exchange; with less than 15 % idle (marked !) the time is what the "
    "processors allow, not what the network or the store does. "
    "waited: how long training stood still for it. needed: samples trained on "
    "by a worker that did not hold them. packets: what was sent for them, each one sample or the XOR of "
    "several. read amplification: bytes fetched for each byte needed. Bytes and requests are of one epoch, over all "
    "workers; those sent by the server are part of those on the wire."
)
QUALITY_HEADINGS = ("meet again", "by chance", "neighbour distance", "class spread")
QUALITY_CAPTION = (
    "How well the first epochs are mixed, by their plans. meet again: the probability that two rows of one chunk that "
    "were with one worker are with one worker in the next epoch too, and by chance what it is in a uniform draw. "
    "neighbour distance: how far apart rows are trained on that are neighbours in the store, "
    "relative to a uniform permutation. class spread: how far the classes in a batch of 256 rows are from those of the "
    "whole, relative to random batches; 1.00 is as random as can be, and more is less mixed."
)
# So many epochs fit beside the label.
MOST_ERROR_COLUMNS = 7


def time_cells(way: WayResult) -> tuple[str, ...]:
    """One cell for each of :data:`TIME_HEADINGS`."""
    found = figures(way)
    spread = found.shuffle_seconds
    return (
        human_seconds(found.epoch_seconds),
        human_seconds(None if spread is None else spread.median),
        UNKNOWN if spread is None else _range(spread),
        human_seconds(way.predicted_seconds),
        idle_cell(found),
        human_seconds(found.training_seconds),
        human_seconds(found.waited_seconds),
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


def idle_cell(found: Figures) -> str:
    """The idle share of the processors, with a mark where it is so little that they were the limit."""
    if found.cpu_idle is None:
        return UNKNOWN
    return f"{found.cpu_idle:.0%}".replace("%", " %") + (" !" if found.cpu_idle < CPU_BOUND else "")


def quality_cells(way: WayResult) -> tuple[str, ...]:
    """One cell for each of :data:`QUALITY_HEADINGS`."""
    found = way.quality
    if found is None:
        return (UNKNOWN,) * len(QUALITY_HEADINGS)
    return tuple(
        UNKNOWN if value is None else f"{value:.2f}"
        for value in (found.meets_again, found.by_chance, found.neighbour_distance, found.class_spread)
    )


def error_cells(way: WayResult, epochs: Iterable[int]) -> tuple[str, ...]:
    """The error after each of these epochs."""
    errors = {point.epoch: point.error for point in way.history}
    return tuple(human_error(errors.get(epoch)) for epoch in epochs)


def epochs_of(comparison: Comparison, most: int | None = None) -> tuple[int, ...]:
    """The epochs after which an error is known; at most ``most``, evenly apart, with first and last.

    Examples
    --------
    >>> from dshuffle.report.summary import TrainingPoint
    >>> history = tuple(TrainingPoint(epoch=e, seconds=e, error=1.0) for e in range(30))
    >>> from dshuffle.planning import Choices
    >>> way = WayResult(label="", choices=Choices(), records=(), history=history)
    >>> epochs_of(Comparison(ways=(way,), seed=0, step=1.0, command=""), most=4)
    (0, 10, 19, 29)
    """
    epochs = sorted({point.epoch for way in comparison.ways for point in way.history})
    if most is None or len(epochs) <= most:
        return tuple(epochs)
    return tuple(epochs[round(place * (len(epochs) - 1) / (most - 1))] for place in range(most))


def comparison_tables(comparison: Comparison) -> list[Table]:
    """A row for each way in each table: seconds, traffic, storage, how well it mixes, the error after each epoch."""
    epochs = epochs_of(comparison, MOST_ERROR_COLUMNS)
    return [
        _table("Seconds", _but_range(TIME_HEADINGS), [(way, _but_range(time_cells(way))) for way in comparison.ways]),
        _table("Traffic", TRAFFIC_HEADINGS, [(way, traffic_cells(way)) for way in comparison.ways]),
        _table("Storage", STORE_HEADINGS, [(way, store_cells(way)) for way in comparison.ways]),
        _table("Mixing", QUALITY_HEADINGS, [(way, quality_cells(way)) for way in comparison.ways]),
        _table(
            "Error after each epoch",
            tuple(map(str, epochs)),
            [(way, error_cells(way, epochs)) for way in comparison.ways],
        ),
    ]


def _but_range(cells: tuple[str, ...]) -> tuple[str, ...]:
    """Eighty columns have no room for it."""
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
