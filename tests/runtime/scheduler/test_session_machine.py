"""The scheduler's state machine: random schedules, and its transitions one by one."""

from __future__ import annotations

import numpy as np
import pytest

from dshuffle.errors import CacheBudgetError, DatasetChanged, ExchangeError, MembershipChanged, WorkerLost
from dshuffle.planning.sample_digest import SampleDigest
from dshuffle.runtime.messages import CommitReply, Counts, MemberState, Vote
from dshuffle.runtime.scheduler.instructions import (
    ATTEMPTS,
    Adopt,
    Committed,
    Ended,
    EpochFailed,
    GoesOnWithout,
    Opened,
    Phase,
    Replace,
    Replaced,
    Tell,
)
from dshuffle.runtime.scheduler.session_machine import SessionMachine

from .simulator import COMMITTED, FAULTS, HEARTBEAT, TIMEOUT, simulate


def test_random_schedules() -> None:
    seen = simulate(range(2000))
    expected = [*FAULTS, "committed", "ExchangeError", "WorkerLost", "replaced"]
    assert min(seen[what] for what in expected) > 50, seen
    assert min(seen[what] for what in ["adopted", "MembershipChanged"]) > 20, seen


def now_telling(machine: SessionMachine, order: str, who: int, run_id: int) -> Tell:
    return Tell(order, who, run_id, machine.turn)


def machine_of(n_members: int, phase: str = "idle") -> SessionMachine:
    machine = SessionMachine(
        range(n_members), first_epoch=0, heartbeat=HEARTBEAT, timeout=TIMEOUT, who_is="rank {}".format
    )
    machine.open(0.0)
    for who in range(n_members):
        machine.answered(now_telling(machine, "open", who, 0), None, 0.0)
    return machine


def pass_time(machine: SessionMachine, start: float, end: float) -> list[object]:
    """What the machine says while time passes as it does for its driver."""
    found, now = [], start
    while now < end:
        now = min(now + 0.5, end)
        found += machine.tick(now)
    return found


def vote(
    reason: str | None = None, again: bool = True, digest: int = 1, rows: int = 0, **digests: SampleDigest
) -> Vote:
    return Vote(reason=reason, again=again, counts=Counts(digest=digest, expected=0, rows=rows, **digests))


def test_a_vote_that_was_lost_is_asked_for() -> None:
    machine = machine_of(2)
    machine.advance(0.0)
    machine.voted(1, 0, vote(), 0.1)
    assert pass_time(machine, 0.1, 4.5) == []
    assert pass_time(machine, 4.5, 6.0) == [Tell("status", 1, 1)]
    ready = machine.answered(now_telling(machine, "status", 1, 1), MemberState(open=True, run_id=1, vote=vote()), 6.1)
    assert ready[1:] == [Tell("commit", 0, 1), Tell("commit", 1, 1)]


def test_an_order_that_was_lost_is_repeated() -> None:
    machine = machine_of(1)
    machine.advance(0.0)
    assert machine.answered(now_telling(machine, "status", 0, 1), MemberState(open=True), 6.0) == [Tell("begin", 0, 1)]


def test_whom_a_session_waits_for_and_how_far_they_are() -> None:
    machine = machine_of(5)
    machine.advance(0.0)
    for who, arrived in ((1, 0.5), (2, 0.25), (4, 1.0)):
        status = MemberState(open=True, run_id=1, arrived=arrived)
        assert machine.answered(now_telling(machine, "status", who, 1), status, 6.0) == []
    machine.voted(1, 3, vote(), 6.0)
    words = "waiting for the samples of epoch 0: rank 2 has 25%, rank 1 has 50%, rank 0 and 1 more"
    assert machine.waiting_for() == words


def test_silence_ends_a_session_after_a_heartbeat_and_names_who_is_silent() -> None:
    machine = machine_of(2)
    machine.advance(0.0)
    machine.voted(1, 0, vote(), 0.1)
    assert not any(isinstance(one, Ended) for one in pass_time(machine, 0.1, HEARTBEAT - 0.5))
    [ended] = pass_time(machine, HEARTBEAT - 0.5, HEARTBEAT)
    assert isinstance(ended.error, WorkerLost)
    assert str(ended.error).startswith("rank 1 has not answered for 15 s. The session has ended")


