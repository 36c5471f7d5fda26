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
    fenced = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
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


def test_shown_packet_counts_are_those_of_the_command(few_changes):
    text = (ROOT / "docs" / "coded-deliveries.md").read_text()
    [(command, rows)] = re.findall(r"^\$ (dshuffle advise .*)\n([^`]*)", text, re.MULTILINE)
    answer = json.loads(CliRunner().invoke(main, [*command.split()[1:], "--json"]).stdout)
    counted = {one["way"].removeprefix("global + "): f"{one['packets']:,.0f}" for one in answer["ways"]}
    rows = re.sub(r",( .*)\npipelined", r", pipelined\1", rows)  # a name over two lines
    shown = dict(
        re.findall(r"^global \+ ([a-z]+(?:, [a-z]+)?) .* ([\d,]+) +[^ ]+(?: [kM]B)? +[^ ]+ MB$", rows, re.MULTILINE)
    )
    assert {way: counted[way] for way in shown} == shown
    assert {"peer", "clique, pipelined", "coded, pipelined"} <= {*shown}
    assert f"no code needs fewer than {answer['lower_bound']:,.0f} packets" in " ".join(text.split())
