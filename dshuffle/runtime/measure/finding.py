"""What ``dshuffle doctor`` finds."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, and how it is.

    Parameters
    ----------
    level
        How bad it is.
    subject
        What was looked at.
    observation
        What was found.
    remedy
        What to do; empty if nothing has to be done.
    """

    level: Level
    subject: str
    observation: str
    remedy: str = ""


def some(names: list[str]) -> str:
    """The first three of some names, and how many more there are.

    Examples
    --------
    >>> some(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
