"""The reference (docs/api.md) lists what is public, and nothing that does not exist."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import dshuffle
from dshuffle.planning.assignment import ASSIGNMENTS

API = Path(__file__).parents[1] / "docs" / "api.md"


def listed():
    """Names of the reference, by module."""
    found = {}
    for module, names in re.findall(r"currentmodule:: (\S+)\n(.*?)```", API.read_text(), re.DOTALL):
        found.setdefault(module, []).extend(re.findall(r"^   (\w+)$", names, re.MULTILINE))
    return found


def test_all_names_of_the_package_are_in_the_reference():
    assert set(dshuffle.__all__) - {"__version__"} <= {name for names in listed().values() for name in names}


def test_all_names_in_the_reference_exist_once_and_are_few():
    names = [(module, name) for module, found in listed().items() for name in found]
    assert 60 < len(names) == len(set(names)) <= 75
    for module, name in names:
        home = importlib.import_module(module)
        assert getattr(home, name).__doc__
        assert name in getattr(home, "__all__", [name])


@pytest.mark.parametrize("rule", ASSIGNMENTS.values())
def test_methods_of_assignments_have_docstrings_or_inherit_them(rule):
    public = [name for name in vars(rule) if not name.startswith("_") and callable(getattr(rule, name))]
    assert public
    assert all(inspect.getdoc(getattr(rule, name)) for name in public)
