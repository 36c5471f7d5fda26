"""Reports of comparisons: an answer, one table of figures, three charts, and files. Templates have the words.

What renders them loads jinja2 when it is used, which workers never do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshuffle.lazy_names import loader
from dshuffle.report.summary import CPU_BOUND, Comparison, TrainingPoint, WayResult, to_dict

if TYPE_CHECKING:
    from dshuffle.report.page import render_html as render_html
    from dshuffle.report.page import render_text as render_text
    from dshuffle.report.page import story as story
    from dshuffle.report.page import write_report as write_report

PAGE = ("render_html", "render_text", "story", "write_report")
__all__ = ["CPU_BOUND", "Comparison", "TrainingPoint", "WayResult", "to_dict", *PAGE]
__getattr__ = loader(__name__, dict.fromkeys(PAGE, "dshuffle.report.page"))
