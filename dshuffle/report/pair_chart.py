"""A chart of the pairs of runs: each pair's difference, the interval of the mean, and the margin."""

from __future__ import annotations

from typing import Any

from bokeh.models import ColumnDataSource, FactorRange, HoverTool

from dshuffle.noninferiority import PairedRuns
from dshuffle.report.charts import MIDDLE, WAITING, Chart, way_colour, way_figure
from dshuffle.report.summary import Comparison
from dshuffle.report.tables import tested_ways

MARGINS_SHOWN = 4.0
"""The axis ends at this many margins. Without an end, one bad way would hide the differences of all others."""


def pair_chart(comparison: Comparison) -> Chart | None:
    """Draw the pairs of all tested ways; None if no way was tested with pairs."""
    tested = [entry for entry in tested_ways(comparison) if entry[2].n_pairs]
    if not tested:
        return None
    runs = tested[-1][2]
    margin = runs.scaled(runs.limit)
    end = MARGINS_SHOWN * margin
    labels = [way.label for _, way, _ in tested]
    chart = way_figure(y_range=FactorRange(factors=labels[::-1]), height=90 + 34 * len(tested), x_range=(-end, end))
    chart.xaxis.axis_label = f"difference in {runs.test.metric} from reshuffling{runs.percent and ', in percent'}"
    chart.vspan(x=[0], line_color=MIDDLE, line_width=1)
    chart.vspan(x=[margin], line_color=WAITING, line_width=2, line_dash="dashed")
    for place, way, pairs in tested:
        _draw(chart, way.label, way_colour(place), pairs, end)
    return Chart(
        "Pairs of runs",
        "Each mark is a pair: a run with the way, and one that reshuffles everything with the same seeds. On the right "
        "the way is worse. The bar is the 95 % interval of the mean difference. Triangles are beyond the axis.",
        ((WAITING, f"margin, {runs.shown(runs.limit)}"), (MIDDLE, "no difference")),
        chart,
    )


def _draw(chart: Any, label: str, colour: str, pairs: PairedRuns, end: float) -> None:
    """Draw the pairs of one way, and its interval."""
    least, most = (min(max(pairs.scaled(bound), -end), end) for bound in pairs.interval)
    chart.hbar(y=[label], left=[least], right=[most], height=0.5, fill_color=colour, fill_alpha=0.3, line_color=None)
    values = [pairs.scaled(difference) for difference in pairs.differences]
    source = ColumnDataSource(
        {
            "way": [label] * len(values),
            "x": [min(max(value, -0.98 * end), 0.98 * end) for value in values],
            "marker": ["circle" if abs(value) <= end else "triangle" for value in values],
            "angle": [0.0 if abs(value) <= end else -1.5708 if value > 0 else 1.5708 for value in values],
            "text": [pairs.shown(difference, sign=True) for difference in pairs.differences],
        }
    )
    marks = chart.scatter(
        "x", "way", source=source, marker="marker", angle="angle", size=9, color=colour, fill_alpha=0.6
    )
    chart.add_tools(HoverTool(renderers=[marks], tooltips=[("@way", "@text")]))
