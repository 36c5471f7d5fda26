"""Charts of the report, as Bokeh figures. ``theme.js`` gives them the colours of the page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bokeh.models import ColumnDataSource, FactorRange, HoverTool, NumeralTickFormatter
from bokeh.models.annotations import LabelSet
from bokeh.plotting import figure
from bokeh.transform import dodge

from dshuffle.records import PHASES
from dshuffle.report.colours import DARK, LIGHT, PHASE_COLOURS, WAITING, way_colour
from dshuffle.report.summary import Comparison, Figures, TrainingPoint, WayResult, figures, has_errors
from dshuffle.report.swatches import dash_of, marker_of
from dshuffle.report.tables import mean_note
from dshuffle.report.verdict import recommended_labels
from dshuffle.units import ERROR_DIGITS, human_bytes, human_numbers, human_seconds

RECOMMENDED = " ◀"
"""What follows the time of a way that the verdict recommends."""
TEXT_WIDTH = 0.023
"""Width of a letter beside a bar, as a fraction of the axis on the narrowest screen."""
BAR_HEIGHT, BELOW_NAME = 0.42, -0.2
"""Height of a bar and its distance from the middle of its row, whose upper half has the name of the way."""

Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with its title, caption and key of (colour, meaning) pairs. A mark that is a letter has no colour.

    With ``lines``, each meaning is the name of a line that the reader can hide.
    """

    title: str
    caption: str
    key: Key
    figure: Any
    lines: bool = False


def charts(comparison: Comparison) -> list[Chart]:
    """Draw all charts of a comparison."""
    measured = {way.label: figures(way) for way in comparison.ways}
    return [
        _epoch_time(comparison.ways, measured, recommended_labels(comparison)),
        _phases(measured),
        _bytes(measured),
        *(_errors(comparison.ways, comparison.error_meaning) if has_errors(comparison) else ()),
    ]


def _epoch_time(ways: Sequence[WayResult], measured: Mapping[str, Figures], recommended: Collection[str]) -> Chart:
    amounts = ((DARK, "training"), (WAITING, "waiting for data"), (LIGHT, "other"))
    measured = dict(sorted(measured.items(), key=lambda item: item[1].epoch_seconds or 0.0))
    chart = _horizontal(measured)
    _stack(
        chart,
        measured,
        {
            "training": lambda medians: medians.training_seconds,
            "waiting for data": lambda medians: medians.waited_seconds,
            "other": _rest,
        },
        [colour for colour, _ in amounts],
    )
    seconds = [medians.epoch_seconds or 0.0 for medians in measured.values()]
    copies = {way.label: way.copy_seconds for way in ways if way.copy_seconds is not None}
    texts = [
        human_seconds(medians.epoch_seconds)
        + (f" + copy, {human_seconds(copies[label])}" if label in copies else "")
        + (RECOMMENDED if label in recommended else "")
        for label, medians in measured.items()
    ]
    source = ColumnDataSource({"way": list(measured), "seconds": seconds, "text": texts})
    labels = LabelSet(
        x="seconds",
        y=_in_row(chart),
        text="text",
        source=source,
        x_offset=6,
        text_baseline="middle",
        text_font_size="12px",
    )
    chart.add_layout(labels)
    chart.x_range.end = max(map(_end_of_text, seconds, texts), default=0.0) or 1.0
    is_local = any(not way.choices.assignment.moves for way in ways)
    notes = [
        mean_note(ways),
        "copy: time of making the shuffled copy, once before training." if copies else "",
        "The difference from the bars of local ways is the cost of the exchange." if is_local else "",
    ]
    return Chart(
        "Time per epoch",
        "Median wall time of an epoch, the fastest first. training: tasks of the busiest worker. waiting for data: "
        "time until the next samples arrived. other: round trips, task starts, work of the client between epochs, and "
        + " ".join(filter(None, ["processor time of the exchange.", *notes])),
        (*amounts, *((("", f"{RECOMMENDED.strip()} to reshuffle everything"),) if recommended else ())),
        chart,
    )


def _end_of_text(seconds: float, text: str) -> float:
    """Where the axis must end for a text beside a bar, on the narrowest screen."""
    return seconds / max(0.1, 1 - TEXT_WIDTH * (len(text) + 1))


