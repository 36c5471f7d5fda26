"""A chart of the pairs of runs: each pair's difference, the interval of the mean, and the margin."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bokeh.models import ColumnDataSource, FactorRange, HoverTool
from bokeh.models.annotations import LabelSet

from dshuffle.noninferiority import PairedRuns
from dshuffle.report.charts import Chart, way_figure
from dshuffle.report.colours import MIDDLE, WAITING, way_colour
from dshuffle.report.summary import Comparison
from dshuffle.report.tables import tested_ways

MARGINS_SHOWN = 4.0
"""The axis ends at this many margins at most. Without an end, one bad way would hide the differences of all others."""
BEYOND_CLOSEST = 1.5
"""If all ways are bad, the axis ends at this many times the median difference of the best one."""


def pair_chart(comparison: Comparison) -> Chart | None:
    """Draw the pairs of all tested ways; None if no way was tested with pairs."""
    tested = [entry for entry in tested_ways(comparison) if entry[2].n_pairs]
    if not tested:
        return None
    runs = tested[-1][2]
    margin = runs.scaled(runs.limit)
    edges = _edges(margin, [pairs for _, _, pairs in tested])
    labels = [way.label for _, way, _ in tested]
    chart = way_figure(y_range=FactorRange(factors=labels[::-1]), height=90 + 34 * len(tested), x_range=edges)
    chart.xaxis.axis_label = f"difference in {runs.test.metric} from reshuffling{runs.percent and ', in percent'}"
    chart.vspan(x=[0], line_color=MIDDLE, line_width=1)
    chart.vspan(x=[margin], line_color=WAITING, line_width=2, line_dash="dashed")
    for place, way, pairs in tested:
        _draw(chart, way.label, way_colour(place), pairs, edges)
    return Chart(
        "Pairs of runs",
        "Each mark is a pair: a run with the way, and one that reshuffles everything with the same seeds. On the right "
        "the way is worse. The bar is the 95 % interval of the mean difference. Triangles are beyond the axis; their "
        "mean is written beside them.",
        ((WAITING, f"margin, {runs.shown(runs.limit)}"), (MIDDLE, "no difference")),
        chart,
    )


def _edges(margin: float, tested: Sequence[PairedRuns]) -> tuple[float, float]:
    """The ends of the axis: around 0, the margin, the pairs and their intervals, but not far beyond the closest way."""
    shown = [runs.scaled(value) for runs in tested for value in (*runs.differences, *runs.interval)]
    closest = min(abs(runs.scaled(statistics.median(runs.differences))) for runs in tested)
    end = max(MARGINS_SHOWN * margin, BEYOND_CLOSEST * closest)
    room = 0.25 * margin
    least, most = min(0.0, *shown) - room, max(margin, *shown) + room
    return max(least, -end), min(most, end)


def _draw(chart: Any, label: str, colour: str, pairs: PairedRuns, edges: tuple[float, float]) -> None:
    """Draw the pairs of one way, its interval, and its mean if that is beyond the axis."""
    start, end = edges
    inset = 0.01 * (end - start)
    least, most = (min(max(pairs.scaled(bound), start), end) for bound in pairs.interval)
    chart.hbar(y=[label], left=[least], right=[most], height=0.5, fill_color=colour, fill_alpha=0.3, line_color=None)
    values = [pairs.scaled(difference) for difference in pairs.differences]
    source = ColumnDataSource(
        {
            "way": [label] * len(values),
            "x": [min(max(value, start + inset), end - inset) for value in values],
            "marker": ["circle" if start <= value <= end else "triangle" for value in values],
            "angle": [0.0 if start <= value <= end else -1.5708 if value > end else 1.5708 for value in values],
            "text": [pairs.shown(difference, sign=True) for difference in pairs.differences],
        }
    )
    marks = chart.scatter(
        "x", "way", source=source, marker="marker", angle="angle", size=9, color=colour, fill_alpha=0.6
    )
    chart.add_tools(HoverTool(renderers=[marks], tooltips=[("@way", "@text")]))
    mean = pairs.scaled(pairs.mean)
    if not start <= mean <= end:
        right = mean > end
        place = ColumnDataSource(
            {"x": [end if right else start], "way": [label], "text": [pairs.shown(pairs.mean, sign=True)]}
        )
        align, offset = ("right", -18) if right else ("left", 18)
        chart.add_layout(
            LabelSet(
                x="x",
                y="way",
                text="text",
                source=place,
                text_align=align,
                x_offset=offset,
                text_baseline="middle",
                text_font_size="12px",
            )
        )
