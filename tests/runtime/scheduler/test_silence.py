"""Messages that were lost, and participants that are silent."""

from __future__ import annotations

from dshuffle.errors import WorkerLost
from dshuffle.runtime.messages import MemberState
from dshuffle.runtime.scheduler.machine import (
    MOST_LOSSES,
    CallEnded,
    Phase,
    PhaseOrder,
    ProcessQuestion,
    ReplacementSearch,
    SessionEnded,
)

from .machines import given_order, machine_of, pass_time, replacing_machine, vote
from .simulator import HEARTBEAT, TIMEOUT, Driven


def test_whom_a_session_waits_for_and_how_far_they_are() -> None:
    machine = machine_of(5)
    machine.advance(0.0)
    for rank, arrived in ((1, 0.5), (2, 0.25), (4, 1.0)):
        status = MemberState(open=True, run_id=1, arrived=arrived)
        assert machine.answered(given_order(machine, "status", rank, 1), status, 6.0) == []
    machine.voted(1, 3, vote(), 6.0)
    words = "waiting for the samples of epoch 0: rank 2 has 25%, rank 1 has 50%, rank 0 and 1 more"
    assert machine.waiting_for() == words


def test_silence_ends_a_session_after_a_heartbeat_and_names_who_is_silent() -> None:
    machine = machine_of(2)
    machine.advance(0.0)
    machine.voted(1, 0, vote(), 0.1)
    assert not any(isinstance(instruction, SessionEnded) for instruction in pass_time(machine, 0.1, HEARTBEAT - 0.5))
    [ended] = pass_time(machine, HEARTBEAT - 0.5, HEARTBEAT)
    assert isinstance(ended.error, WorkerLost)
    assert str(ended.error).startswith("rank 1 has not answered for 15 s (dshuffle.heartbeat). The session has ended")


def test_a_worker_that_has_forgotten_the_session_is_lost() -> None:
    machine = machine_of(1)
    machine.advance(0.0)
    [ended] = machine.answered(given_order(machine, "status", 0, 1), MemberState(open=False), 6.0)
    assert isinstance(ended.error, WorkerLost)
    assert "rank 0 no longer has the session open" in str(ended.error)
    machine = replacing_machine(2)
    machine.advance(0.0)
    assert machine.answered(given_order(machine, "status", 1, 1), MemberState(open=False), 6.0) == [
        PhaseOrder("abort", 0, 1)
    ]
    assert machine.answered(given_order(machine, "abort", 0, 1), None, 6.1) == [ReplacementSearch((1,))]


def test_what_a_worker_said_before_it_had_opened_the_session_is_out_of_date() -> None:
    machine = Driven([0], first_epoch=0, heartbeat=HEARTBEAT, timeout=TIMEOUT, name_of="rank {}".format)
    machine.open(0.0)
    asked = given_order(machine, "status", 0, 0)
    assert machine.answered(given_order(machine, "open", 0, 0), None, 7.0) == [CallEnded()]
    assert machine.answered(asked, MemberState(open=False), 8.0) == []
    assert machine.phase is Phase.IDLE


def ends(machine: Driven, start: float, end: float) -> list[SessionEnded]:
    """How the session ends while time passes, if it does."""
    return [instruction for instruction in pass_time(machine, start, end) if isinstance(instruction, SessionEnded)]


def test_time_in_which_the_scheduler_was_blocked_does_not_count_as_silence() -> None:
    machine = machine_of(2)
    machine.advance(0.0)
    assert not any(isinstance(instruction, SessionEnded) for instruction in machine.tick(40.0))
    assert not ends(machine, 40.0, 40.0 + HEARTBEAT - 1)
    assert ends(machine, 40.0 + HEARTBEAT - 1, 41.0 + HEARTBEAT)


def test_bytes_that_arrive_at_another_worker_count_from_when_they_arrived() -> None:
    machine = machine_of(2)
    machine.advance(0.0)
    machine.voted(1, 0, vote(), 0.1)
    assert not ends(machine, 0.1, 10.0)
    machine.alive(1, 2.0, 10.0)  # what another worker has received two seconds ago
    machine.alive(1, 4.0, 10.0)  # an older sign that comes later changes nothing
    assert not ends(machine, 10.0, 8.0 + HEARTBEAT - 0.5)
    assert ends(machine, 8.0 + HEARTBEAT - 0.5, 8.0 + HEARTBEAT)


def test_a_worker_whose_process_runs_is_waited_for_and_named() -> None:
    machine = machine_of(2)
    machine.advance(0.0)
    machine.voted(1, 0, vote(), 0.1)
    now = 0.1
    while now < 5 * HEARTBEAT:
        questions = [told for told in machine.tick(now) if isinstance(told, ProcessQuestion)]
        for question in questions:
            assert question == ProcessQuestion(1, question.silent_seconds, machine.turn)
            assert machine.note_running(question, now + 0.1) == []
        now += 0.5
    words = "waiting for the samples of epoch 0: rank 1: no answer, but its process runs: a task may hold"
    assert machine.waiting_for().startswith(words)
    state = MemberState(open=True, run_id=1, arrived=0.5)
    assert machine.answered(given_order(machine, "status", 1, 1), state, now) == []
    assert machine.waiting_for() == "waiting for the samples of epoch 0: rank 1 has 50%"
    assert machine.phase is Phase.EXCHANGING


def test_nobody_waits_for_ever_for_a_worker_whose_process_runs() -> None:
    machine = machine_of(2)
    machine.advance(0.0)
    machine.voted(1, 0, vote(), 0.1)
    now = 0.1
    while now < TIMEOUT - 1:
        machine.note_running(ProcessQuestion(1, 0.0, machine.turn), now)
        assert not ends(machine, now, now + 1)
        now += 1
    machine.note_running(ProcessQuestion(1, 0.0, machine.turn), now)
    [ended] = ends(machine, now, TIMEOUT + 1)
    assert "rank 1 has not answered for 300 s (dshuffle.timeout), although its process runs" in str(ended.error)


def test_a_rank_whose_workers_are_lost_again_and_again_ends_the_session() -> None:
    machine = replacing_machine(2)
    machine.advance(0.0)
    now = 0.0
    for _ in range(MOST_LOSSES):
        machine.lost([1], "was killed", now := now + 1)
        machine.answered(given_order(machine, "abort", 0, machine.run.run_id), None, now)
        machine.replaced(1, now)
        machine.answered(given_order(machine, "restore", 1, machine.n_runs), None, now)
        machine.answered(given_order(machine, "members", 0, 0), None, now)
        assert machine.phase is Phase.EXCHANGING
    [ended] = machine.lost([1], "was killed", now + 1)
    words = "rank 1 was killed, for the 11th time in one epoch. Perhaps a task blocks or ends its worker"
    assert str(ended.error).startswith(words)


def test_an_answer_about_a_process_does_not_speak_for_the_next_worker_of_the_rank() -> None:
    machine = replacing_machine(2)
    machine.advance(0.0)
    question = ProcessQuestion(1, 5.0, machine.turn)
    machine.lost([1], "has left", 6.0)
    machine.answered(given_order(machine, "abort", 0, 1), None, 6.1)
    machine.replaced(1, 6.2)
    machine.answered(given_order(machine, "members", 0, 0), None, 6.2)
    machine.note_running(question, 6.3)
    assert "its process runs" not in machine.waiting_for()
    assert ReplacementSearch((1,)) not in pass_time(machine, 6.3, 6.2 + HEARTBEAT - 0.5)
    assert ReplacementSearch((1,)) in pass_time(machine, 6.2 + HEARTBEAT - 0.5, 6.2 + HEARTBEAT + 0.5)
