"""Options that list the names in a registry, as they are when the help is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from dshuffle.planning import AUTO, DELIVERIES
from dshuffle.planning.assignment import known_assignments


class RegistryOption(click.Option):
    """An option whose help begins with the names that it accepts.

    Parameters
    ----------
    names
        Returns the names as text.
    """

    def __init__(self, *arguments: Any, names: Callable[[], str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._names = names
        self._help = self.help or ""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Complete the help, now that all names are registered."""
        self.help = f"{self._names()}. {self._help}".strip()
        return super().get_help_record(ctx)


def assignments() -> str:
    """Every form of every assignment."""
    return known_assignments().replace("'", "")


def deliveries() -> str:
    """Every delivery that has a planner."""
    return ", ".join(DELIVERIES)


def deliveries_or_auto() -> str:
    """Every delivery, and the one that chooses."""
    return f"{deliveries()} or {AUTO}"
