"""The answers that participants owe in one phase of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dshuffle.runtime.messages import Report

MOST_NAMES = 3
"""Number of participants that are named when a session says whom it waits for."""


class Answers:
    """Who owes an answer to the order of a phase, and what is known of the order until the answer comes."""

    def __init__(self, participants: Iterable[int] = ()) -> None:
        self.owing = set(participants)
        self.reports: dict[int, Report] = {}
        self.arrived: dict[int, float | None] = {}  # fraction of its rows that a participant has, as far as it is known
        self._unreachable: dict[int, str] = {}  # why the order did not reach a participant
        self._busy: dict[int, str] = {}  # why a participant cannot carry out the order yet
        self._running: set[int] = set()  # participants that do not answer although their processes run
        self._repeats: set[int] = set()  # participants that were busy and must get the order again

    def carried_out(self, participant: int, report: Report | None) -> None:
        """Note that a participant has carried out the order; with a report if it was to commit."""
        if report is not None:
            self.reports[participant] = report
        self.owing.discard(participant)

    def busy(self, participant: int, reason: str) -> None:
        """Note that a participant cannot carry out the order yet, and must get it again."""
        self._busy[participant] = reason
        self._repeats.add(participant)

    def unreachable(self, participant: int, reason: str) -> None:
        """Note that the order may not have reached a participant."""
        if participant in self.owing:
            self._unreachable[participant] = reason

    def note_running(self, participant: int) -> None:
        """Note that the process of a participant runs, although the participant does not answer."""
        self._running.add(participant)

    def reached(self, participant: int) -> None:
        """Note that messages reach a participant, and that it answers."""
        self._running.discard(participant)
        self._unreachable.pop(participant, None)

    def pop_repeat(self, participant: int) -> bool:
        """Whether a participant must get the order again. The answer is True once for each reason."""
        repeat = participant in self._unreachable or participant in self._repeats
        self._unreachable.pop(participant, None)
        self._repeats.discard(participant)
        return repeat

    def why_unreachable(self, participant: int) -> str:
        """Why the order did not reach a participant, in brackets; empty if nothing is known."""
        return f" ({self._unreachable[participant]})" if participant in self._unreachable else ""

    def in_words(self, name_of: Callable[[int], str]) -> str:
        """Who owes an answer, and why. Those with a reason come first, then those with the fewest of their rows."""

        def urgency(participant: int) -> tuple[bool, float, int]:
            arrived = self.arrived.get(participant)
            has_reason = participant in self._busy or participant in self._running
            return not has_reason, 1.0 if arrived is None else arrived, participant

        def in_words(participant: int) -> str:
            words = name_of(participant)
            if participant in self._busy:
                return f"{words}: {self._busy[participant]}"
            if participant in self._running:
                return f"{words} does not answer, but its process runs: a task may hold Python's global lock"
            arrived = self.arrived.get(participant)
            return words if arrived is None else f"{words} has {arrived:.0%}"

        names = [in_words(participant) for participant in sorted(self.owing, key=urgency)[:MOST_NAMES]]
        more = len(self.owing) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")
