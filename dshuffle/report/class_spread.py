"""Spread of the classes over the shards, as a table and as a box plot.

References
----------
Provatas et al. (2021), Figure 7; see docs/papers.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
from bokeh.embed import file_html
from bokeh.models import ColumnDataSource, FactorRange, HoverTool
from bokeh.plotting import figure
from bokeh.resources import INLINE
from numpy.typing import NDArray

from dshuffle.report.charts import BLUE, LIGHT
from dshuffle.units import human_count

MOST_CLASSES = 60
"""Largest number of classes in a plot. More boxes are too thin to see."""
HEADINGS = ("class", "samples", "min per shard", "median", "max", "max - min")

Counts = NDArray[np.int64]


def widest(counts: Counts, most: int) -> NDArray[np.int64]:
    """Select the classes whose counts differ the most between shards, in ascending order.

    Examples
    --------
    >>> widest(np.array([[5, 5], [1, 9], [4, 6]]), 2)
    array([1, 2])
    """
    return np.sort(np.argsort(-np.ptp(counts, axis=1), kind="stable")[:most])


def class_rows(counts: Counts, classes: Sequence[str], most: int) -> list[tuple[str, ...]]:
    """Format the ``(classes, n_workers)`` counts as table rows, for the classes with the widest spread.

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
    """Draw a box plot of the counts per shard for each class, as a self-contained HTML page.

    Parameters
    ----------
    counts
        ``(classes, n_workers)`` numbers of samples.
    classes
        Names of the classes.
    title
        Title of the plot.
    """
    places = widest(counts, MOST_CLASSES)
    low, first, median, third, high = np.percentile(counts[places], [0, 25, 50, 75, 100], axis=1)
    names = [classes[place] for place in places.tolist()]
    source = ColumnDataSource(
        {"class": names, "low": low, "first": first, "median": median, "third": third, "high": high}
    )
    shown = (
        "" if len(places) == len(counts) else f" ({len(places)} of {len(counts)} classes, those with the widest spread)"
    )
    chart = figure(
        x_range=FactorRange(factors=names),
        title=title + shown,
        height=420,
        sizing_mode="stretch_width",
        toolbar_location=None,
        x_axis_label="class",
        y_axis_label="samples per shard: minimum, quartiles, maximum",
    )
    chart.segment("class", "low", "class", "first", source=source, color=LIGHT)
    chart.segment("class", "third", "class", "high", source=source, color=LIGHT)
    boxes = chart.vbar("class", 0.6, "third", "first", source=source, fill_color=BLUE, line_color=BLUE, fill_alpha=0.4)
    for end in ("low", "high"):
        chart.rect("class", end, 0.3, 1, height_units="screen", source=source, color=LIGHT)
    chart.rect("class", "median", 0.6, 2, height_units="screen", source=source, color=BLUE)
    tips = [(name, f"@{name}") for name in ("class", "low", "first", "median", "third", "high")]
    chart.add_tools(HoverTool(renderers=[boxes], tooltips=tips))
    chart.xaxis.major_label_orientation = 0.8 if len(names) > 12 else "horizontal"
    return str(file_html(chart, INLINE, escape(title)))
