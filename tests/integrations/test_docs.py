"""The code in docs/iterators.md runs, and the change that it asks of a script is as small as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "iterators.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the docs are not here (tests of the installed wheel)")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def before_and_after():
    [diff] = blocks("diff")
    lines = [line or " " for line in diff.splitlines()]
    assert {line[0] for line in lines} == set(" -+")
    return tuple("\n".join(line[1:] for line in lines if line[0] in " " + sign) for sign in "-+")


def run(code, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(code)
    ran = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_at_most_six_lines_change():
    before, after = (script.splitlines() for script in before_and_after())
    changed = [line for line in after if line not in before]
    assert 0 < len(changed) <= 6
    quick_start = (ROOT / "docs" / "quick-start.md").read_text()
    assert [line for line in quick_start.splitlines() if line[1:].strip() == changed[0]]


@pytest.mark.parametrize("which", [0, 1])
def test_the_script_trains_on_every_sample_before_and_after(torch, which):
    names = {}
    exec(before_and_after()[which], names)
    ranks = [names["train"](rank, 4) for rank in range(4)]
    for epoch in range(3):
        assert sorted(sample for rank in ranks for sample in rank[epoch]) == list(range(100))
    stays = [len(set(rank[0]) & set(rank[1])) for rank in ranks]
    assert all(count < 20 for count in stays) if which == 0 else stays == [22] * 4


@pytest.mark.slow
def test_the_pytorch_example_runs(torch, tmp_path):
    assert run(blocks("python")[0], tmp_path) == ["0 [7, 7]", "1 [7, 7]"]


@pytest.mark.slow
def test_the_permutation_example_runs(tmp_path):
    assert run(blocks("python")[1], tmp_path) == ["True"]
