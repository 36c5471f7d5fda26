"""Reports of comparisons: an answer, one table of figures, three charts, and files. Templates have the words."""

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
from dshuffle.report.summary import CPU_BOUND, Comparison, Figures, TrainingPoint, WayResult, figures, to_dict

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
