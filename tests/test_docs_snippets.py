"""Code in the docs uses names and arguments that exist. (Some of it is also run, by the tests of what it is about.)"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import dshuffle

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="the docs are not here")

METHODS = {
    "map": dshuffle.Epoch.map,
    "together": dshuffle.Epoch.together,
    "epochs": dshuffle.Shuffler.epochs,
    "batches": dshuffle.Partition.batches,
    "select": dshuffle.Dataset.select,
    "split": dshuffle.Dataset.split,
    "windows": dshuffle.Dataset.windows,
    "patches": dshuffle.Dataset.patches,
    "read_rows": dshuffle.Dataset.read_rows,
}
"""Methods that the docs call with names as ``shuffler`` or ``epoch``, by their own names."""


def blocks():
    for page in PAGES:
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)):
            yield pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")


def names_in(tree):
    """What the names that a block imports from dshuffle stand for."""
    found = {"dshuffle": dshuffle} | {name: getattr(dshuffle, name) for name in dshuffle.__all__}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dshuffle":
            module = importlib.import_module(node.module)
            found |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    return found


def meant(node, names):
    """The object of dshuffle that an expression names; None if it is not one."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = meant(node.value, names)
        if owner is not None and (inspect.ismodule(owner) or inspect.isclass(owner)):
            if inspect.ismodule(owner) and not hasattr(owner, node.attr):
                return importlib.import_module(f"{owner.__name__}.{node.attr}")  # raises if there is no such module
            return getattr(owner, node.attr)
        if owner is None and isinstance(node.value, ast.Name) and node.value.id in ("shuffler", "epoch", "partition"):
            return METHODS.get(node.attr)
    return None


@pytest.mark.parametrize("block", list(blocks()))
def test_names_and_arguments_exist(block):
    tree = ast.parse(textwrap.dedent(block))
    names = names_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            meant(node, names)
        if not isinstance(node, ast.Call) or (function := meant(node.func, names)) is None:
            continue
        parameters = inspect.signature(function).parameters
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            continue
        for keyword in node.keywords:
            where = ast.unparse(node.func)
            assert keyword.arg is None or keyword.arg in parameters, f"{where} has no parameter {keyword.arg}"
