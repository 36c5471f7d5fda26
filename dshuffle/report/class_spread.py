"""How evenly classes are spread over shards, as a table and as a box plot (paper 002, Fig. 7)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
from bokeh.embed import file_html
from bokeh.models import ColumnDataSource, FactorRange, HoverTool
from bokeh.plotting import figure
from bokeh.resources import INLINE
from numpy.typing import NDArray

from dshuffle.report.charts import BLUE, GREY
from dshuffle.units import human_count

MOST_CLASSES = 60
"""A plot shows so many classes, those with the widest spread; more boxes are too thin to see."""
HEADINGS = ("class", "samples", "fewest a shard", "median", "most", "most - fewest")

Counts = NDArray[np.int64]


def widest(counts: Counts, most: int) -> NDArray[np.int64]:
    """Positions of the classes whose counts differ the most from shard to shard, in ascending order.

    Examples
    --------
    >>> widest(np.array([[5, 5], [1, 9], [4, 6]]), 2)
    array([1, 2])
    """
    return np.sort(np.argsort(-np.ptp(counts, axis=1), kind="stable")[:most])


def class_rows(counts: Counts, classes: Sequence[str], most: int) -> list[tuple[str, ...]]:
    """The cells of a table: classes by shards in, one row for each of the widest spread classes out.

    Examples
    --------
    >>> class_rows(np.array([[5, 6, 5]]), ["cat"], 10)
    [('cat', '16', '5', '5', '6', '1')]
    """
    rows = []
    for place in widest(counts, most).tolist():
        row = counts[place]
        figures = (row.sum(), row.min(), np.median(row), row.max(), np.ptp(row))
        rows.append((classes[place], *(human_count(float(value)) for value in figures)))
    return rows


def box_plot_page(counts: Counts, classes: Sequence[str], title: str) -> str:
    """An HTML page, which loads nothing, with a box for each class over its counts in the shards.

    Parameters
    ----------
    counts
        ``(classes, n_workers)``.
    classes
        Their names.
    title
        What was sharded, and how.
    """
    places = widest(counts, MOST_CLASSES)
    low, first, median, third, high = np.percentile(counts[places], [0, 25, 50, 75, 100], axis=1)
    names = [classes[place] for place in places.tolist()]
    source = ColumnDataSource(
        {"class": names, "low": low, "first": first, "median": median, "third": third, "high": high}
    )
    shown = "" if len(places) == len(counts) else f" ({len(places)} of {len(counts)} classes, the widest)"
    chart = figure(
        x_range=FactorRange(factors=names),
        title=title + shown,
        height=420,
        sizing_mode="stretch_width",
        toolbar_location=None,
        x_axis_label="class",
        y_axis_label="samples of the class in a shard: fewest, quartiles, most",
    )
    chart.segment("class", "low", "class", "first", source=source, color=GREY)
    chart.segment("class", "third", "class", "high", source=source, color=GREY)
    boxes = chart.vbar("class", 0.6, "third", "first", source=source, fill_color=BLUE, line_color=BLUE, fill_alpha=0.4)
    for end in ("low", "high"):
        chart.rect("class", end, 0.3, 1, height_units="screen", source=source, color=GREY)
    chart.rect("class", "median", 0.6, 2, height_units="screen", source=source, color=BLUE)
    tips = [(name, f"@{name}") for name in ("class", "low", "first", "median", "third", "high")]
    chart.add_tools(HoverTool(renderers=[boxes], tooltips=tips))
    chart.xaxis.major_label_orientation = 0.8 if len(names) > 12 else "horizontal"
    return str(file_html(chart, INLINE, escape(title)))