def test_a_failed_run_is_repeated_and_the_last_failure_is_told() -> None:
    machine = machine_of(1)
    machine.advance(0.0)
    for attempt in range(1, ATTEMPTS):
        assert machine.voted(attempt, 0, vote(reason="noise"), 1.0) == [Tell("abort", 0, attempt)]
        assert machine.answered(now_telling(machine, "abort", 0, attempt), None, 1.0) == [Tell("begin", 0, attempt + 1)]
    machine.voted(ATTEMPTS, 0, vote(reason="noise"), 1.0)
    [failed] = machine.answered(now_telling(machine, "abort", 0, ATTEMPTS), None, 1.0)
    assert isinstance(failed.error, ExchangeError)
    assert "epoch 0 could not be exchanged: rank 0: noise" in str(failed.error)
    assert machine.advance(2.0) == [Tell("begin", 0, ATTEMPTS + 1)]


def drawing(*samples: int) -> Vote:
    """A vote of a rank that draws samples although none are due."""
    return vote(drawn=SampleDigest.of(np.array(samples), 0), due=SampleDigest())


def test_a_worker_that_takes_a_rank_is_told_what_the_one_before_drew() -> None:
    machine = machine_of(2)
    for epoch, now in ((0, 0.0), (1, 1.0)):
        machine.advance(now)
        for who in (0, 1):
            digest = SampleDigest(epoch, who)
            machine.voted(epoch + 1, who, vote(drawn=digest, due=digest), now)
        before = {0: SampleDigest(0, 0), 1: SampleDigest(0, 1)}
        assert machine.drawn == ({} if epoch == 0 else before)  # of the epoch that it is on
        for who in (0, 1):
            machine.answered(now_telling(machine, "commit", who, epoch + 1), COMMITTED, now)
        assert machine.drawn == {0: SampleDigest(epoch, 0), 1: SampleDigest(epoch, 1)}


@pytest.mark.parametrize(
    "wrong", [vote(digest=2), vote(rows=1), vote(reason="the store is gone", again=False), drawing(3)]
)
def test_what_another_run_would_not_mend_is_not_repeated(wrong: dict) -> None:
    machine = machine_of(2)
    machine.advance(0.0)
    machine.voted(1, 0, vote(), 0.1)
    assert machine.voted(1, 1, wrong, 0.1) == [Tell("abort", 0, 1), Tell("abort", 1, 1)]
    machine.answered(now_telling(machine, "abort", 0, 1), None, 0.2)
    [failed] = machine.answered(now_telling(machine, "abort", 1, 1), None, 0.2)
    assert isinstance(failed, EpochFailed)


def test_a_prefetch_that_failed_is_told_once() -> None:
    machine = machine_of(1)
    machine.begin(0.0)
    machine.voted(1, 0, vote(reason="no store", again=False), 0.1)
    assert machine.answered(now_telling(machine, "abort", 0, 1), None, 0.1) == []
    assert machine.begin(0.2) == []
    assert [type(one) for one in machine.advance(0.3)] == [EpochFailed]
    assert machine.advance(0.4) == [Tell("begin", 0, 2)]


def test_a_task_that_hangs_fails_the_epoch_after_the_timeout_and_not_the_session() -> None:
    machine = machine_of(2)
    machine.advance(0.0)
    for who in (0, 1):
        instructions = machine.voted(1, who, vote(), 0.1)
    assert Tell("commit", 1, 1) in instructions
    machine.answered(now_telling(machine, "commit", 0, 1), COMMITTED, 0.2)
    now = 0.2
    while now < TIMEOUT + 0.1:
        machine.answered(now_telling(machine, "commit", 1, 1), CommitReply(busy="1 task still running"), now)
        found = pass_time(machine, now, now + 5.5)
        now += 5.5
        assert Tell("commit", 1, 1) in found
    [failed] = [one for one in found if isinstance(one, EpochFailed)]
    assert "the epoch cannot end: waiting to end epoch -1: rank 1" in str(failed.error)
    assert machine.advance(now) == []
    [committed] = machine.answered(now_telling(machine, "commit", 1, 1), COMMITTED, now)
    assert isinstance(committed, Committed)
    assert machine.epoch == 0


def test_votes_and_answers_that_are_out_of_date_change_nothing() -> None:
    machine = machine_of(1)
    machine.advance(0.0)
    assert machine.voted(0, 0, vote(), 0.1) == []
    assert machine.answered(now_telling(machine, "commit", 0, 1), None, 0.1) == []
    assert machine.answered(now_telling(machine, "begin", 0, 1), None, 0.1) == []
    assert machine.refused(now_telling(machine, "commit", 0, 1), ExchangeError("late"), 0.1) == []
    assert machine.phase is Phase.EXCHANGING


