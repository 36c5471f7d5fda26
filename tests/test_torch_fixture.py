"""Tests that need PyTorch are skipped without it, and fail if it is required."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(("required", "outcome", "status"), [("", "1 skipped", 0), ("1", "1 error", 1)])
def test_without_pytorch(tmp_path, required, outcome, status):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment["DSHUFFLE_REQUIRE_TORCH"] = required
    test = f"{TESTS / 'integrations' / 'test_torch.py'}::test_bad_input"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "torch", "-n", "0", "-p", "no:cacheprovider", test],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == status, ran.stdout + ran.stderr
    assert outcome in ran.stdout


def test_no_test_imports_pytorch_without_the_fixture():
    """A test that skips itself would be skipped without a word where PyTorch is required."""
    skip = re.compile(r"importorskip\(\s*[\"']torch[\"'.]")
    paths = [path for path in TESTS.rglob("*.py") if path.name != "conftest.py" or path.parent != TESTS]
    assert [str(path) for path in paths if skip.search(path.read_text())] == []
