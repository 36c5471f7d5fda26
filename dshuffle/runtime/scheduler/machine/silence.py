"""Who was heard when: the clock of a session's state machine."""

from __future__ import annotations

import math
from collections.abc import Iterable


class Silence:
    """When the participants of a session were heard and asked.

    Parameters
    ----------
    heartbeat
        Seconds of silence after which a participant that owes an answer is lost. Until then it is asked every third of
        a heartbeat.
    longest
        Seconds of silence after which a participant is lost although its process runs.
    """

    def __init__(self, heartbeat: float, longest: float = math.inf) -> None:
        self._heartbeat = heartbeat
        self._longest = longest
        self._since = 0.0
        self._ticked = 0.0
        self._heard: dict[int, float] = {}
        self._excused: dict[int, float] = {}  # when the processes of silent participants were seen to run
        self._queried_at: dict[int, float] = {}

    def begin(self, now: float, participants: Iterable[int] = ()) -> None:
        """Begin a phase, in which these participants get an order."""
        self._since = self._ticked = now
        self._queried_at = dict.fromkeys(participants, now)
        self._excused = {}

    def extend(self, now: float) -> None:
        """Let the phase begin again."""
        self._since = now

    def hear(self, participant: int, now: float) -> None:
        """Note that a participant has said something, or was alive at an earlier time."""
        self._heard[participant] = max(now, self._heard.get(participant, now))

    def excuse(self, participant: int, now: float) -> None:
        """Note that the process of a participant runs, although the participant says nothing."""
        self._excused[participant] = now

    def tick(self, now: float) -> float:
        """Let time pass, and return the seconds that do not count.

        While nobody looked at the clock, nobody read the answers that came either.
        """
        gap, self._ticked = now - self._ticked, now
        if gap < self._heartbeat / 3:
            return 0.0
        self._since += gap
        self._heard = {participant: heard + gap for participant, heard in self._heard.items()}
        self._excused = {participant: excused + gap for participant, excused in self._excused.items()}
        self._queried_at = {participant: time + gap for participant, time in self._queried_at.items()}
        return gap

    def lasts(self, now: float) -> float:
        """Seconds since the phase began."""
        return now - self._since

    def seconds(self, participant: int, now: float) -> float:
        """Seconds for which a participant has said nothing in this phase."""
        return now - max(self._heard.get(participant, self._since), self._since)

    def is_excused(self, participant: int, now: float) -> bool:
        """Whether the process of a participant was seen to run less than a heartbeat ago."""
        return now - self._excused.get(participant, -math.inf) < self._heartbeat

    def was_excused(self, participant: int) -> bool:
        """Whether the process of a participant was seen to run in this phase, however long ago."""
        return participant in self._excused

    def is_lost(self, participant: int, now: float) -> bool:
        """Whether a participant has said nothing for a heartbeat, or for the longest time if its process runs."""
        silence = self.seconds(participant, now)
        return silence >= self._longest or (silence >= self._heartbeat and not self.is_excused(participant, now))

    def is_due(self, participant: int, now: float) -> bool:
        """Whether to ask a participant now. If so, the next time is a third of a heartbeat later."""
        due = now - self._queried_at[participant] >= self._heartbeat / 3
        if due:
            self._queried_at[participant] = now
        return due