def _rest(medians: Figures) -> float:
    return max(
        0.0, (medians.epoch_seconds or 0.0) - (medians.training_seconds or 0.0) - (medians.waited_seconds or 0.0)
    )


def _phases(measured: Mapping[str, Figures]) -> Chart:
    chart = _horizontal(measured)
    _stack(chart, measured, {phase: _phase(phase) for phase in PHASES}, list(PHASE_COLOURS.values()))
    whole = ColumnDataSource(
        {
            "way": list(measured),
            "seconds": [
                medians.shuffle_seconds.median if medians.shuffle_seconds else 0.0 for medians in measured.values()
            ],
            "text": [
                human_seconds(medians.shuffle_seconds.median if medians.shuffle_seconds else None)
                for medians in measured.values()
            ],
        }
    )
    marks = chart.scatter(
        "seconds", _in_row(chart), source=whole, marker="diamond", size=13, fill_color="white", line_color="#333333"
    )
    chart.add_tools(HoverTool(renderers=[marks], tooltips=[("whole exchange", "@text")]))
    return Chart(
        "Where an exchange spends its time",
        "Median seconds of an exchange; each phase is that of its slowest worker. Phases overlap, so a bar can be "
        "longer than the exchange. The diamond is the measured time of the whole exchange.",
        (*((PHASE_COLOURS[phase], phase) for phase in PHASES), ("white", "◆ whole exchange")),
        chart,
    )


def _phase(phase: str) -> Callable[[Figures], float | None]:
    return lambda medians: medians.phases.get(phase)


def _bytes(measured: Mapping[str, Figures]) -> Chart:
    kinds: dict[str, tuple[str, Callable[[Figures], float | None]]] = {
        "wire": (DARK, lambda medians: medians.wire_bytes),
        "store": (LIGHT, lambda medians: medians.store_bytes),
    }
    most = max((value(medians) or 0 for medians in measured.values() for _, value in kinds.values()), default=0)
    chart = named_rows(list(measured), x_range=(0, 1.05 * most / 1e6 or 1.0), row_height=52)
    height = 0.24
    for place, (kind, (colour, value)) in enumerate(kinds.items()):
        amounts = [value(medians) or 0 for medians in measured.values()]
        source = ColumnDataSource(
            {
                "way": list(measured),
                "value": [amount / 1e6 for amount in amounts],
                "text": [human_bytes(amount) for amount in amounts],
            }
        )
        row = dodge("way", BELOW_NAME + 1.05 * height * (0.5 - place), range=chart.y_range)
        bars = chart.hbar(y=row, right="value", height=height, source=source, fill_color=colour, line_color=None)
        chart.add_tools(HoverTool(renderers=[bars], tooltips=[("@way", f"{kind}: @text")]))
    chart.xaxis.axis_label = "MB per epoch"
    return Chart(
        "Bytes per epoch",
        "Bytes that workers and the server sent, and bytes read from the store, in one epoch.",
        ((DARK, "sent by workers and the server"), (LIGHT, "read from the store")),
        chart,
    )


def _errors(ways: tuple[WayResult, ...], meaning: str) -> list[Chart]:
    key = tuple((way_colour(place), way.label) for place, way in enumerate(ways))
    copied = any(way.copy_seconds is not None for way in ways)
    by_epoch = _lines(ways, lambda way, point: float(point.epoch), "epoch")
    by_epoch.xaxis.ticker.desired_num_ticks = 6
    by_epoch.xaxis.ticker.mantissas = [1, 2, 5]
    by_epoch.xaxis.ticker.min_interval = 1
    by_time = _lines(ways, lambda way, point: (way.copy_seconds or 0.0) + point.seconds, "seconds since the start")
    caption = " ".join(
        [f"{meaning[0].upper()}{meaning[1:]}, on a logarithmic scale.", *map(_equality_sentence, _equal(ways))]
    )
    return [
        Chart("Error after each epoch", caption, key, by_epoch, lines=True),
        Chart(
            "Error against time",
            "The same errors against wall time, which includes loading and measuring the error."
            + (" The line of a shuffled copy begins after the time of making it." if copied else ""),
            key,
            by_time,
            lines=True,
        ),
    ]


