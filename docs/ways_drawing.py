"""Draws docs/ways.svg, the three questions that a way of shuffling answers: python docs/ways_drawing.py

The first panel shows real epochs of 3 workers and 24 samples, planned by dshuffle.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dshuffle.planning import Choices, EpochPlanner, ShuffleSpec

COLOURS = ("#0072B2", "#E69F00", "#009E73")
INK, QUIET = "#222222", "#8A9099"
N_WORKERS, N_SAMPLES, SIDE = 3, 24, 15


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start", colour: str = INK) -> str:
    """A line of text."""
    weight = ' font-weight="bold"' if size > 13 else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>{words}</text>'


def box(x: float, y: float, words: str, colour: str = "#FFFFFF", width: int = 62, ink: str = INK) -> str:
    """A box with a name."""
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="24" rx="4" fill="{colour}" stroke="{INK}"/>'
    return shape + text(x + width / 2, y + 16, words, 11, "middle", ink)


def arrow(x0: float, y0: float, x1: float, y1: float) -> str:
    """An arrow."""
    ends = f'x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}"'
    return f'<line {ends} stroke="{INK}" stroke-width="1.5" marker-end="url(#head)"/>'


def assignments(x: float, y: float) -> list[str]:
    """Samples of each worker in the next epoch, in the colour of the worker that trains on them now."""
    parts = [text(x, y, "1. assignment: who trains on which sample?", 14)]
    ways = (
        ("local", "nothing moves"),
        ("partial:0.25", "a fraction moves"),
        ("chunks:4", "whole groups move"),
        ("global", "anything moves"),
    )
    for place, (name, words) in enumerate(ways):
        spec = ShuffleSpec(N_SAMPLES, N_WORKERS, Choices(name, "storage", sharding="contiguous", seed=4))  # type: ignore[arg-type]
        planner = EpochPlanner(spec)
        before = planner.load().ranks
        after = planner.advance("storage").ranks
        top = y + 22 + place * 82
        parts += [text(x, top + 12, name), text(x, top + 29, words, 11, colour=QUIET)]
        for rank in range(N_WORKERS):
            for slot, sample in enumerate(np.flatnonzero(after == rank)):
                left = x + 128 + slot * (SIDE + 2)
                shape = f'<rect x="{left}" y="{top + rank * (SIDE + 4)}" width="{SIDE}" height="{SIDE}" rx="2"'
                parts.append(f'{shape} fill="{COLOURS[before[sample]]}"/>')
    parts.append(text(x, y + 22 + 4 * 82 + 2, "A row: a worker's next samples. A colour: the worker", 11, colour=QUIET))
    parts.append(text(x, y + 22 + 4 * 82 + 17, "that trains on them now. (Planned by dshuffle.)", 11, colour=QUIET))
    return parts


def workers(x: float, y: float) -> list[str]:
    """The boxes of all workers, side by side."""
    return [box(x + 76 * rank, y, f"worker {rank}", COLOURS[rank], ink="#FFFFFF") for rank in range(N_WORKERS)]


def deliveries(x: float, y: float) -> list[str]:
    """Where a worker gets the rows that it lacks."""
    parts = [text(x, y, "2. delivery: how do rows get there?", 14)]
    top = y + 22
    parts += [text(x, top + 12, "peer"), text(x, top + 29, "from a worker", 11, colour=QUIET)]
    parts += workers(x + 108, top + 14)
    for rank in range(2):
        middle = x + 108 + 76 * rank + 69
        parts += [arrow(middle - 7, top + 22, middle + 5, top + 22), arrow(middle + 7, top + 30, middle - 5, top + 30)]
    for place, (name, words, source, label) in enumerate(
        (
            ("server", "one row at a time", "server", "a, b, c"),
            ("coded", "one packet for all", "server", "a⊕b⊕c"),
            ("storage", "read again", "Zarr", "chunks"),
        )
    ):
        top = y + 104 + place * 82
        parts += [text(x, top + 12, name), text(x, top + 29, words, 11, colour=QUIET)]
        parts += [box(x + 184, top - 6, source, "#E8EAED"), text(x + 254, top + 10, label, 11)]
        for rank in range(N_WORKERS):
            end = x + 108 + 76 * rank + 31
            parts.append(arrow(x + 215, top + 18, end, top + 36))
        parts += workers(x + 108, top + 38)
    return parts


def caches(x: float, y: float) -> list[str]:
    """What a worker holds, and what it lacks of the next epoch's share."""
    parts = [text(x, y, "3. caching: what is kept beyond the share?", 14)]
    for place, (fraction, words) in enumerate(((1 / 3, "its share"), (2 / 3, "and an excess"), (1.0, "everything"))):
        top = y + 22 + place * 82
        parts += [text(x, top + 12, f"{fraction:.2g} of all rows"), text(x, top + 29, words, 11, colour=QUIET)]
        left, width = x + 128, 150
        parts.append(f'<rect x="{left}" y="{top}" width="{width}" height="20" rx="3" fill="none" stroke="{QUIET}"/>')
        parts.append(f'<rect x="{left}" y="{top}" width="{width / 3}" height="20" rx="3" fill="{COLOURS[0]}"/>')
        kept = width * (fraction - 1 / 3)
        if kept:
            parts.append(
                f'<rect x="{left + 50}" y="{top}" width="{kept}" height="20" fill="{COLOURS[0]}" opacity="0.4"/>'
            )
        missing = 1 - fraction
        lacks = f"{round(3 * missing)}/3 of the next share" if missing else "nothing"
        parts.append(text(left, top + 36, f"lacks {lacks}", 11, colour=QUIET))
    parts.append(text(x, y + 22 + 3 * 82 + 2, "Coded packets serve several workers at once,", 11, colour=QUIET))
    parts.append(text(x, y + 22 + 3 * 82 + 17, "because these hold each other's missing rows.", 11, colour=QUIET))
    return parts


def main() -> None:
    """Write the drawing."""
    head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1060 430" font-family="Helvetica, Arial, sans-serif">',
        f'<defs>{head}<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
        '<rect width="1060" height="430" rx="8" fill="#FFFFFF"/>',
        *assignments(20, 34),
        *deliveries(345, 34),
        *caches(735, 34),
        "</svg>",
    ]
    Path(__file__).with_name("ways.svg").write_text("\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