def test_a_worker_that_has_forgotten_the_session_is_lost() -> None:
    machine = machine_of(1)
    machine.advance(0.0)
    [ended] = machine.answered(now_telling(machine, "status", 0, 1), MemberState(open=False), 6.0)
    assert isinstance(ended.error, WorkerLost)
    assert "rank 0 no longer has the session open" in str(ended.error)
    machine = replacing_machine(2)
    machine.advance(0.0)
    assert machine.answered(now_telling(machine, "status", 1, 1), MemberState(open=False), 6.0) == [Tell("abort", 0, 1)]
    assert machine.answered(now_telling(machine, "abort", 0, 1), None, 6.1) == [Replace((1,))]


def test_what_a_worker_said_before_it_had_opened_the_session_is_out_of_date() -> None:
    machine = SessionMachine([0], first_epoch=0, heartbeat=HEARTBEAT, timeout=TIMEOUT, who_is="rank {}".format)
    machine.open(0.0)
    asked = now_telling(machine, "status", 0, 0)
    assert machine.answered(now_telling(machine, "open", 0, 0), None, 7.0) == [Opened()]
    assert machine.answered(asked, MemberState(open=False), 8.0) == []
    assert machine.phase is Phase.IDLE


def replacing_machine(n_members: int, optional: tuple[int, ...] = (), *, shrinks: bool = False) -> SessionMachine:
    machine = SessionMachine(
        range(n_members),
        first_epoch=0,
        heartbeat=HEARTBEAT,
        timeout=TIMEOUT,
        who_is="rank {}".format,
        replaceable=range(n_members),
        replacement_timeout=60.0,
        optional=optional,
        shrinks=shrinks,
    )
    machine.open(0.0)
    for who in range(n_members):
        machine.answered(now_telling(machine, "open", who, 0), None, 0.0)
    return machine


def test_a_rank_is_restored_before_the_others_go_on() -> None:
    machine = replacing_machine(2)
    machine.advance(0.0)
    assert machine.lost([1], "has left", 1.0) == [Tell("abort", 0, 1)]
    assert machine.answered(now_telling(machine, "abort", 0, 1), None, 1.1) == [Replace((1,))]
    assert machine.waiting_for() == "waiting for other workers to replace rank 1"
    assert machine.replaced(1, 2.0) == [Tell("restore", 1, 1)]
    assert machine.answered(now_telling(machine, "restore", 1, 0), None, 3.0) == [Tell("members", 0, 0)]
    assert machine.answered(now_telling(machine, "members", 0, 0), None, 3.1) == [
        Replaced((1,)),
        Tell("begin", 0, 2),
        Tell("begin", 1, 2),
    ]


def test_a_worker_that_is_lost_in_a_commit_does_not_stop_it() -> None:
    machine = replacing_machine(2)
    machine.advance(0.0)
    for who in (0, 1):
        machine.voted(1, who, vote(), 0.1)
    machine.lost([1], "has left", 0.2)
    committed, replace = machine.answered(now_telling(machine, "commit", 0, 1), COMMITTED, 0.3)
    assert isinstance(committed, Committed)
    assert replace == Replace((1,))
    assert machine.epoch == 0


def test_nobody_comes() -> None:
    machine = replacing_machine(2)
    assert machine.lost([1], "has left", 0.0) == [Replace((1,))]
    assert pass_time(machine, 0.0, 59.0) == []
    [ended] = pass_time(machine, 59.0, 60.0)
    assert isinstance(ended.error, WorkerLost)


def test_why_nobody_could_take_a_rank_is_said() -> None:
    machine = replacing_machine(2)
    machine.lost([1], "has left", 0.0)
    machine.unfit(1, "worker 7 has another version of dshuffle")
    [ended] = machine.not_replaced([1], 1.0)
    assert str(ended.error).startswith("rank 1 has left; worker 7 has another version of dshuffle. No other worker")


def test_why_a_rank_could_not_be_restored_is_said_although_the_worker_left_later() -> None:
    machine = replacing_machine(2)
    machine.lost([1], "has left", 0.0)
    for moment in (1.0, 2.0):
        [restore] = machine.replaced(1, moment)
        assert machine.refused(restore, DatasetChanged("the dataset is another one"), moment) == [Replace((1,))]
    machine.replaced(1, 3.0)
    assert machine.lost([1], "has left again", 3.0) == [Replace((1,))]
    [ended] = machine.not_replaced([1], 4.0)
    reason = "rank 1 has left again; rank 1 cannot take a lost rank (the dataset is another one). No other worker"
    assert str(ended.error).startswith(reason)


