"""Every relative link of the documentation leads to a file, and every anchor to a heading."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "pipelines/README.md", "storage/README.md"]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))
pytestmark = pytest.mark.skipif(
    not (ROOT / "CHANGELOG.md").exists(), reason="not a checkout (tests of the installed wheel)"
)


def prose(page):
    """The text of a page without fenced code, of which no link is a link and no comment a heading."""
    return re.sub(r"^( *)(```+|~~~+).*?^\1\2[ \t]*$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def links(text):
    """Targets of all inline links and images, and of reference definitions."""
    text = re.sub(r"(`+).+?\1", "code", text)
    inline = re.findall(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)", text)
    return inline + re.findall(r"^ {0,3}\[[^\]^]+\]:\s*<?(\S+?)>?\s*$", text, re.MULTILINE)


def anchors(text):
    """Anchors of all headings, as GitHub makes them."""
    found = set(re.findall(r"<a\s+(?:id|name)=\"([^\"]+)\"", text))
    counts = {}
    for title in re.findall(r"^ {0,3}#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*$", text, re.MULTILINE):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", title)  # of a link its text
        shown = re.sub(r"(?<!\w)_([^_]+)_(?!\w)", r"\1", shown)  # emphasis; * is dropped as punctuation
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        count = counts.get(slug, 0)
        counts[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def broken_links(page):
    broken = []
    for link in links(prose(page)):
        if re.match(r"[a-z][a-z0-9+.-]*:", link, re.IGNORECASE):  # https:, mailto:
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        there = target.exists() and target.is_relative_to(ROOT)
        if not there or (anchor and (target.suffix != ".md" or anchor not in anchors(prose(target)))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("name", PAGES)
def test_every_relative_link_leads_somewhere(name):
    assert broken_links(ROOT / name) == []


def test_the_list_of_pages_is_complete():
    listed = {link.partition("#")[0] for link in links(prose(ROOT / "docs" / "index.md"))}
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} | {
        page.name for page in (ROOT / "docs").glob("*.ipynb")
    }
    assert pages - listed == {"index.md"}


@pytest.mark.parametrize("name", PAGES)
def test_files_that_a_page_names_exist(name):
    """Scripts in commands and files in code spans, from the root, from the package, or from a folder of scripts."""
    text = (ROOT / name).read_text()
    named = set(re.findall(r"\bpython ([\w./-]+\.py)", text)) | set(re.findall(r"`([\w.-]+/[\w./-]*\.py)`", text))
    folders = [ROOT, ROOT / "dshuffle", ROOT / "dshuffle" / "planning", ROOT / "pipelines", ROOT / "storage"]
    own = {"train.py"}  # a script of the reader
    assert {file for file in named - own if not any((folder / file).exists() for folder in folders)} == set()


def test_anchors_are_those_of_github():
    text = "# One `code`, two: three!\n## Same\n### Same\n## [Text](page.md) and *more*\n## snake_case\n## A -- b / c\n"
    assert anchors(text) == {
        "one-code-two-three",
        "same",
        "same-1",
        "text-and-more",
        "snake_case",
        "a----b--c",
    }
