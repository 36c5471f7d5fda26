"""What scripts of studies share: a type of options, and pages of charts."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from bokeh.embed import file_html
from bokeh.layouts import column
from bokeh.models.widgets.markups import Div
from bokeh.resources import INLINE


def at_least(least: int) -> Callable[[str], int]:
    """Return the ``type`` of an option of ``argparse`` that is an integer >= ``least``."""

    def parse(text: str) -> int:
        if not text.strip().lstrip("+-").isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text} is not allowed; it must be an integer >= {least}")
        return int(text)

    return parse


def chart_page(title: str, text: str, sections: Iterable[tuple[str, Sequence[Any]]]) -> str:
    """Return a page of charts under headings, which loads nothing from elsewhere."""
    parts: list[Any] = [Div(text=f"<h1>{escape(title)}</h1><p>{escape(text)}</p>")]
    for heading, plots in sections:
        parts += [Div(text=f"<h2>{escape(heading)}</h2>")] if heading else []
        parts += plots
    return str(file_html(column(parts, sizing_mode="stretch_width"), INLINE, f"dshuffle: {title}"))
