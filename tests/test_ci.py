"""How CI chooses interpreters and the oldest dependencies."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CI = ROOT / ".ci"
pytestmark = pytest.mark.skipif(not CI.exists(), reason="CI's scripts are not here")


def script(name):
    spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_interpreters_that_start_are_listed_by_version(tmp_path):
    first, second, pyenv = (tmp_path / name for name in ("first", "second", "pyenv"))
    command(first / "python3", "echo 3 11 /usr/bin/python3.11")
    command(first / "python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    command(first / "python3.9", "echo 3 9 /usr/bin/python3.9")
    command(first / "python3.12-config", "echo 3 99 /not/an/interpreter")
    (first / "python3.15").write_text("not executable")
    command(second / "python3.12", "echo 3 12 '/a path/python3.12'")
    command(second / "python3.11", "echo 3 11 /another/python3.11")
    command(pyenv / "versions" / "3.13.0" / "bin" / "python", "echo 3 13 /versions/python3.13")
    command(pyenv / "versions" / "3.14.0b1" / "bin" / "python", "echo 'not usable' >&2; exit 1")
    environment = {"PATH": f"{first}:{tmp_path / 'absent'}:{second}", "PYENV_ROOT": str(pyenv)}
    paths = script("pythons").interpreters(environment, (3, 11))
    assert list(paths.items()) == [
        ((3, 11), "/usr/bin/python3.11"),
        ((3, 12), "/a path/python3.12"),
        ((3, 13), "/versions/python3.13"),
    ]


@pytest.mark.parametrize(("requirement", "version"), [(">=3.11", (3, 11)), (">=3.9", (3, 9))])
def test_the_oldest_allowed_python(tmp_path, requirement, version):
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(f'[project]\nrequires-python = "{requirement}"\n')
    assert script("pythons").oldest_allowed(pyproject) == version


def test_the_oldest_dependencies_are_the_lower_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    users = ("images", "jobqueue", "parquet", "s3", "xarray")
    lines = [*project["dependencies"], *(line for name in users for line in extras[name])]
    requirements = [Requirement(line) for line in lines]
    bounds = {
        requirement.name: specifier.version
        for requirement in requirements
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }
    assert len(bounds) == len(lines)
    assert script("oldest").constraints(project) == [f"{name}=={version}" for name, version in bounds.items()]


@pytest.mark.parametrize("line", ["numpy", "numpy<3", "numpy>2.1", "numpy~=2.1"])
def test_a_dependency_without_a_lower_bound_is_refused(line):
    project = {"dependencies": [line], "optional-dependencies": {name: [] for name in script("oldest").EXTRAS}}
    with pytest.raises(ValueError, match=line):
        script("oldest").constraints(project)
