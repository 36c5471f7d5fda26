"""Runs, votes and commits of a session."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from dshuffle.errors import ExchangeError
from dshuffle.planning.remainder import SampleDigest
from dshuffle.runtime.messages import CommitReply, Counts, Vote
from dshuffle.runtime.scheduler.machine import ATTEMPTS, CallEnded, EpochCommitted, Phase, PhaseOrder, check_votes

from .machines import given_order, machine_of, pass_time, vote
from .simulator import COMMITTED, TIMEOUT


def test_a_failed_run_is_repeated_and_the_last_failure_is_told() -> None:
    machine = machine_of(1)
    machine.advance(0.0)
    for attempt in range(1, ATTEMPTS):
        assert machine.voted(attempt, 0, vote(reason="noise"), 1.0) == [PhaseOrder("abort", 0, attempt)]
        assert machine.answered(given_order(machine, "abort", 0, attempt), None, 1.0) == [
            PhaseOrder("begin", 0, attempt + 1)
        ]
    machine.voted(ATTEMPTS, 0, vote(reason="noise"), 1.0)
    [failed] = machine.answered(given_order(machine, "abort", 0, ATTEMPTS), None, 1.0)
    assert isinstance(failed.error, ExchangeError)
    assert "epoch 0 could not be exchanged: rank 0: noise" in str(failed.error)
    assert machine.advance(2.0) == [PhaseOrder("begin", 0, ATTEMPTS + 1)]


def drawing(*samples: int) -> Vote:
    """A vote of a rank that draws samples although none are due."""
    return vote(drawn=SampleDigest.of(np.array(samples), 0), due=SampleDigest())


def test_a_worker_that_takes_a_rank_is_told_what_the_one_before_drew() -> None:
    machine = machine_of(2)
    for epoch, now in ((0, 0.0), (1, 1.0)):
        machine.advance(now)
        for rank in (0, 1):
            digest = SampleDigest(epoch, rank)
            machine.voted(epoch + 1, rank, vote(drawn=digest, due=digest), now)
        before = {0: SampleDigest(0, 0), 1: SampleDigest(0, 1)}
        assert machine.digests == ({} if epoch == 0 else before)  # of the epoch that it is on
        for rank in (0, 1):
            machine.answered(given_order(machine, "commit", rank, epoch + 1), COMMITTED, now)
        assert machine.digests == {0: SampleDigest(epoch, 0), 1: SampleDigest(epoch, 1)}


@pytest.mark.parametrize(
    "wrong", [vote(digest=2), vote(rows=1), vote(reason="the store is gone", again=False), drawing(3)]
)
def test_what_another_run_would_not_mend_is_not_repeated(wrong: dict) -> None:
    machine = machine_of(2)
    machine.advance(0.0)
    machine.voted(1, 0, vote(), 0.1)
    assert machine.voted(1, 1, wrong, 0.1) == [PhaseOrder("abort", 0, 1), PhaseOrder("abort", 1, 1)]
    machine.answered(given_order(machine, "abort", 0, 1), None, 0.2)
    [failed] = machine.answered(given_order(machine, "abort", 1, 1), None, 0.2)
    assert isinstance(failed, CallEnded)


def test_a_prefetch_that_failed_is_told_once() -> None:
    machine = machine_of(1)
    machine.begin(0.0)
    machine.voted(1, 0, vote(reason="no store", again=False), 0.1)
    assert machine.answered(given_order(machine, "abort", 0, 1), None, 0.1) == []
    assert machine.begin(0.2) == []
    assert [type(instruction) for instruction in machine.advance(0.3)] == [CallEnded]
    assert machine.advance(0.4) == [PhaseOrder("begin", 0, 2)]


def test_a_task_that_hangs_fails_the_epoch_after_the_timeout_and_not_the_session() -> None:
    machine = machine_of(2)
    machine.advance(0.0)
    for rank in (0, 1):
        instructions = machine.voted(1, rank, vote(), 0.1)
    assert PhaseOrder("commit", 1, 1) in instructions
    machine.answered(given_order(machine, "commit", 0, 1), COMMITTED, 0.2)
    now = 0.2
    while now < TIMEOUT + 0.1:
        machine.answered(given_order(machine, "commit", 1, 1), CommitReply(busy="1 task still running"), now)
        instructions = pass_time(machine, now, now + 5.5)
        now += 5.5
        assert PhaseOrder("commit", 1, 1) in instructions
    [failed] = [instruction for instruction in instructions if isinstance(instruction, CallEnded)]
    assert "the next epoch cannot begin: waiting to begin epoch 0: rank 1: 1 task still running" in str(failed.error)
    assert machine.advance(now) == []
    [committed] = machine.answered(given_order(machine, "commit", 1, 1), COMMITTED, now)
    assert isinstance(committed, EpochCommitted)
    assert machine.epoch == 0


def test_votes_and_answers_that_are_out_of_date_change_nothing() -> None:
    machine = machine_of(1)
    machine.advance(0.0)
    assert machine.voted(0, 0, vote(), 0.1) == []
    assert machine.answered(given_order(machine, "commit", 0, 1), None, 0.1) == []
    assert machine.answered(given_order(machine, "begin", 0, 1), None, 0.1) == []
    assert machine.refused(PhaseOrder("commit", 0, 1, machine.turn - 1), ExchangeError("late"), 0.1) == []
    assert machine.phase is Phase.EXCHANGING


def counts(drawn, due, **others):
    digests = {name: SampleDigest.of(np.array(ids), 0) for name, ids in (("drawn", drawn), ("due", due))}
    return Counts(**{"digest": 1, "expected": 3, "rows": 1, **digests, **others})


SERVED = Counts(digest=1, expected=3, rows=1)  # of a server that does not train


@pytest.mark.parametrize(
    ("votes", "wrong"),
    [
        ([counts([0, 3], [0, 1]), counts([1, 2], [2, 3]), SERVED], None),
        ([counts([0, 3], [0, 1], digest=2), counts([1, 2], [2, 3]), SERVED], "the workers made different plans. Inst"),
        (
            [counts([0, 3], [0, 1]), counts([1, 3], [2, 3]), SERVED],
            "drew 4 samples, which are not the 4 that are due",
        ),
        (
            [counts([1, 2], [0, 1]), counts([0, 3, 3], [2, 3]), SERVED],
            "drew 5 samples, which are not the 4",
        ),
        (
            [counts([1, 2], [0, 1]), counts([3], [2, 3]), SERVED],
            "drew 3 samples, which are not the 4 that are due. .* the same build of d",
        ),
        (
            [counts([0, 3], [0, 1]), counts([1, 2], [2, 3]), dataclasses.replace(SERVED, rows=0)],
            "2 rows arrived, but 3 were expected",
        ),
    ],
)
def test_votes_that_do_not_fit_together(votes, wrong):
    reason = check_votes(7, votes)
    assert reason is None if wrong is None else re.search(f"^epoch 7: .*{wrong}", reason)
