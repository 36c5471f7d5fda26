"""Lost participants: other workers take their ranks, or the session goes on without them, or it ends."""

from __future__ import annotations

from dshuffle.errors import CacheBudgetError, WorkerLost
from dshuffle.runtime.scheduler.machine import (
    ParticipantDropped,
    PhaseOrder,
    RanksRestored,
    ReplacementSearch,
)

from .machines import given_order, pass_time, replacing_machine


def test_a_rank_is_restored_before_the_others_go_on() -> None:
    machine = replacing_machine(2)
    machine.advance(0.0)
    assert machine.lost([1], "has left", 1.0) == [PhaseOrder("abort", 0, 1)]
    assert machine.answered(given_order(machine, "abort", 0, 1), None, 1.1) == [ReplacementSearch((1,))]
    assert machine.waiting_for() == "waiting for other workers to replace rank 1"
    assert machine.replaced(1, 2.0) == [PhaseOrder("members", 0, 1), PhaseOrder("restore", 1, 1)]
    assert machine.answered(given_order(machine, "restore", 1, 0), None, 3.0) == []
    assert machine.answered(given_order(machine, "members", 0, 0), None, 3.1) == [
        RanksRestored((1,)),
        PhaseOrder("begin", 0, 2),
        PhaseOrder("begin", 1, 2),
    ]


def test_after_two_close_losses_the_others_hear_of_both_workers_together() -> None:
    machine = replacing_machine(3)
    machine.lost([1], "has left", 0.0)
    machine.replaced(1, 1.0)
    assert machine.lost([2], "has left", 1.5) == [ReplacementSearch((2,))]
    names = ("members", "restore", "restore")
    assert machine.replaced(2, 2.0) == [PhaseOrder(name, rank, 0) for rank, name in enumerate(names)]
    for rank in (1, 2):
        assert machine.answered(given_order(machine, "restore", rank, 0), None, 3.0) == []
    assert machine.newcomers == {1, 2}  # so tasks of both ranks wait
    assert machine.answered(given_order(machine, "members", 0, 0), None, 3.1) == [RanksRestored((1, 2))]


def test_nobody_comes() -> None:
    machine = replacing_machine(2)
    assert machine.lost([1], "has left", 0.0) == [ReplacementSearch((1,))]
    assert pass_time(machine, 0.0, 59.0) == []
    [ended] = pass_time(machine, 59.0, 60.0)
    assert isinstance(ended.error, WorkerLost)


def test_nobody_comes_for_a_participant_that_is_optional() -> None:
    machine = replacing_machine(2, optional=(1,))
    machine.advance(0.0)
    assert machine.lost([1], "has left", 1.0) == [PhaseOrder("abort", 0, 1)]
    assert machine.answered(given_order(machine, "abort", 0, 1), None, 1.1) == [ReplacementSearch((1,))]
    assert machine.not_replaced([1], 2.0) == [ParticipantDropped(1), PhaseOrder("begin", 0, 2)]
    assert machine.participants == (0,)


def test_a_worker_that_cannot_take_a_rank_does_not_end_the_session() -> None:
    machine = replacing_machine(2)
    machine.lost([1], "has left", 0.0)
    machine.replaced(1, 10.0)
    no_room = CacheBudgetError("no room here")
    assert machine.refused(given_order(machine, "restore", 1, 0), no_room, 11.0) == [ReplacementSearch((1,))]
    instructions = pass_time(machine, 11.0, 59.5)
    assert instructions == []
    [ended] = pass_time(machine, 59.5, 60.5)  # since the loss, not since the refusal
    assert "no room here" in str(ended.error)
