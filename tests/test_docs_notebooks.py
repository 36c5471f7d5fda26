"""The notebooks in docs/ run from the first cell to the last, and are stored without outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOKS = sorted(DOCS.glob("*.ipynb"))
RUN = """
import ast, json, sys
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), globals())
        if last is not None:  # a notebook shows its value
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), globals())
            if value is not None:
                print(repr(value))
"""
pytestmark = pytest.mark.skipif(not NOTEBOOKS, reason="the docs are not here")


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs(notebook, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "ignore", "-c", RUN, str(notebook)]  # pandas and zarr warn in some releases
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    if notebook.stem == "report":
        assert "Yes: one shuffle before training costs" in ran.stdout


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_not_stored(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")
