"""A chart of the pairs of runs: each pair's difference, the bounds of the mean, and the margin."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from bokeh.models import ColumnDataSource, HoverTool
from bokeh.models.annotations import LabelSet

from dshuffle.noninferiority import PairedRuns
from dshuffle.report.charts import BELOW_NAME, Chart, named_rows
from dshuffle.report.colours import MIDDLE, WAITING, way_colour
from dshuffle.report.summary import Comparison
from dshuffle.report.tables import tested_ways

MARGINS_SHOWN = 4.0
"""The axis ends at this many margins at most. Without an end, one bad way would hide the differences of all others."""
BEYOND_CLOSEST = 1.5
"""If all ways are bad, the axis ends at this many times the median difference of the best one."""
MARK_WIDTH = 0.03
"""Width of a mark as a fraction of the axis, on the narrowest screen."""
NAME_PIXELS, LEVEL_PIXELS = 30, 7
"""Height of a row: its name, and each level of marks."""
MOST_LEVELS = 12
"""Marks that would need more levels share the last one, so that equal pairs do not make the rows of all ways high."""


def pair_chart(comparison: Comparison) -> Chart | None:
    """Draw the pairs of all tested ways; None if no way was tested with pairs."""
    tested = [entry for entry in tested_ways(comparison) if entry[2].n_pairs]
    if not tested:
        return None
    runs = tested[-1][2]
    margin = runs.scaled(runs.limit)
    edges = _edges(margin, [pairs for _, _, pairs in tested])
    marks = {way.label: _Marks.of(pairs, edges) for _, way, pairs in tested}
    n_levels = max(3, *(row.n_levels for row in marks.values()))
    row_height = NAME_PIXELS + LEVEL_PIXELS * n_levels
    chart = named_rows([way.label for _, way, _ in tested], row_height, x_range=edges)
    chart.xaxis.axis_label = f"difference{runs.percent and ', in percent'}"
    chart.vspan(x=[0], line_color=MIDDLE, line_width=1)
    chart.vspan(x=[margin], line_color=WAITING, line_width=2, line_dash="dashed")
    for place, way, pairs in tested:
        _draw(chart, way.label, way_colour(place), pairs, marks[way.label], edges, LEVEL_PIXELS / row_height)
    interval = "with 95 % confidence: an interval, or from the left to the upper bound of a way that is not worse."
    return Chart(
        "Pairs of runs",
        f"The difference in {runs.test.metric} between a run with the way and one that reshuffles everything with the "
        "same seeds. On the right the way is worse. Each circle is a pair; circles of nearly equal pairs stand above "
        f"each other. The bar shows the mean difference {interval} A triangle marks pairs, or an end of the bar, "
        "that are beyond the axis.",
        ((WAITING, f"margin, {runs.shown_margin}"), (MIDDLE, "no difference")),
        chart,
    )


@dataclass(frozen=True, slots=True)
class _Marks:
    """The pairs of a way: values and levels of those on the axis, and how many are beyond each of its ends."""

    values: tuple[float, ...]
    texts: tuple[str, ...]
    levels: tuple[int, ...]
    n_left: int
    n_right: int

    @classmethod
    def of(cls, runs: PairedRuns, edges: tuple[float, float]) -> Self:
        start, end = edges
        pairs = sorted((runs.scaled(value), runs.shown(value, sign=True)) for value in runs.differences.tolist())
        on_axis = [(value, text) for value, text in pairs if start <= value <= end]
        values, texts = zip(*on_axis, strict=True) if on_axis else ((), ())
        levels = _levels(values, MARK_WIDTH * (end - start))
        n_left = sum(value < start for value, _ in pairs)
        return cls(values, texts, levels, n_left, len(pairs) - len(on_axis) - n_left)

    @property
    def n_levels(self) -> int:
        return 1 + max(self.levels, default=0)


def _levels(values: Sequence[float], width: float) -> tuple[int, ...]:
    """The level of each of some ascending values: the lowest one without a mark closer than a width, or the last one.

    Examples
    --------
    >>> _levels([0.0, 0.5, 0.5, 3.0], 1.0)
    (0, 1, 2, 0)
    """
    last: list[float] = []  # value of each level
    levels = []
    for value in values:
        level = next((place for place, before in enumerate(last) if value - before >= width), len(last))
        level = min(level, MOST_LEVELS - 1)
        last[level : level + 1] = [value]
        levels.append(level)
    return tuple(levels)


def _edges(margin: float, tested: Sequence[PairedRuns]) -> tuple[float, float]:
    """The ends of the axis: around 0, the margin, the pairs and their bounds, but not far beyond the closest way."""
    shown = [runs.scaled(value) for runs in tested for value in (*runs.differences, *runs.bounds)]
    shown = [value for value in shown if math.isfinite(value)]
    medians = [abs(runs.scaled(statistics.median(runs.differences))) for runs in tested if len(runs.differences)]
    closest = min(medians, default=margin)  # without differences, all pairs diverged
    end = max(MARGINS_SHOWN * margin, BEYOND_CLOSEST * closest) or 1.0
    room = 0.25 * (margin or end)  # a fraction of a reference that diverged is 0
    least, most = min([0.0, *shown]) - room, max([margin, *shown]) + room
    return max(least, -end), min(most, end)


def _draw(
    chart: Any,
    label: str,
    colour: str,
    runs: PairedRuns,
    marks: _Marks,
    edges: tuple[float, float],
    level_height: float,
) -> None:
    """Draw the pairs of one way, the bounds of their mean, and how many are beyond the axis."""
    start, end = edges
    middle = (label, BELOW_NAME)
    if not any(map(math.isnan, runs.bounds)):  # one pair has no bounds
        left, right = ([min(max(runs.scaled(bound), start), end)] for bound in runs.bounds)
        height = level_height * (marks.n_levels + 1)
        chart.hbar(
            y=[middle], left=left, right=right, height=height, fill_color=colour, fill_alpha=0.3, line_color=None
        )
        for bound, is_right in zip(map(runs.scaled, runs.bounds), (False, True), strict=True):
            is_cut = bound > end if is_right else bound < start
            if is_cut and math.isfinite(bound) and not (marks.n_right if is_right else marks.n_left):
                _draw_triangle(chart, middle, colour, edges, is_right=is_right)
    centre = (marks.n_levels - 1) / 2
    source = ColumnDataSource(
        {
            "way": [label] * len(marks.values),
            "row": [(label, BELOW_NAME + level_height * (level - centre)) for level in marks.levels],
            "x": marks.values,
            "text": marks.texts,
        }
    )
    circles = chart.scatter("x", "row", source=source, marker="circle", size=8, color=colour, fill_alpha=0.6)
    chart.add_tools(HoverTool(renderers=[circles], tooltips=[("@way", "@text")]))
    mean = runs.scaled(runs.mean)
    for n_pairs, is_right in ((marks.n_left, False), (marks.n_right, True)):
        if n_pairs:
            beyond = mean > end if is_right else mean < start
            text = f"{n_pairs} pair{'s' if n_pairs > 1 else ''}" + (f", mean {runs.shown_mean}" if beyond else "")
            x = _draw_triangle(chart, middle, colour, edges, is_right=is_right)
            _draw_text(chart, x, middle, text, LEVEL_PIXELS * (marks.n_levels + 1) / 2, is_right=is_right)


def _draw_triangle(
    chart: Any, middle: tuple[str, float], colour: str, edges: tuple[float, float], *, is_right: bool
) -> float:
    """Draw a triangle at an end of the axis, and return where."""
    start, end = edges
    inset = 0.01 * (end - start)
    x, angle = (end - inset, -math.pi / 2) if is_right else (start + inset, math.pi / 2)
    chart.scatter([x], [middle], marker="triangle", angle=angle, size=9, color=colour, fill_alpha=0.6)
    return x


def _draw_text(
    chart: Any, x: float, middle: tuple[str, float], text: str, bar_pixels: float, *, is_right: bool
) -> None:
    """Write beside a triangle: at the right above the bar, at the left on it, as the name of the way is above."""
    align, x_offset, y_offset = ("right", 4, bar_pixels) if is_right else ("left", 12, 0)
    chart.add_layout(
        LabelSet(
            x="x",
            y="row",
            text="text",
            source=ColumnDataSource({"x": [x], "row": [middle], "text": [text]}),
            text_align=align,
            x_offset=x_offset,
            y_offset=y_offset,
            text_baseline="bottom" if is_right else "middle",
            text_font_size="12px",
        )
    )
