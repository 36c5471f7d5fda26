"""Every `dshuffle` command that the documentation shows exists, with all options that it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dshuffle.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(ROOT / folder / "README.md" for folder in ("pipelines", "storage"))]
PAGES += sorted((ROOT / "docs").glob("*.md"))


def commands(text):
    """The words of every command line in fenced code, and of every one in a code span."""
    text = text.replace("\\\n", " ")
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in fenced for line in re.findall(r"\bdshuffle [a-z].*", block) if "import" not in line]
    spans = re.findall(r"`(dshuffle [a-z][^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    return [line.partition(" #")[0].split()[1:] for line in [*lines, *spans]]


def problems(words):
    command = main
    while isinstance(command, click.Group):
        if not words or words[0].startswith("-"):
            return [] if words in ([], ["--help"], ["--version"]) else words
        name, *words = words
        found = command.get_command(click.Context(command), re.split(r"\W", name)[0])
        if found is None:
            return [name]
        command = found
        if not words:  # `dshuffle dataset` is a group of commands
            return []
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return [word for word in words if word.startswith("--") and word not in known | {"--help"}]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.exists()], ids=lambda page: f"{page.parent.name}-{page.stem}"
)
def test_commands_and_options_exist(page):
    assert [(words, wrong) for words in commands(page.read_text()) if (wrong := problems(words))] == []


def test_shown_packet_counts_are_those_of_the_command():
    """Seconds differ from run to run, but the packets of a seed do not."""
    text = (ROOT / "docs" / "coded-deliveries.md").read_text()
    [block] = re.findall(r"^\$ (dshuffle plan .*\n(?:  .*\n)+)", text, re.MULTILINE)
    command, _, *rows = block.splitlines()
    ran = CliRunner().invoke(main, [*command.split()[1:], "--json"])
    counted = {one["name"]: one["packets"] for one in json.loads(ran.stdout)["deliveries"]}
    assert {row.split()[0]: int(row.split()[1].replace(",", "")) for row in rows} == counted


def test_the_readme_has_commands():
    assert ["compare"] in commands((ROOT / "README.md").read_text())


def test_what_does_not_exist_is_found():
    text = "```bash\n$ dshuffle plan --rounds 3  # x\n```\n`dshuffle guess` and `dshuffle plan --samples 1`\n"
    assert [problems(words) for words in commands(text)] == [["--rounds"], ["guess"], []]
