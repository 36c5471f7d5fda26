"""Assignments: the rules for which worker trains on which sample in each epoch.

Without weights, share sizes differ by at most one sample, or with ``chunks`` by at most one chunk's rows.
Every assignment is a function of the seed, the epoch and the workers. ``local`` and ``partial`` also depend on the
previous assignment, and ``aligned`` on the holders of each sample.
"""

from __future__ import annotations

from dshuffle.errors import InvalidParameter
from dshuffle.planning.assignment.aligned import Aligned
from dshuffle.planning.assignment.rules import Assignment, Chunks, Draw, EpochDraw, Global, Local, Partial

__all__ = [
    "ASSIGNMENTS",
    "Aligned",
    "Assignment",
    "Chunks",
    "Draw",
    "EpochDraw",
    "Global",
    "Local",
    "Partial",
    "known_assignments",
    "parse_assignment",
]

ASSIGNMENTS: dict[str, type[Assignment]] = {rule.name: rule for rule in (Local, Partial, Global, Aligned, Chunks)}
"""Every assignment by name."""


def known_assignments() -> str:
    """How assignments can be written, for error messages."""
    return ", ".join(rule.forms for rule in ASSIGNMENTS.values())


def parse_assignment(assignment: str | Assignment) -> Assignment:
    """Parse the name of an assignment; an :data:`Assignment` is returned unchanged."""
    if isinstance(assignment, Assignment):
        return assignment
    if isinstance(assignment, str):
        name, _, parameter = assignment.partition(":")
        if name in ASSIGNMENTS:
            try:
                return ASSIGNMENTS[name].parse(parameter if ":" in assignment else None)
            except ValueError:  # InvalidParameter is a ValueError too; show the whole text that the user typed
                pass
    raise InvalidParameter.of("assignment", assignment, known_assignments())
