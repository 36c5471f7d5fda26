"""Spread of the classes over the shards, as a table and as a box plot.

References
----------
Provatas et al. (2021), Figure 7; see docs/papers.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from bokeh.models import ColumnDataSource, FactorRange, HoverTool, Range1d
from bokeh.plotting import figure
from numpy.typing import NDArray

from dshuffle.report.page import chart_page
from dshuffle.units import human_count

BLUE, LIGHT = "#0072B2", "#BCC2C9"
MOST_WORKERS = 60
"""Largest number of workers in a plot. More boxes are too thin to see."""
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
    """Draw a box plot of the samples of each class for every worker, as a self-contained HTML page.

    Parameters
    ----------
    counts
        ``(classes, n_workers)`` numbers of samples.
    classes
        Names of the classes.
    title
        Title of the page.
    """
    shown = min(counts.shape[1], MOST_WORKERS)
    low, first, median, third, high = np.percentile(counts[:, :shown], [0, 25, 50, 75, 100], axis=0)
    fewest, most = (
        [classes[place] for place in find(counts[:, :shown], axis=0).tolist()] for find in (np.argmin, np.argmax)
    )
    names = [str(rank) for rank in range(shown)]
    source = ColumnDataSource(
        {
            "worker": names,
            "low": low,
            "first": first,
            "median": median,
            "third": third,
            "high": high,
            "fewest": [f"{human_count(value)} of {name}" for value, name in zip(low, fewest, strict=True)],
            "most": [f"{human_count(value)} of {name}" for value, name in zip(high, most, strict=True)],
        }
    )
    top = float(high.max())
    chart = figure(
        x_range=FactorRange(factors=names),
        y_range=Range1d(start=0, end=1.05 * max(1.0, top)),
        height=420,
        tools="",
        x_axis_label="worker",
        y_axis_label="samples of a class",
    )
    chart.xgrid.grid_line_color = None
    chart.segment("worker", "low", "worker", "first", source=source, color=LIGHT)
    chart.segment("worker", "third", "worker", "high", source=source, color=LIGHT)
    boxes = chart.vbar("worker", 0.6, "third", "first", source=source, fill_color=BLUE, line_color=BLUE, fill_alpha=0.4)
    for end in ("low", "high"):
        chart.rect("worker", end, 0.3, 1, height_units="screen", source=source, color=LIGHT)
    chart.rect("worker", "median", 0.6, 2, height_units="screen", source=source, color=BLUE)
    tips = [(name, f"@{name}") for name in ("worker", "fewest", "median", "most")]
    chart.add_tools(HoverTool(renderers=[boxes], tooltips=tips))
    note = f" The first {shown} of {counts.shape[1]} workers are shown." if shown < counts.shape[1] else ""
    text = (
        f"Each box is a worker: minimum, quartiles and maximum of its numbers of samples over the {len(counts)} "
        f"classes.{note}"
    )
    return chart_page(title, text, [("", [chart])])