def test_why_another_worker_could_not_take_a_rank_is_forgotten_once_one_has() -> None:
    machine = replacing_machine(2)
    machine.lost([1], "has left", 0.0)
    machine.unfit(1, "worker 7 is still being set up")
    machine.replaced(1, 2.0)
    machine.answered(now_telling(machine, "restore", 1, 0), None, 3.0)
    machine.answered(now_telling(machine, "members", 0, 0), None, 3.1)
    machine.lost([1], "has left again", 4.0)
    [ended] = machine.not_replaced([1], 5.0)
    assert str(ended.error).startswith("rank 1 has left again. No other worker")


def test_nobody_comes_for_a_participant_that_is_optional() -> None:
    machine = replacing_machine(2, optional=(1,))
    machine.advance(0.0)
    assert machine.lost([1], "has left", 1.0) == [Tell("abort", 0, 1)]
    assert machine.answered(now_telling(machine, "abort", 0, 1), None, 1.1) == [Replace((1,))]
    assert machine.not_replaced([1], 2.0) == [GoesOnWithout(1), Tell("begin", 0, 2)]
    assert machine.participants == (0,)


def test_a_participant_that_is_optional_does_not_end_the_wait_for_others() -> None:
    machine = replacing_machine(3, optional=(2,))
    machine.lost([1, 2], "has left", 0.0)
    assert machine.not_replaced([2], 1.0) == [GoesOnWithout(2)]
    assert machine.missing == (1,)
    assert machine.replaced(1, 2.0) == [Tell("restore", 1, 0)]
    other = replacing_machine(3, optional=(2,))
    other.lost([1, 2], "has left", 0.0)
    [ended] = other.not_replaced([1], 1.0)
    assert "rank 1 has left; rank 2 has left" in str(ended.error)


def committed_machine(n_members: int) -> SessionMachine:
    """A machine in epoch 0, whose participants can adopt ranks."""
    machine = replacing_machine(n_members, shrinks=True)
    machine.advance(0.0)
    for who in range(n_members):
        machine.voted(1, who, vote(), 0.1)
    for who in range(n_members):
        machine.answered(now_telling(machine, "commit", who, 1), COMMITTED, 0.2)
    assert machine.epoch == 0
    return machine


def test_a_participant_adopts_a_rank_and_the_session_stays_on_its_epoch() -> None:
    machine = committed_machine(3)
    machine.begin(1.0)
    machine.lost([2], "has left", 1.1)
    for who in (0, 1):
        instructions = machine.answered(now_telling(machine, "abort", who, 2), None, 1.2)
    assert instructions == [Replace((2,))]
    assert machine.not_replaced([2], 2.0) == [Adopt((2,))]
    assert machine.replaced(2, 2.0, adopted=True) == [Tell("restore", 2, 2)]
    machine.answered(now_telling(machine, "restore", 2, 2), None, 3.0)
    machine.answered(now_telling(machine, "members", 0, 0), None, 3.1)
    # The exchange that was stopped does not begin again.
    assert machine.answered(now_telling(machine, "members", 1, 0), None, 3.1) == [Replaced((2,))]
    assert machine.begin(4.0) == []
    [failed] = machine.advance(5.0)
    assert isinstance(failed.error, MembershipChanged)
    # The worker that has adopted a rank may be lost as well.
    assert machine.lost([1, 2], "has left", 6.0) == [Replace((1, 2))]
    assert machine.replaced(1, 7.0) == []
    assert machine.replaced(2, 7.0) == [Tell("restore", 1, 2), Tell("restore", 2, 2)]
    assert not machine.adopted


def test_a_client_that_waits_for_an_epoch_is_told_that_a_rank_was_adopted() -> None:
    machine = committed_machine(2)
    machine.advance(1.0)
    machine.lost([1], "has left", 1.1)
    machine.answered(now_telling(machine, "abort", 0, 2), None, 1.2)
    machine.not_replaced([1], 2.0)
    machine.replaced(1, 2.0, adopted=True)
    machine.answered(now_telling(machine, "restore", 1, 2), None, 3.0)
    told, failed = machine.answered(now_telling(machine, "members", 0, 0), None, 3.1)
    assert told == Replaced((1,))
    assert isinstance(failed.error, MembershipChanged)


