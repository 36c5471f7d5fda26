"""A shuffler in one line, and as a table for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dshuffle.notebook import html_summary
from dshuffle.planning import Choices
from dshuffle.records import EpochRecord
from dshuffle.redaction import hide_secrets
from dshuffle.store import Dataset
from dshuffle.units import human_count, human_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ShufflerSummary:
    """What a shuffler shows of itself."""

    choices: Choices
    dataset: Dataset
    closed: bool
    n_workers: int
    epoch: int | None
    records: Sequence[EpochRecord]

    def in_words(self) -> str:
        """The representation of the shuffler."""
        choices = self.choices
        state = "closed " if self.closed else ""
        balance = "" if choices.balance is None else f", balance={choices.balance.name!r}"
        figures = ", ".join(f"{name} {value}" for name, value in self._figures().items())
        return f"<{state}Shuffler {choices.label}{balance} of {hide_secrets(self.dataset.url)}; {figures}>"

    def in_html(self) -> str:
        """A table of what was chosen, and of the last epochs."""
        state = "Closed shuffler" if self.closed else "Shuffler"
        chosen = {name: value for name, value in self.choices.to_dict().items() if value not in (None, "")}
        headings = ("epoch", "samples received", "bytes sent", "exchange", "training", "waited")
        rows = [tuple(record._figures().get(name, record.epoch) for name in headings) for record in self.records[-5:]]
        facts = {**chosen, **self._figures()}
        return html_summary(f"{state} of {hide_secrets(self.dataset.url)}", facts, headings if rows else (), rows)

    def _figures(self) -> dict[str, object]:
        figures: dict[str, object] = {"workers": self.n_workers, "samples": human_count(self.dataset.n_samples)}
        if self.epoch is not None:
            figures["epoch"] = self.epoch
        if self.records:
            figures["last exchange"] = human_seconds(self.records[-1].exchange_seconds)
        return figures
