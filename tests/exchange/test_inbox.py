"""The transition table of inbox.py, row by row, and the order in which an inbox asks."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.exchange.mailboxes import Arrived, Fetch, Inbox, MessageId


def started(owed: Mapping[int, int], *, window: int = 4, rank: int = 0, run_id: int = 1) -> Inbox:
    inbox = Inbox(rank, window=window)
    inbox.begin(run_id, owed)
    return inbox


def asked(instructions: list[Fetch | Arrived]) -> list[tuple[int, int]]:
    """(sender, sequence) of each request; nothing but requests may be there."""
    assert all(isinstance(instruction, Fetch) for instruction in instructions)
    return [(i.message.sender, i.message.sequence) for i in instructions if isinstance(i, Fetch)]


M0, M1 = MessageId(1, 5, 0, 0), MessageId(1, 5, 0, 1)
READY = Arrived(1)


def test_begin() -> None:
    assert Inbox(0, window=4).begin(1, {5: 2}) == [Fetch(M0), Fetch(M1)]
    assert Inbox(0, window=4).begin(1, {5: 0, 6: 0}) == Inbox(0, window=4).begin(1, {}) == [READY]


def test_what_arrives_is_no_longer_outstanding_and_the_last_one_ends_the_run() -> None:
    inbox = started({5: 2})
    assert inbox.arrived(M1) == []
    assert inbox.outstanding == {M0}
    assert inbox.arrived(M0) == [READY]
    assert inbox.begin(2, {}) == [Arrived(2)]


def test_a_request_that_fails_is_repeated_and_then_its_rows_are_read() -> None:
    inbox = started({5: 2})
    assert inbox.failed(M0, "lost") == [Fetch(M0)]
    inbox.failed(M1, "another one's failures do not count")
    assert inbox.failed(M0, "lost") == [Fetch(M0)]
    assert inbox.failed(M0, "cut off") == [Fetch(M0, instead=True)]
    inbox.arrived(M1)
    assert inbox.failed(M0, "no store") == [
        Arrived(
            1,
            "run 1, rank 5 to rank 0, message 0: cut off (attempt 3), and the rows could not be read from the store"
            ": no store",
            again=True,
        )
    ]
    assert inbox.arrived(M0) == []


def test_a_failure_that_lasts_ends_the_run() -> None:
    inbox = started({5: 2})
    reason = "run 1, rank 5 to rank 0, message 0: no such rows"
    assert inbox.failed(M0, "no such rows", again=False) == [Arrived(1, reason, again=False)]
    assert inbox.arrived(M1) == inbox.failed(M1, "late") == []


def idle() -> Inbox:
    return Inbox(0, window=4)


def receiving() -> Inbox:
    return started({5: 2, 6: 9})


def ready() -> Inbox:
    return started({})


def failed() -> Inbox:
    inbox = started({5: 2})
    inbox.failed(M0, "lost", again=False)
    return inbox


@pytest.mark.parametrize("state", [idle, receiving, ready, failed])
def test_after_an_abort_late_messages_change_nothing_and_the_next_run_is_as_good_as_new(
    state: Callable[[], Inbox],
) -> None:
    inbox = state()
    inbox.abort()
    assert not inbox.outstanding
    assert inbox.arrived(M0) == inbox.failed(M1, "late", again=False) == []
    # The next run asks for what it is owed, and for nothing else.
    assert asked(inbox.begin(2, {7: 1})) == [(7, 0)]
    assert inbox.arrived(M0) == []
    assert inbox.arrived(MessageId(2, 7, 0, 0)) == [Arrived(2)]


def test_a_message_counts_once() -> None:
    inbox = started({5: 2})
    inbox.arrived(M0)
    assert inbox.arrived(M0) == []
    assert inbox.failed(M0, "a timeout that came too late") == []
    assert inbox.arrived(M1) == [READY]


def test_senders_take_turns_and_the_window_holds() -> None:
    inbox = Inbox(1, window=3)
    # Rank 1 starts with the sender behind it; the server (-1) and rank 0 come last.
    first = inbox.begin(1, {0: 1, 3: 2, -1: 1, 2: 3})
    assert asked(first) == [(2, 0), (3, 0), (-1, 0)]
    order = []
    while inbox.outstanding:
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
    """The first message that a sender owes is always asked for: those after it may wait for a gate that it opens."""
    rng = random.Random(seed)
    inbox = Inbox(7, window=1, attempts=10**6)
    left = {MessageId(1, sender, 7, sequence) for sender, count in owed.items() for sequence in range(count)}
    instructions = inbox.begin(1, owed, window=max(1, sum(count > 0 for count in owed.values())) + spare)
    while inbox.outstanding:
        assert len(inbox.outstanding) == min(inbox.window, len(left))
        for sender in {message.sender for message in left}:
            assert min(message for message in left if message.sender == sender) in inbox.outstanding
        message = rng.choice(sorted(inbox.outstanding))
        if lossy and rng.random() < 0.4:
            instructions = inbox.failed(message, "lost")
        else:
            left.discard(message)
            instructions = inbox.arrived(message)
    assert instructions == [READY]
    assert not left
