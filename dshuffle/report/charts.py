"""Charts of the report, as Bokeh figures. ``theme.js`` gives them the colours of the page."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from bokeh.models import ColumnDataSource, FactorRange, HoverTool, NumeralTickFormatter
from bokeh.models.annotations import LabelSet
from bokeh.plotting import figure

from dshuffle.records import PHASES
from dshuffle.report.summary import Comparison, Figures, TrainingPoint, WayResult, figures, has_errors
from dshuffle.report.verdict import recommended_labels
from dshuffle.units import human_bytes, human_error, human_seconds

# Each hue means one way: Okabe and Ito's palette for colour-blind readers without the hue that marks waiting, and five
# more. The default comparison has ten ways.
BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"
SLATE, WINE, BROWN, LIME, NAVY = "#6A5ACD", "#A2285D", "#7F4F24", "#8DB600", "#27408B"
WAY_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, SLATE, WINE, BROWN, LIME, NAVY)
WAY_DASHES = ("solid", "dashed", "dotted", "dotdash")
WAY_MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "hex", "star")
WAITING = "#D55E00"
"""Time that training waits: the only part of a bar to worry about."""
DARK, MIDDLE, LIGHT = "#5B6470", "#8A929C", "#BCC2C9"
"""Greys for amounts, told apart by the key above each chart."""
PHASE_COLOURS = dict(zip(PHASES, ("#7A6300", "#937900", "#A98E1A", "#BFA645", "#D2BF74", "#E9DFB9"), strict=True))

Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with its title, caption and key of (colour, meaning) pairs.

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
        _epoch_time(measured, recommended_labels(comparison)),
        _phases(measured),
        _bytes(measured),
        *(_errors(comparison.ways, comparison.error_meaning) if has_errors(comparison) else ()),
    ]


def way_colour(place: int) -> str:
    """Return the colour of the way at this position; it is the same in every chart."""
    return WAY_COLOURS[place % len(WAY_COLOURS)]


def _epoch_time(measured: Mapping[str, Figures], recommended: Collection[str]) -> Chart:
    key = ((DARK, "training"), (WAITING, "waiting for data"), (LIGHT, "other"))
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
        [colour for colour, _ in key],
    )
    seconds = [medians.epoch_seconds or 0.0 for medians in measured.values()]
    texts = [
        human_seconds(medians.epoch_seconds) + (" ◀ recommended" if label in recommended else "")
        for label, medians in measured.items()
    ]
    source = ColumnDataSource({"way": list(measured), "seconds": seconds, "text": texts})
    labels = LabelSet(
        x="seconds", y="way", text="text", source=source, x_offset=6, text_baseline="middle", text_font_size="12px"
    )
    chart.add_layout(labels)
    chart.x_range.end = 1.25 * max(seconds, default=0.0) or 1.0  # room for the numbers
    return Chart(
        "Time per epoch",
        "Median wall time of an epoch, the fastest first. training: tasks of the busiest worker. waiting for data: "
        "time until the next samples arrived. other: round trips, task starts, work of the client between epochs, and "
        "processor time of the exchange. The difference from the bars of local ways is the cost of the exchange.",
        key,
        chart,
    )


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
        "seconds", "way", source=whole, marker="diamond", size=13, fill_color="white", line_color="#333333"
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
    rows = [(label, kind) for label in measured for kind in kinds]
    values = [kinds[kind][1](measured[label]) or 0 for label, kind in rows]
    chart = way_figure(y_range=FactorRange(factors=rows[::-1], group_padding=0.6), height=_height(measured, 50))
    source = ColumnDataSource(
        {
            "row": rows,
            "value": [value / 1e6 for value in values],
            "colour": [kinds[kind][0] for _, kind in rows],
            "text": [human_bytes(value) for value in values],
        }
    )
    bars = chart.hbar(y="row", right="value", height=0.85, source=source, fill_color="colour", line_color=None)
    chart.add_tools(HoverTool(renderers=[bars], tooltips=[("", "@row: @text")]))
    chart.x_range.start = 0
    chart.xaxis.axis_label = "MB per epoch"
    chart.yaxis.major_tick_line_color = None
    chart.yaxis.major_label_text_font_size = "0px"
    chart.yaxis.group_label_orientation = "horizontal"
    return Chart(
        "Bytes per epoch",
        "Bytes sent between workers and bytes read from the store, summed over all workers.",
        ((DARK, "sent between workers"), (LIGHT, "read from the store")),
        chart,
    )


def _errors(ways: tuple[WayResult, ...], meaning: str) -> list[Chart]:
    key = tuple((way_colour(place), way.label) for place, way in enumerate(ways))
    by_epoch = _lines(ways, lambda point: float(point.epoch), "epoch")
    by_epoch.xaxis.ticker.desired_num_ticks = 6
    by_epoch.xaxis.ticker.mantissas = [1, 2, 5]
    by_epoch.xaxis.ticker.min_interval = 1
    by_time = _lines(ways, lambda point: point.seconds, "seconds since the start")
    caption = f"{meaning[0].upper()}{meaning[1:]}, on a logarithmic scale. Equal lines overlap."
    return [
        Chart("Error after each epoch", caption, key, by_epoch, lines=True),
        Chart(
            "Error against time",
            "The same errors against wall time, which includes loading and measuring the error.",
            key,
            by_time,
            lines=True,
        ),
    ]


def _lines(ways: tuple[WayResult, ...], x: Callable[[TrainingPoint], float], label: str) -> Any:
    chart = way_figure(y_axis_type="log", height=340)
    chart.xaxis.axis_label = label
    for place, way in enumerate(ways):
        source = ColumnDataSource(
            {
                "x": [x(point) for point in way.history],
                # A logarithmic axis cannot show an exact zero.
                "error": [max(point.error, 1e-16) for point in way.history],
                "text": [human_error(point.error) for point in way.history],
                "way": [way.label] * len(way.history),
            }
        )
        common = {"source": source, "color": way_colour(place), "name": f"line: {way.label}"}
        chart.line("x", "error", line_width=2.5, line_dash=WAY_DASHES[place % len(WAY_DASHES)], **common)
        marks = chart.scatter("x", "error", size=9, marker=WAY_MARKERS[place % len(WAY_MARKERS)], **common)
        chart.add_tools(HoverTool(renderers=[marks], tooltips=[("@way", "@text"), (label, "@x{0.[00]}")]))
    return chart


def _horizontal(measured: Mapping[str, Figures]) -> Any:
    chart = way_figure(y_range=FactorRange(factors=list(measured)[::-1]), height=_height(measured, 34))
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
    bars = chart.hbar_stack(list(parts), y="way", height=0.62, fill_color=colours, line_color=None, source=source)
    for name, renderer in zip(parts, bars, strict=True):
        chart.add_tools(HoverTool(renderers=[renderer], tooltips=[(name, f"@{{{name} text}}")]))


def _height(measured: Mapping[str, Figures], a_way: int) -> int:
    return 60 + a_way * len(measured)


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
