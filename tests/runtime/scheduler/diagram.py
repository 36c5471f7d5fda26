"""The diagram of a session's phases in docs/design.md, drawn from the table that the session machine runs.

    python -m tests.runtime.scheduler.diagram

prints it.
"""

from __future__ import annotations

from dshuffle.runtime.scheduler import machine_state as events
from dshuffle.runtime.scheduler.machine import OPEN, ROWS
from dshuffle.runtime.scheduler.machine_state import Phase

LABELS = {
    events.OpenCall: "open",
    events.BeginCall: "begin",
    events.AdvanceCall: "advance",
    events.AllAnswers: "all have answered",
    events.AllVotes: "all have voted ready",
    events.RunFailure: "a participant votes that the run has failed",
    events.Refusal: "an order is refused",
    events.Loss: "a participant is lost",
    events.FinalLoss: "a participant is lost that cannot be replaced",
    events.Replacement: "another worker takes a lost rank",
    events.NoReplacement: "no other worker comes",
    events.Closure: "the session is closed",
}


def drawn_name(phase: Phase) -> str:
    return "[*]" if phase is Phase.NEW else phase.name.lower()


def diagram() -> str:
    """The changes of phase, as Mermaid draws them. What happens in every phase is a note."""
    arrows, note = [], []
    for phases, event, _, targets in ROWS:
        if set(OPEN) <= set(phases):
            note += [f"in any phase: {LABELS[event]}"]
            continue
        for phase in phases:
            for target, condition in targets.items():
                label = f"{LABELS[event]} ({condition})" if condition else LABELS[event]
                if target is not phase:
                    arrows.append(f"{drawn_name(phase)} --> {drawn_name(target)}: {label}")
    lines = [*arrows, "note right of ended", *(f"    {line}" for line in note), "end note"]
    return "\n".join(["stateDiagram-v2", *(f"    {line}" for line in lines)])


if __name__ == "__main__":
    print(diagram())
