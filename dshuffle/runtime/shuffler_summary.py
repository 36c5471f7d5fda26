"""A shuffler in one line, and as a table for notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshuffle.notebook import html_summary
from dshuffle.redaction import hide_secrets
from dshuffle.units import human_count, human_seconds

if TYPE_CHECKING:
    from dshuffle.runtime.shuffler import Shuffler


def in_words(shuffler: Shuffler) -> str:
    """The representation of a shuffler."""
    choices = shuffler.choices
    state = "closed " if shuffler.closed else ""
    balance = "" if choices.balance is None else f", balance={choices.balance.name!r}"
    figures = ", ".join(f"{name} {value}" for name, value in _figures(shuffler).items())
    return f"<{state}Shuffler {choices.label}{balance} of {hide_secrets(shuffler.dataset.url)}; {figures}>"


def in_html(shuffler: Shuffler) -> str:
    """A table of what was chosen, and of the last epochs."""
    state = "Closed shuffler" if shuffler.closed else "Shuffler"
    chosen = {name: value for name, value in shuffler.choices.to_dict().items() if value not in (None, "")}
    headings = ("epoch", "samples received", "bytes sent", "exchange", "training", "waited")
    rows = [tuple(record._figures().get(name, record.epoch) for name in headings) for record in shuffler.records[-5:]]
    facts = {**chosen, **_figures(shuffler)}
    return html_summary(f"{state} of {hide_secrets(shuffler.dataset.url)}", facts, headings if rows else (), rows)


def _figures(shuffler: Shuffler) -> dict[str, object]:
    """Numbers of workers and samples, the epoch, and what the last exchange took."""
    figures: dict[str, object] = {"workers": shuffler.n_workers, "samples": human_count(shuffler.dataset.n_samples)}
    if shuffler.epoch is not None:
        figures["epoch"] = shuffler.epoch
    if shuffler.records:
        figures["last exchange"] = human_seconds(shuffler.records[-1].exchange_seconds)
    return figures
