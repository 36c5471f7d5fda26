"""The answers that participants owe in one phase of a session's state machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dshuffle.runtime.messages import Report

MOST_NAMES = 3
"""Number of participants that are named when a session says whom it waits for."""


class Answers:
    """Who owes an answer to the order of a phase, and what is known of the order until the answer comes."""

    def __init__(self, told: Iterable[int] = ()) -> None:
        self.owing = set(told)
        self.reports: dict[int, Report] = {}
        self.arrived: dict[int, float | None] = {}  # fraction of its rows that a participant has, as far as it is known
        self._unheard: dict[int, str] = {}  # why the order did not reach a participant
        self._busy: dict[int, str] = {}  # why a participant cannot carry out the order yet
        self._again: set[int] = set()  # participants that were busy and must be told again

    def carried_out(self, who: int, report: Report | None) -> None:
        """Note that a participant has carried out the order; with a report if it was to commit."""
        if report is not None:
            self.reports[who] = report
        self.owing.discard(who)

    def busy(self, who: int, reason: str) -> None:
        """Note that a participant cannot carry out the order yet, and must be told again."""
        self._busy[who] = reason
        self._again.add(who)

    def unreachable(self, who: int, reason: str) -> None:
        """Note that the order may not have reached a participant."""
        if who in self.owing:
            self._unheard[who] = reason

    def reached(self, who: int) -> None:
        """Note that messages reach a participant."""
        self._unheard.pop(who, None)

    def tell_again(self, who: int) -> bool:
        """Whether a participant must be told the order again. The answer is True once for each reason."""
        again = who in self._unheard or who in self._again
        self._unheard.pop(who, None)
        self._again.discard(who)
        return again

    def why_unreachable(self, who: int) -> str:
        """Why the order did not reach a participant, in brackets; empty if nothing is known."""
        return f" ({self._unheard[who]})" if who in self._unheard else ""

    def in_words(self, who_is: Callable[[int], str]) -> str:
        """Who owes an answer, and why. Those with a reason come first, then those with the fewest of their rows."""

        def urgency(who: int) -> tuple[bool, float, int]:
            arrived = self.arrived.get(who)
            return who not in self._busy, 1.0 if arrived is None else arrived, who

        def in_words(who: int) -> str:
            arrived = self.arrived.get(who)
            why = f": {self._busy[who]}" if who in self._busy else "" if arrived is None else f" has {arrived:.0%}"
            return who_is(who) + why

        names = [in_words(who) for who in sorted(self.owing, key=urgency)[:MOST_NAMES]]
        more = len(self.owing) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")
