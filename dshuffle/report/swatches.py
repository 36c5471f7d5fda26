"""Small drawings beside the names of a key: what an amount, or the line of a way, looks like in a chart."""

from __future__ import annotations

from html import escape

from dshuffle.report.colours import declarations, way_colour

WAY_DASHES = ("solid", "dashed", "dotted", "dotdash")
WAY_MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "hex", "star")

# As Bokeh draws the dashes, and the markers around (16, 6).
_DASH_ARRAYS = {"solid": "none", "dashed": "6", "dotted": "2 4", "dotdash": "2 4 6 4"}
_MARKER_POINTS = {
    "square": "12,2 20,2 20,10 12,10",
    "triangle": "16,1.5 20.5,9.5 11.5,9.5",
    "diamond": "16,0.5 20,6 16,11.5 12,6",
    "inverted_triangle": "16,10.5 20.5,2.5 11.5,2.5",
    "hex": "20.5,6 18.2,10 13.8,10 11.5,6 13.8,2 18.2,2",
    "star": "16,0.5 17.3,4.3 21.2,4.3 18.1,6.7 19.2,10.5 16,8.2 12.8,10.5 13.9,6.7 10.8,4.3 14.7,4.3",
}


def dash_of(place: int) -> str:
    """Return Bokeh's name of the dashes of the way at this position."""
    return WAY_DASHES[place % len(WAY_DASHES)]


def marker_of(place: int) -> str:
    """Return Bokeh's name of the marker of the way at this position."""
    return WAY_MARKERS[place % len(WAY_MARKERS)]


def swatch(colour: str) -> str:
    """A square of a colour."""
    return f"<i style='{escape(declarations('background', colour))}'></i>"


def line_swatch(place: int) -> str:
    """The line of the way at this position, with its dashes and its marker.

    Examples
    --------
    >>> line_swatch(0).count("<circle"), line_swatch(1).count("<polygon")
    (1, 1)
    """
    colour, marker = way_colour(place), marker_of(place)
    style = escape(f"{declarations('stroke', colour)};{declarations('fill', colour)}")
    points = _MARKER_POINTS.get(marker)
    shape = "circle cx='16' cy='6' r='4'" if points is None else f"polygon points='{points}'"
    return (
        f"<svg width='32' height='12' aria-hidden='true' style='{style}'>"
        f"<line x1='0' y1='6' x2='32' y2='6' stroke-width='2.5' stroke-dasharray='{_DASH_ARRAYS[dash_of(place)]}'/>"
        f"<{shape} stroke='none'/></svg>"
    )
