"""Spread of the classes over the shards, as a table and as a box plot.

References
----------
Provatas et al. (2021), Figure 7; see docs/papers.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dshuffle.report.page import templates
from dshuffle.units import human_count

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
    quartiles = np.percentile(counts[:, :shown], [0, 25, 50, 75, 100], axis=0)
    top = 1.05 * max(1.0, float(quartiles.max()))
    fewest, most = (
        [classes[place] for place in find(counts[:, :shown], axis=0).tolist()] for find in (np.argmin, np.argmax)
    )
    boxes = []
    for rank, (low, first, median, third, high) in enumerate(quartiles.T.tolist()):
        ends = f"{human_count(low)} of {fewest[rank]}", f"{human_count(high)} of {most[rank]}"
        heights = [100 * value / top for value in (low, first, median, third, high)]
        boxes.append(
            {"title": f"worker {rank}: {ends[0]}, median {human_count(median)}, {ends[1]}", "heights": heights}
        )
    facts = {"shown": shown, "n_workers": counts.shape[1], "n_classes": len(counts), "top": human_count(top / 1.05)}
    return templates(html=True).get_template("boxes.html").render(title=title, boxes=boxes, **facts)
