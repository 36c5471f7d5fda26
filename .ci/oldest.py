"""Print the oldest release of each dependency that pyproject.toml allows, as constraints for pip.

Dependencies of the extras that users install (Parquet, S3, batch systems) are among them.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

EXTRAS = "images", "jobqueue", "parquet", "s3", "xarray"


def constraints(project: dict[str, Any]) -> list[str]:
    """Return a line such as ``numpy==2.1`` for each dependency of a project."""
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *(line for name in EXTRAS for line in extras[name])]
    lines = []
    for requirement in requirements:
        match = re.match(r"([\w-]+)(?:\[[\w,-]+\])?>=([\d.]+)(?:,|$)", requirement)
        if match is None:
            raise ValueError(f"the dependency {requirement!r} must begin like 'numpy>=2.1'")
        lines.append(f"{match[1]}=={match[2]}")
    return lines


if __name__ == "__main__":
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    sys.stdout.writelines(f"{line}\n" for line in constraints(pyproject["project"]))
