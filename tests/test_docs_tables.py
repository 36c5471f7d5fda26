"""Tables of the docs against the code, and their figures against new measurements."""

import re
from pathlib import Path

import pytest

from dshuffle.planning.shuffling_error import nguyen_equation_11, shuffling_error

DOCS = Path(__file__).parents[1] / "docs"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the docs are not here")


def rows_of(page, heading):
    """The cells of the table of a page whose first heading this is."""
    lines = (DOCS / page).read_text().splitlines()
    [first] = [number for number, line in enumerate(lines) if line.startswith(f"| {heading} |")]
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert rows
    return rows


def test_the_table_of_shuffling_errors():
    for q, n, fraction, formula, distance in rows_of("papers.md", "samples"):
        exchange = int(q.replace(",", "")), int(n), float(fraction)
        assert f"{nguyen_equation_11(*exchange):.3f}" == formula
        value, is_exact = shuffling_error(*exchange)
        assert ("" if is_exact else "at least ") + f"{value:.3f}" == distance


def test_each_row_of_a_table_is_one_line():
    """A row that is broken over two lines becomes two rows."""
    pages = sorted(DOCS.glob("*.md"))
    assert [row for page in pages for row in re.findall(r"^\|.*[^|\s]\s*$", page.read_text(), re.MULTILINE)] == []
