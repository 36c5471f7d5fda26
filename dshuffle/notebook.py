"""HTML for notebooks: a heading, facts by name, and a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape


def html_summary(
    title: str,
    facts: Mapping[str, object],
    headings: Sequence[str] = (),
    rows: Iterable[Sequence[object]] = (),
) -> str:
    """Return a heading, the facts as a list of names and values, and a table where there are headings.

    Examples
    --------
    >>> html_summary("Dataset", {"samples": 10})
    '<div><b>Dataset</b><table><tr><th>samples</th><td>10</td></tr></table></div>'
    """
    lines = "".join(f"<tr><th>{_cell(name)}</th><td>{_cell(value)}</td></tr>" for name, value in facts.items())
    return f"<div><b>{escape(title)}</b><table>{lines}</table>{html_table(headings, rows) if headings else ''}</div>"


def html_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table.

    Examples
    --------
    >>> html_table(["x"], [[1]])
    '<table><thead><tr><th>x</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{_cell(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    return escape(str(value))
