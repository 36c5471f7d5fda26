"""The reference (docs/api.md) lists what is public, and nothing that does not exist."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import dshuffle
import dshuffle.pipeline
import dshuffle.training
from dshuffle.planning.assignment import ASSIGNMENTS

API = Path(__file__).parents[1] / "docs" / "api.md"
TYPES = {"OnEpoch", "CONSTANT", "__version__"}
"""Names without a docstring of their own."""


def listed():
    """Names of the reference, by module."""
    found = {}
    for module, names in re.findall(r"currentmodule:: (\S+)\n(.*?)```", API.read_text(), re.DOTALL):
        found.setdefault(module, []).extend(re.findall(r"^   (\w+)$", names, re.MULTILINE))
    return found


@pytest.mark.parametrize("module", [dshuffle, dshuffle.training, dshuffle.pipeline])
def test_all_public_names_are_in_the_reference(module):
    everywhere = {name for names in listed().values() for name in names}
    assert set(module.__all__) - TYPES <= everywhere


def test_all_names_in_the_reference_exist_once():
    names = [(module, name) for module, found in listed().items() for name in found]
    assert len(names) == len(set(names)) > 100
    for module, name in names:
        assert getattr(importlib.import_module(module), name).__doc__


@pytest.mark.parametrize("rule", ASSIGNMENTS.values())
def test_methods_of_assignments_have_docstrings_or_inherit_them(rule):
    public = [name for name in vars(rule) if not name.startswith("_") and callable(getattr(rule, name))]
    assert "draw" in public
    assert all(inspect.getdoc(getattr(rule, name)) for name in public)
