"""List the CPython interpreters of this machine that dshuffle runs on, oldest first: one line of version and path each.

They are looked for on the PATH and among the versions of pyenv, whose commands on the PATH need not have a version
behind them. An interpreter counts if it starts, is a release, can make virtual environments, and has the GIL.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROBE = """
import ensurepip, sys, sysconfig, venv
usable = (
    sys.implementation.name == "cpython"
    and sys.version_info.releaselevel == "final"
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
print(*sys.version_info[:2], sys.executable) if usable else sys.exit("not usable")
"""


def candidates(environment: dict[str, str]) -> Iterator[Path]:
    """Yield paths that look like interpreters; those on the PATH first."""
    for folder in environment.get("PATH", "").split(os.pathsep):
        if Path(folder).is_dir():
            yield from sorted(path for path in Path(folder).iterdir() if re.fullmatch(r"python3(\.\d+)?", path.name))
    pyenv = Path(environment.get("PYENV_ROOT") or Path(environment.get("HOME", "/")) / ".pyenv")
    yield from sorted(pyenv.glob("versions/*/bin/python"), reverse=True)


def interpreters(environment: dict[str, str], oldest: tuple[int, int]) -> dict[tuple[int, int], str]:
    """Return the path of one interpreter for each version from ``oldest`` on, in order of the versions."""
    paths: dict[tuple[int, int], str] = {}
    for candidate in candidates(environment):
        try:
            probe = subprocess.run(
                [candidate, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=60, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue  # a command of pyenv without a version, a broken installation
        major, minor, path = probe.stdout.strip().split(" ", 2)
        version = int(major), int(minor)
        if version >= oldest:
            paths.setdefault(version, path)
    return dict(sorted(paths.items()))


def oldest_allowed(pyproject: Path) -> tuple[int, int]:
    """Return the least version in ``requires-python``."""
    requirement = tomllib.loads(pyproject.read_text())["project"]["requires-python"]
    match = re.fullmatch(r">=(\d+)\.(\d+)", requirement)
    if match is None:
        raise ValueError(f"requires-python={requirement!r} in {pyproject} must look like '>=3.11'")
    return int(match[1]), int(match[2])


if __name__ == "__main__":
    root = Path(__file__).parents[1]
    for (major, minor), path in interpreters(dict(os.environ), oldest_allowed(root / "pyproject.toml")).items():
        sys.stdout.write(f"{major}.{minor} {path}\n")
