"""A self-contained HTML page of charts, for wide and narrow screens, in light and dark mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.resources import Resources

from dshuffle.report.colours import colours_script

STYLE = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
THEME = (Path(__file__).parent / "theme.js").read_text(encoding="utf-8")


def page(title: str, body: str, script: str) -> str:
    """Return a document that loads nothing from elsewhere.

    Parameters
    ----------
    title
        Title of the document, as text.
    body
        HTML of its content.
    script
        Script element of its charts, from :func:`bokeh.embed.components`.
    """
    # Bokeh's core alone makes the file a third as large as with its widgets and tables.
    library = Resources(mode="inline", components=["bokeh"]).render()
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{STYLE}
</style>
{library}
</head>
<body>
<main>
{body}
</main>
{script}
<script>
{colours_script()}
{THEME}
</script>
</body>
</html>
"""


def chart_page(title: str, text: str, sections: Iterable[tuple[str, Sequence[Any]]]) -> str:
    """Return a page of charts in the style of the report.

    Parameters
    ----------
    title, text
        Heading, and a paragraph below it.
    sections
        Heading and Bokeh figures of each section. Figures get the width of the page; several figures of a section are
        side by side if there is room.

    Examples
    --------
    >>> from bokeh.plotting import figure
    >>> chart = figure(height=200)
    >>> _ = chart.line([1, 2], [3, 4])
    >>> "<h1>Lines</h1>" in chart_page("Lines", "Two points.", [("", [chart])])
    True
    """
    page_parts = [(heading, list(figures)) for heading, figures in sections]
    for _, figures in page_parts:
        for plot in figures:
            plot.update(sizing_mode="stretch_width", toolbar_location=None)
            plot.update(background_fill_color=None, border_fill_color=None, outline_line_color=None)
    script, divisions = components([plot for _, figures in page_parts for plot in figures])
    remaining = iter(divisions)
    parts = []
    for heading, figures in page_parts:
        inner = "".join(f"<figure>{next(remaining)}</figure>" for _ in figures)
        name = f"<h2>{escape(heading)}</h2>" if heading else ""
        parts.append(f"{name}<section class='charts'>{inner}</section>" if len(figures) > 1 else f"{name}{inner}")
    head = f"<header><p class='name'>dshuffle</p><h1>{escape(title)}</h1><p class='verdict'>{escape(text)}</p></header>"
    return page(f"dshuffle: {title}", "\n".join([head, *parts]), script)
