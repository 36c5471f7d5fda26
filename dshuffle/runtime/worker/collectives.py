"""The calls of :meth:`dshuffle.Epoch.together` for which this worker computes means."""

from __future__ import annotations

from dshuffle.errors import PeerFailed
from dshuffle.runtime.collective import Collective


class Collectives:
    """The last call of each session."""

    def __init__(self) -> None:
        self._calls: dict[str, Collective] = {}

    def call(self, session_id: str, number: int) -> Collective:
        """State of a call, by its number. Calls that have ended are refused."""
        collective = self._calls.get(session_id)
        if collective is None or collective.number < number:
            self.end(session_id)
            collective = self._calls[session_id] = Collective(number)
        elif collective.number > number:
            raise PeerFailed(f"call {number} of Epoch.together has ended: the ranks are at call {collective.number}")
        return collective

    def end(self, session_id: str) -> None:
        """Fail all ranks that still wait in a session's last call."""
        collective = self._calls.pop(session_id, None)
        if collective is not None:
            collective.fail("the session has moved on to another call of Epoch.together, or was closed")

    def close(self) -> None:
        """Fail all ranks that still wait."""
        for session_id in list(self._calls):
            self.end(session_id)