def _equal(ways: Sequence[WayResult]) -> list[list[str]]:
    """Labels of ways whose lines coincide: every error has the same digits in the tables."""
    labels: dict[tuple[str, ...], list[str]] = {}
    for way, errors in zip(ways, _error_texts(ways), strict=True):
        labels.setdefault(tuple(errors), []).append(way.label)
    return [group for errors, group in labels.items() if errors and len(group) > 1]


def _error_texts(ways: Sequence[WayResult]) -> list[list[str]]:
    """The errors of each way, with equally many digits."""
    texts = iter(human_numbers([point.error for way in ways for point in way.history], ERROR_DIGITS))
    return [[next(texts) for _ in way.history] for way in ways]


def _equality_sentence(labels: Sequence[str]) -> str:
    return f"These have equal errors, and one line: {', '.join(f'“{label}”' for label in labels)}."


def _lines(ways: tuple[WayResult, ...], x: Callable[[WayResult, TrainingPoint], float], label: str) -> Any:
    chart = way_figure(y_axis_type="log", height=340)
    chart.xaxis.axis_label = label
    for place, (way, errors) in enumerate(zip(ways, _error_texts(ways), strict=True)):
        source = ColumnDataSource(
            {
                "x": [x(way, point) for point in way.history],
                # A logarithmic axis cannot show an exact zero.
                "error": [max(point.error, 1e-16) for point in way.history],
                "text": errors,
                "way": [way.label] * len(way.history),
            }
        )
        common = {"source": source, "color": way_colour(place), "name": f"line: {way.label}"}
        chart.line("x", "error", line_width=2.5, line_dash=dash_of(place), **common)
        marks = chart.scatter("x", "error", size=9, marker=marker_of(place), **common)
        chart.add_tools(HoverTool(renderers=[marks], tooltips=[("@way", "@text"), (label, "@x{0.[00]}")]))
    return chart


def _horizontal(measured: Mapping[str, Figures]) -> Any:
    chart = named_rows(list(measured))
    chart.x_range.start = 0
    chart.xaxis.axis_label = "seconds"
    return chart


def _stack(
    chart: Any,
    measured: Mapping[str, Figures],
    parts: Mapping[str, Callable[[Figures], float | None]],
    colours: list[str],
) -> None:
    columns = {name: [value(medians) or 0.0 for medians in measured.values()] for name, value in parts.items()}
    texts = {f"{name} text": [human_seconds(second) for second in column] for name, column in columns.items()}
    source = ColumnDataSource({"way": list(measured), **columns, **texts})
    bars = chart.hbar_stack(
        list(parts), y=_in_row(chart), height=BAR_HEIGHT, fill_color=colours, line_color=None, source=source
    )
    for name, renderer in zip(parts, bars, strict=True):
        chart.add_tools(HoverTool(renderers=[renderer], tooltips=[(name, f"@{{{name} text}}")]))


def named_rows(labels: Sequence[str], row_height: int = 42, **options: Any) -> Any:
    """Return a figure with one row per way.

    The name is above the bars, so that bars are as wide as the chart on a phone.
    """
    chart = way_figure(y_range=FactorRange(factors=labels[::-1]), height=60 + row_height * len(labels), **options)
    names = ColumnDataSource({"x": [0] * len(labels), "way": list(labels), "name": list(labels)})
    chart.add_layout(
        LabelSet(
            x="x",
            y="way",
            text="name",
            source=names,
            x_units="screen",
            x_offset=2,
            y_offset=0.1 * row_height,
            text_font_size="12px",
        )
    )
    chart.yaxis.visible = False
    return chart


def _in_row(chart: Any) -> Any:
    """Where a row has its bars."""
    return dodge("way", BELOW_NAME, range=chart.y_range)


def way_figure(**options: Any) -> Any:
    """Return an empty figure in the style of the report."""
    chart = figure(
        sizing_mode="stretch_width",
        tools="",
        toolbar_location=None,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_right=16,
        **options,
    )
    chart.axis.axis_label_text_font_style = "normal"
    chart.axis.minor_tick_line_color = None
    if isinstance(chart.y_range, FactorRange):
        chart.yaxis.major_tick_in = 0
        chart.ygrid.grid_line_color = None
        chart.y_range.range_padding = 0.02
        chart.xaxis.formatter = NumeralTickFormatter(format="0.[000]")
    return chart
