"""The form of the tables in the docs."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the docs are not here")


def test_each_row_of_a_table_is_one_line():
    """A row that is broken over two lines becomes two rows."""
    pages = sorted(DOCS.glob("*.md"))
    assert [row for page in pages for row in re.findall(r"^\|.*[^|\s]\s*$", page.read_text(), re.MULTILINE)] == []
