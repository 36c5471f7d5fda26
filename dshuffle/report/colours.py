"""Colours of the report, each for white and for dark pages.

Hues mean ways: Okabe and Ito's palette for colour-blind readers without the hue that marks waiting, and five more. The
default comparison has ten ways. Greys and browns are for amounts. ``theme.js`` repaints charts, which no style sheet
reaches, with the pairs of :data:`DARK_COLOURS`.
"""

from __future__ import annotations

import json

from dshuffle.records import PHASES

BLUE, ORANGE, GREEN, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"
SLATE, WINE, BROWN, LIME, NAVY = "#6A5ACD", "#A2285D", "#7F4F24", "#8DB600", "#27408B"
WAY_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, SLATE, WINE, BROWN, LIME, NAVY)
WAITING = "#D55E00"
"""Time that training waits: the only part of a bar to worry about."""
DARK, MIDDLE, LIGHT = "#5B6470", "#8A929C", "#BCC2C9"
"""Greys for amounts, told apart by the key above each chart."""
PHASE_COLOURS = dict(zip(PHASES, ("#7A6300", "#937900", "#A98E1A", "#BFA645", "#D2BF74", "#E9DFB9"), strict=True))

_DARK_WAYS = (
    *("#4FA3E0", "#F2B630", "#2CC79C", "#E39BC5", "#9ADAFF"),
    *("#A99DFF", "#EC6B9F", "#CB9260", "#B8DC3C", "#8FA7F2"),
)
_DARK_PHASES = ("#EFE0A6", "#D9C780", "#C2AC58", "#A58E3B", "#857026", "#5F5018")
DARK_COLOURS = {
    **dict(zip(WAY_COLOURS, _DARK_WAYS, strict=True)),
    **dict(zip(PHASE_COLOURS.values(), _DARK_PHASES, strict=True)),
    WAITING: "#EE7A28",
    DARK: "#A3ADB8",
    MIDDLE: "#8B939D",
    LIGHT: "#4C545D",  # on a dark page, what matters least is the darkest
}
"""For each colour on a white page, the one that means the same on a dark page."""


def way_colour(place: int) -> str:
    """Return the colour of the way at this position; it is the same in every chart."""
    return WAY_COLOURS[place % len(WAY_COLOURS)]


def declarations(name: str, colour: str) -> str:
    """The style of an element whose property ``name`` has a colour, on both kinds of pages.

    Browsers that do not know ``light-dark`` keep the first one.

    Examples
    --------
    >>> declarations("fill", "#0072B2")
    'fill:#0072B2;fill:light-dark(#0072B2,#4FA3E0)'
    >>> declarations("fill", "white")
    'fill:white'
    """
    if colour not in DARK_COLOURS:
        return f"{name}:{colour}"
    return f"{name}:{colour};{name}:light-dark({colour},{DARK_COLOURS[colour]})"


def colours_script() -> str:
    """The pairs of colours, as ``theme.js`` reads them."""
    return f"const darkColours = {json.dumps(DARK_COLOURS)};"
