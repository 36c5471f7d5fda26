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
    listed = "".join(f"<tr><th>{_cell(name)}</th><td>{_cell(value)}</td></tr>" for name, value in facts.items())
    table = ""
    if headings:
        head = "".join(f"<th>{_cell(heading)}</th>" for heading in headings)
        body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div><b>{escape(title)}</b><table>{listed}</table>{table}</div>"


def _cell(value: object) -> str:
    return escape(str(value))
