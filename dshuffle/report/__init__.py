"""Reports of comparisons: an answer, one table of figures, three charts, and files. Templates have the words.

What renders them loads jinja2 when it is used, which workers never do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshuffle.lazy_names import loader
from dshuffle.report.summary import CPU_BOUND, Comparison, Figures, TrainingPoint, WayResult, figures, to_dict

if TYPE_CHECKING:
    from dshuffle.report.page import (
        Table,
        chart_page,
        meanings,
        names_of,
        render_html,
        render_text,
        story,
        tables_of,
        write_report,
    )

__all__ = [
    "CPU_BOUND",
    "Comparison",
    "Figures",
    "Table",
    "TrainingPoint",
    "WayResult",
    "chart_page",
    "figures",
    "meanings",
    "names_of",
    "render_html",
    "render_text",
    "story",
    "tables_of",
    "to_dict",
    "write_report",
]

PAGE = (
    "Table",
    "chart_page",
    "meanings",
    "names_of",
    "render_html",
    "render_text",
    "story",
    "tables_of",
    "write_report",
)
__getattr__ = loader(__name__, dict.fromkeys(PAGE, "dshuffle.report.page"))