def test_a_rank_that_nobody_can_adopt_ends_the_session() -> None:
    machine = committed_machine(2)
    machine.lost([1], "has left", 1.0)
    for attempt in range(ATTEMPTS):
        assert machine.not_replaced([1], 2.0 + attempt) == [Adopt((1,))]
    [ended] = machine.not_replaced([1], 9.0)
    assert isinstance(ended.error, WorkerLost)
    early = replacing_machine(2, shrinks=True)  # before the first epoch there is nothing to adopt
    early.lost([1], "has left", 1.0)
    [ended] = early.not_replaced([1], 2.0)
    assert isinstance(ended.error, WorkerLost)


def test_if_all_are_lost_the_session_ends() -> None:
    machine = replacing_machine(2)
    machine.lost([1], "has left", 0.0)
    [ended] = machine.lost([0], "has left", 0.1)
    assert isinstance(ended.error, WorkerLost)


def test_if_all_ranks_are_replaced_one_after_the_other_the_session_goes_on() -> None:
    machine = replacing_machine(2)
    machine.advance(0.0)
    machine.lost([1], "has left", 0.1)
    machine.answered(now_telling(machine, "abort", 0, 1), None, 0.2)
    machine.replaced(1, 0.3)
    machine.lost([0], "has left", 0.4)
    assert machine.replaced(0, 0.5) == [Tell("restore", 0, 1), Tell("restore", 1, 1)]
    machine.answered(now_telling(machine, "restore", 0, 0), None, 0.6)
    found = machine.answered(now_telling(machine, "restore", 1, 0), None, 0.7)
    assert found == [Replaced((0, 1)), Tell("begin", 0, 2), Tell("begin", 1, 2)]


def test_a_worker_that_cannot_take_a_rank_does_not_end_the_session() -> None:
    machine = replacing_machine(2)
    machine.lost([1], "has left", 0.0)
    machine.replaced(1, 10.0)
    no_room = CacheBudgetError("no room here")
    assert machine.refused(now_telling(machine, "restore", 1, 0), no_room, 11.0) == [Replace((1,))]
    found = pass_time(machine, 11.0, 59.5)
    assert found == []
    [ended] = pass_time(machine, 59.5, 60.5)  # since the loss, not since the refusal
    assert "no room here" in str(ended.error)


def test_time_in_which_the_scheduler_was_blocked_does_not_count_as_silence() -> None:
    machine = machine_of(2)
    machine.advance(0.0)
    found = machine.tick(40.0)
    assert not any(isinstance(one, Ended) for one in found)
    assert not any(isinstance(one, Ended) for one in pass_time(machine, 40.0, 40.0 + HEARTBEAT - 1))
    assert any(isinstance(one, Ended) for one in pass_time(machine, 40.0 + HEARTBEAT - 1, 41.0 + HEARTBEAT))


def ends(machine: SessionMachine, start: float, end: float) -> list[Ended]:
    """How the session ends while time passes, if it does."""
    return [instruction for instruction in pass_time(machine, start, end) if isinstance(instruction, Ended)]


def test_a_worker_whose_answers_are_late_is_not_lost_while_it_gives_signs_of_life() -> None:
    machine = machine_of(2)
    machine.advance(0.0)
    machine.voted(1, 0, vote(), 0.1)
    now = 0.1
    while now < 10 * HEARTBEAT:
        assert not ends(machine, now, now + HEARTBEAT - 1)
        now += HEARTBEAT - 1
        machine.alive(1, now)
    assert not ends(machine, now, now + HEARTBEAT - 0.5)
    [ended] = ends(machine, now + HEARTBEAT - 0.5, now + HEARTBEAT + 0.5)
    assert "rank 1 has not answered for 15 s" in str(ended.error)


def test_bytes_that_arrive_at_another_worker_count_from_when_they_arrived() -> None:
    machine = machine_of(2)
    machine.advance(0.0)
    machine.voted(1, 0, vote(), 0.1)
    assert not ends(machine, 0.1, 10.0)
    machine.alive(1, 8.0)  # what another worker has received two seconds ago
    machine.alive(1, 6.0)  # an older sign that comes later changes nothing
    assert not ends(machine, 10.0, 8.0 + HEARTBEAT - 0.5)
    assert ends(machine, 8.0 + HEARTBEAT - 0.5, 8.0 + HEARTBEAT)
