"""The phases of a session."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Phase of a session. The value of a phase in which participants owe an answer is the name of the order."""

    NEW = "new"
    OPENING = "open"
    IDLE = "idle"
    EXCHANGING = "begin"
    READY = "ready"
    COMMITTING = "commit"
    ABORTING = "abort"
    WAITING = "waiting"
    RESTORING = "restore"
    INFORMING = "members"
    ENDED = "ended"


OWING = {Phase.OPENING, Phase.EXCHANGING, Phase.COMMITTING, Phase.ABORTING, Phase.RESTORING, Phase.INFORMING}
"""Phases in which participants owe an answer."""

PURPOSE = {
    Phase.OPENING: "to open the session",
    Phase.EXCHANGING: "for the samples of epoch {}",
    Phase.COMMITTING: "to end epoch {}",
    Phase.ABORTING: "to stop an exchange",
    Phase.RESTORING: "for replacements of lost workers to load their partitions",
    Phase.INFORMING: "to continue after workers were replaced",
}
"""What the session waits for in a phase, in words."""
