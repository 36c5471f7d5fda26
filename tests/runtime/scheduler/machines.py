"""State machines of sessions, brought into a state, and what tests tell them."""

from __future__ import annotations

from typing import Any

from dshuffle.planning.remainder import SampleDigest
from dshuffle.runtime.messages import Counts, Vote
from dshuffle.runtime.scheduler.machine import PhaseOrder, ProcessQuestion

from .simulator import HEARTBEAT, TIMEOUT, Driven


def given_order(machine: Driven, name: str, rank: int, run_id: int) -> PhaseOrder:
    """An order as the machine has given it in its present phase."""
    return PhaseOrder(name, rank, run_id, machine.turn)


def new_machine(n_members: int, **options: Any) -> Driven:
    return Driven(
        range(n_members), first_epoch=0, heartbeat=HEARTBEAT, timeout=TIMEOUT, name_of="rank {}".format, **options
    )


def machine_of(n_members: int, **options: Any) -> Driven:
    """A machine whose session is open."""
    machine = new_machine(n_members, **options)
    machine.open(0.0)
    for rank in range(n_members):
        machine.answered(given_order(machine, "open", rank, 0), None, 0.0)
    return machine


def replacing_machine(n_members: int, optional: tuple[int, ...] = ()) -> Driven:
    """A machine whose session is open, and whose participants can all be replaced."""
    return machine_of(n_members, replaceable=range(n_members), optional=optional)


def pass_time(machine: Driven, start: float, end: float) -> list[object]:
    """What the machine says while time passes as it does for its driver, except questions about processes."""
    instructions: list[object] = []
    now = start
    while now < end:
        now = min(now + 0.5, end)
        said = machine.tick(now)
        instructions += [instruction for instruction in said if not isinstance(instruction, ProcessQuestion)]
    return instructions


def vote(
    reason: str | None = None, again: bool = True, digest: int = 1, rows: int = 0, **digests: SampleDigest
) -> Vote:
    return Vote(reason=reason, again=again, counts=Counts(digest=digest, expected=0, rows=rows, **digests))
