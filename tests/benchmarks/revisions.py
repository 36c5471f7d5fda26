"""Compare the speed of two revisions on this machine, part by part.

    python tests/benchmarks/revisions.py BEFORE AFTER [--rounds 7] [--only NAME ...]

The benchmarks of ``suite.py`` (of this checkout) run in processes of their own, first with the one revision and then
with the other, and so on in turn. So whatever else the machine does meets both. A first round, which compiles, does not
count. For every part: median seconds of both, and the median and the quartiles of the ratios of the rounds. Parts whose
quartiles are both on one side of 1, and whose median differs by more than 5 %, are marked.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from dshuffle.units import human_seconds

HERE = Path(__file__).parent
MARKED = 0.05
"""Least difference from a ratio of 1 that is marked."""


def checkout(revision: str, folder: Path) -> None:
    """Put the files of a revision into a folder."""
    command = ["git", "-C", str(HERE.parents[1]), "archive", "--format=tar", revision, "dshuffle"]
    archive = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def measure(folder: Path, names: Sequence[str]) -> dict[str, float]:
    """Run the suite in a process of its own, with the package of a folder."""
    command = [sys.executable, str(HERE / "suite.py"), *names]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    if ran.returncode:
        sys.exit(ran.stderr)
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def compared(before: Sequence[Mapping[str, float]], after: Sequence[Mapping[str, float]]) -> list[tuple[str, ...]]:
    """Rows of a table: part, seconds before and after, ratio and its quartiles, and what that means.

    Examples
    --------
    >>> compared([{"x": 1.0}] * 3, [{"x": 0.5}, {"x": 0.5}, {"x": 0.6}])
    [('x', '1.00 s', '500 ms', '0.50', '0.50-0.60', 'faster')]
    """
    rows = []
    for name in before[0]:
        ratios = [new[name] / old[name] for old, new in zip(before, after, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        clear = (high < 1 or low > 1) and abs(middle - 1) > MARKED
        seconds = [human_seconds(statistics.median(one[name] for one in each)) for each in (before, after)]
        verdict = ("faster" if middle < 1 else "slower") if clear else ""
        rows.append((name, *seconds, f"{middle:.2f}", f"{low:.2f}-{high:.2f}", verdict))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / which for which in ("before", "after")]
        for revision, folder in zip((options.before, options.after), folders, strict=True):
            checkout(revision, folder)
        rounds: list[list[dict[str, float]]] = []
        for number in range(options.rounds + 1):
            order = folders if number % 2 else folders[::-1]
            found = {folder: measure(folder, options.only) for folder in order}
            rounds.append([found[folder] for folder in folders])
            print(f"round {number} of {options.rounds}", file=sys.stderr)
    heads = ("part", options.before, options.after, "ratio", "quartiles", "")
    rows = [heads, *compared([one[0] for one in rounds[1:]], [one[1] for one in rounds[1:]])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
