"""Reports of comparisons: tables, charts and files. Only the last two need Bokeh, which loads when they are used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dshuffle.report.summary import (
    CPU_BOUND,
    Comparison,
    Figures,
    TrainingPoint,
    WayResult,
    figures,
    to_dict,
)
from dshuffle.report.tables import comparison_tables
from dshuffle.report.verdict import verdict, verdict_sentences

if TYPE_CHECKING:
    from dshuffle.report.files import write_report
    from dshuffle.report.html import render_html
    from dshuffle.report.page import chart_page

__all__ = [
    "CPU_BOUND",
    "Comparison",
    "Figures",
    "TrainingPoint",
    "WayResult",
    "chart_page",
    "comparison_tables",
    "figures",
    "render_html",
    "to_dict",
    "verdict",
    "verdict_sentences",
    "write_report",
]

_WITH_BOKEH = {
    "chart_page": "dshuffle.report.page",
    "render_html": "dshuffle.report.html",
    "write_report": "dshuffle.report.files",
}


def __getattr__(name: str) -> object:
    if name not in _WITH_BOKEH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WITH_BOKEH[name]), name)
