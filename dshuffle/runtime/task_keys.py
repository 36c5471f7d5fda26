"""Keys of partition tasks: the user's function, which the Dask dashboard shows, then session, epoch, call and rank."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MARK = "dshuffle"
"""Word in the key of every partition task."""

PARTS = 6
"""Parts of a key."""

CALLING = {"in_stored_order", "run_together", "timed"}
"""Functions of dshuffle that only call the function among their arguments."""


def task_key(name: str, session_id: str, epoch: int, call: int, rank: int) -> str:
    """Return the key of a task. Dask groups tasks by what is before the first hyphen."""
    return f"{name}-{MARK}-{session_id}-{epoch}-{call}-{rank}"


def rank_of_key(key: str) -> int:
    """Return the rank of a partition task."""
    return int(key.rsplit("-", 1)[1])


class TaskPlace(NamedTuple):
    """The session and the epoch of a partition task, its call within the epoch, and its rank."""

    session_id: str
    epoch: int
    call: int
    rank: int


def place_of_key(key: object) -> TaskPlace | None:
    """Return the place of a task; None if it is not a partition task."""
    parts = key.split("-") if isinstance(key, str) else []
    if len(parts) != PARTS or parts[1] != MARK:
        return None
    return TaskPlace(parts[2], *map(int, parts[3:]))


def task_name(fn: Callable[..., Any], args: Sequence[Any] = ()) -> str:
    """Return a name for tasks of a function. Functions of dshuffle that call the user's have the name of that one."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", type(fn).__name__)
    if name in CALLING and str(getattr(fn, "__module__", "")).startswith(f"{MARK}."):
        place = next((place for place, arg in enumerate(args) if callable(arg)), None)
        if place is not None:
            return task_name(args[place], args[place + 1 :])
    return re.sub(r"\W+", "_", name).strip("_") or "task"
