"""The transition table of inbox.py, row by row, and the order in which an inbox asks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import ExchangeError
from dshuffle.exchange.mailboxes import (
    Fetch,
    Inbox,
    InboxInstruction,
    InboxState,
    ReadInstead,
    ReportFailed,
    ReportReady,
)
from dshuffle.exchange.messages import MessageId


def started(owed: Mapping[int, int], *, window: int = 4, rank: int = 0, run_id: int = 1) -> Inbox:
    inbox = Inbox(rank, window=window)
    inbox.begin(run_id, owed)
    return inbox


def asked(instructions: list[InboxInstruction]) -> list[tuple[int, int]]:
    """(sender, sequence) of each request; nothing but requests may be there."""
    assert all(isinstance(instruction, Fetch) for instruction in instructions)
    return [(i.message.sender, i.message.sequence) for i in instructions if isinstance(i, Fetch)]


M0, M1 = MessageId(1, 5, 0, 0), MessageId(1, 5, 0, 1)


class TestTransitions:
    """One test a row of the table."""

    def test_idle_begin_to_receiving(self) -> None:
        inbox = Inbox(0, window=4)
        assert inbox.state is InboxState.IDLE
        assert inbox.begin(1, {5: 2}) == [Fetch(M0), Fetch(M1)]
        assert inbox.state is InboxState.RECEIVING

    @pytest.mark.parametrize("owed", [{}, {5: 0, 6: 0}])
    def test_idle_begin_to_ready_when_nothing_is_owed(self, owed: dict[int, int]) -> None:
        inbox = Inbox(0, window=4)
        assert inbox.begin(1, owed) == [ReportReady(1)]
        assert inbox.state is InboxState.READY

    def test_receiving_arrived_not_the_last(self) -> None:
        inbox = started({5: 2})
        assert inbox.arrived(M1) == []
        assert inbox.state is InboxState.RECEIVING
        assert inbox.outstanding == {M0}

    def test_receiving_arrived_the_last(self) -> None:
        inbox = started({5: 2})
        inbox.arrived(M1)
        assert inbox.arrived(M0) == [ReportReady(1)]
        assert inbox.state is InboxState.READY

    def test_receiving_failed_with_attempts_left(self) -> None:
        inbox = started({5: 1})
        assert inbox.failed(M0, "lost") == [Fetch(M0)]
        assert inbox.failed(M0, "lost") == [Fetch(M0)]
        assert inbox.state is InboxState.RECEIVING
        assert inbox.arrived(M0) == [ReportReady(1)]

    def test_receiving_failed_without_attempts_left(self) -> None:
        inbox = started({5: 2})
        inbox.failed(M0, "lost")
        inbox.failed(M1, "another one's failures do not count")
        inbox.failed(M0, "lost")
        assert inbox.failed(M0, "cut off") == [ReadInstead(M0)]
        assert inbox.state is InboxState.RECEIVING

    def test_receiving_failed_and_not_in_the_store_either(self) -> None:
        inbox = started({5: 2})
        for _ in range(3):
            inbox.failed(M0, "lost")
        assert inbox.failed(M0, "no store") == [
            ReportFailed(
                1,
                "run 1, rank 5 to rank 0, message 0: lost (attempt 3), and the rows could not be read from the store"
                ": no store",
                again=True,
            )
        ]
        assert inbox.state is InboxState.FAILED

    def test_receiving_failed_and_not_worth_another(self) -> None:
        inbox = started({5: 1})
        [report] = inbox.failed(M0, "no such rows", again=False)
        assert report == ReportFailed(1, "run 1, rank 5 to rank 0, message 0: no such rows", again=False)
        assert inbox.state is InboxState.FAILED

    def test_ready_commit_to_idle(self) -> None:
        inbox = started({})
        inbox.commit(1)
        assert inbox.state is InboxState.IDLE
        assert inbox.begin(2, {}) == [ReportReady(2)]

    def idle(self) -> Inbox:
        return Inbox(0, window=4)

    def receiving(self) -> Inbox:
        return started({5: 2, 6: 9})

    def ready(self) -> Inbox:
        return started({})

    def failed(self) -> Inbox:
        inbox = started({5: 2})
        inbox.failed(M0, "lost", again=False)
        return inbox

    @pytest.mark.parametrize("state", [idle, receiving, ready, failed])
    def test_any_abort_to_idle(self, state: Callable[[object], Inbox]) -> None:
        inbox = state(self)
        assert inbox.state is InboxState(state.__name__)
        inbox.abort()
        assert inbox.state is InboxState.IDLE
        assert not inbox.outstanding
        # Nothing of the aborted run is left: the next one asks for what it is owed, and for nothing else.
        assert asked(inbox.begin(2, {7: 1})) == [(7, 0)]
        assert inbox.arrived(MessageId(2, 7, 0, 0)) == [ReportReady(2)]

    @pytest.mark.parametrize("state", [receiving, ready, failed])
    def test_begin_within_a_run_is_refused(self, state: Callable[[object], Inbox]) -> None:
        inbox = state(self)
        with pytest.raises(ExchangeError, match=f"run 2 cannot begin on rank 0: run 1 is {state.__name__}"):
            inbox.begin(2, {5: 1})
        assert inbox.run_id == 1

    @pytest.mark.parametrize("state", [idle, receiving, failed])
    def test_commit_when_not_ready_is_refused(self, state: Callable[[object], Inbox]) -> None:
        inbox = state(self)
        with pytest.raises(ExchangeError, match=f"run 1 cannot be committed on rank 0: run -?1 is {state.__name__}"):
            inbox.commit(1)
        assert inbox.state is InboxState(state.__name__)

    @pytest.mark.parametrize("state", [idle, ready, failed])
    def test_late_messages_change_nothing(self, state: Callable[[object], Inbox]) -> None:
        inbox = state(self)
        assert inbox.arrived(M0) == []
        assert inbox.failed(M1, "late", again=False) == []
        assert inbox.state is InboxState(state.__name__)


def test_a_message_counts_once() -> None:
    inbox = started({5: 2})
    inbox.arrived(M0)
    assert inbox.arrived(M0) == []
    assert inbox.failed(M0, "a timeout that came too late") == []
    assert inbox.state is InboxState.RECEIVING
    assert inbox.arrived(M1) == [ReportReady(1)]


def test_senders_take_turns_and_the_window_holds() -> None:
    inbox = Inbox(1, window=3)
    # Rank 1 starts with the sender behind it; the server (-1) and rank 0 come last.
    first = inbox.begin(1, {0: 1, 3: 2, -1: 1, 2: 3})
    assert asked(first) == [(2, 0), (3, 0), (-1, 0)]
    order = []
    while inbox.state is InboxState.RECEIVING:
        assert len(inbox.outstanding) <= 3
        order += [i for i in inbox.arrived(min(inbox.outstanding)) if isinstance(i, Fetch)]
    assert asked(list(order)) == [(0, 0), (2, 1), (3, 1), (2, 2)]


# -- the window ----------------------------------------------------------------------------------------------------


def test_the_sender_of_whom_the_least_is_asked_is_next() -> None:
    inbox = Inbox(0, window=4)
    assert asked(inbox.begin(1, {1: 9, 2: 1, 3: 9})) == [(1, 0), (3, 0), (2, 0), (1, 1)]
    assert asked(inbox.arrived(MessageId(1, 2, 0, 0))) == [(3, 1)]
    assert asked(inbox.arrived(MessageId(1, 1, 0, 1))) == [(1, 2)]
    assert asked(inbox.arrived(MessageId(1, 1, 0, 0))) == [(1, 3)]
    assert asked(inbox.arrived(MessageId(1, 3, 0, 1))) == [(3, 2)]


Owed = st.dictionaries(st.integers(-1, 6), st.integers(0, 8), min_size=1, max_size=6)


@given(owed=Owed, spare=st.integers(0, 4), seed=st.integers(0, 2**32), lossy=st.booleans())
def test_with_a_window_of_one_for_each_sender_nobody_who_owes_something_is_asked_for_nothing(
    owed: dict[int, int], spare: int, seed: int, lossy: bool
) -> None:
    rng = random.Random(seed)
    inbox = Inbox(7, window=1, attempts=10**6)
    left = Counter(owed)
    instructions = inbox.begin(1, owed, window=max(1, sum(count > 0 for count in owed.values())) + spare)
    while inbox.state is InboxState.RECEIVING:
        requests = Counter(message.sender for message in inbox.outstanding)
        assert all(0 < requests[sender] <= count for sender, count in left.items() if count), (left, requests)
        assert requests.total() == min(inbox.window, left.total())
        message = rng.choice(sorted(inbox.outstanding))
        if lossy and rng.random() < 0.4:
            instructions = inbox.failed(message, "lost")
        else:
            left[message.sender] -= 1
            instructions = inbox.arrived(message)
    assert instructions == [ReportReady(1)]
    assert not left.total()


@given(owed=Owed, spare=st.integers(0, 4), seed=st.integers(0, 2**32))
def test_the_first_message_that_a_sender_owes_is_always_asked_for(owed: dict[int, int], spare: int, seed: int) -> None:
    """Even if it was asked for before and failed: those after it may wait for a gate that it counts towards."""
    rng = random.Random(seed)
    inbox = Inbox(7, window=1, attempts=10**6)
    left = {MessageId(1, sender, 7, sequence) for sender, count in owed.items() for sequence in range(count)}
    inbox.begin(1, owed, window=max(1, sum(count > 0 for count in owed.values())) + spare)
    while inbox.state is InboxState.RECEIVING:
        for sender in {message.sender for message in left}:
            first = min(message for message in left if message.sender == sender)
            assert first in inbox.outstanding, (first, inbox.outstanding)
        message = rng.choice(sorted(inbox.outstanding))
        if rng.random() < 0.4:
            inbox.failed(message, "lost")
        else:
            left.discard(message)
            inbox.arrived(message)


class TestGivingUp:
    """A slow sender's messages are read from the store."""

    def test_unanswered_requests_and_all_that_follow_are_read(self) -> None:
        inbox = started({5: 3, 6: 1}, window=3)
        unpacking = MessageId(1, 5, 0, 0)
        unanswered = [message for message in inbox.outstanding if message != unpacking]
        [read] = inbox.give_up(5, unanswered)
        assert read == ReadInstead(M1)
        assert inbox.give_up(5, unanswered) == []
        assert inbox.arrived(MessageId(1, 6, 0, 0)) == [ReadInstead(MessageId(1, 5, 0, 2))]
        assert inbox.arrived(unpacking) == []
        assert inbox.arrived(M1) == []
        assert inbox.arrived(MessageId(1, 5, 0, 2)) == [ReportReady(1)]

    def test_if_the_rows_cannot_be_read_they_are_requested_after_all(self) -> None:
        inbox = started({5: 2}, window=1)
        inbox.give_up(5, [M0])
        assert inbox.failed(M0, "no such file", again=False) == [Fetch(M0)]
        assert inbox.give_up(5, [M0]) == []
        assert inbox.arrived(M0) == [Fetch(M1)]
        for _ in range(2):
            assert inbox.failed(M1, "reset") == [Fetch(M1)]
        assert inbox.failed(M1, "reset") == [ReadInstead(M1)]
        [failed] = inbox.failed(M1, "no such file", again=False)
        assert isinstance(failed, ReportFailed)

    def test_nothing_is_given_up_in_another_state_or_twice_in_the_next_run(self) -> None:
        inbox = started({5: 1})
        inbox.abort()
        assert inbox.give_up(5, [M0]) == []
        assert inbox.begin(2, {5: 1}) == [Fetch(MessageId(2, 5, 0, 0))]
