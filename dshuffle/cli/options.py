"""Options that list the names in a registry, as they are when the help is shown.

Loading the registries takes a tenth of a second, as long as everything else together. So the names that dshuffle itself
registers are repeated here, and a test compares them. Nobody can register other names before planning is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import click

ASSIGNMENTS = (
    "local, partial:Q or partial:Q:fixed-points (Q in [0, 1]), global, aligned, aligned:Q (Q in [0, 1]), "
    "chunks or chunks:ROWS (an integer >= 1)"
)
DELIVERIES = ("peer", "grid", "server", "storage", "clique", "ubershuffle", "coded", "leftover")
AUTO = "auto"
RELAYS = ("pipelined", "ring", "unicast")
CACHINGS = ("even", "recent", "uniform")
BETWEEN = ("redraw", "reverse")
SHARDINGS = ("contiguous", "random", "round-robin", "stratified", "distribution-aware")
SYNTHETIC = ("regression", "rare-keys", "classification", "matrix")

RARE_KEYS_SAMPLES = 7_000
RARE_KEYS_ROWS = 5
"""Rows of each rare key, which are stored side by side. With many rows of each key, one shuffle is enough."""
RARE_KEYS_NOISE = 0.03
"""Without noise, the error of a linear regression vanishes with all ways."""

PREDICTED = ("local", "partial:0.1", "global", "aligned", "chunks")
"""Assignments whose cost is predicted by default."""

BASELINE = "global"
"""The assignment that every recommendation compares with."""


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
    registry = sys.modules.get("dshuffle.planning.assignment")
    return ASSIGNMENTS if registry is None else str(registry.known_assignments()).replace("'", "")


def deliveries() -> str:
    """Every delivery that has a planner."""
    registry = sys.modules.get("dshuffle.planning.delivery")
    return ", ".join(DELIVERIES if registry is None else registry.DELIVERIES)


def deliveries_or_auto() -> str:
    """Every delivery, and the one that chooses."""
    return f"{deliveries()} or {AUTO}"


def _with_baseline(context: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Add what every recommendation compares with."""
    return names if BASELINE in names else (*names, BASELINE)


assignment_option = click.option(
    "--assignment",
    "assignments",
    multiple=True,
    default=PREDICTED,
    show_default=True,
    callback=_with_baseline,
    cls=RegistryOption,
    names=assignments,
    help=f"May be repeated. {BASELINE} is always included.",
)
