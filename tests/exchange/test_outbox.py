"""What an outbox answers, keeps waiting and refuses."""

from __future__ import annotations

import pytest

from dshuffle.exchange.mailboxes import Answer, MessageId, Outbox


def message(sequence: int, *, run_id: int = 1, destination: int = 2, sender: int = 0) -> MessageId:
    return MessageId(run_id, sender, destination, sequence)


def started(window: int = 2, owed: int = 9, run_id: int = 1) -> Outbox:
    outbox = Outbox(0, window=window)
    assert outbox.begin(run_id, {2: owed}) == []
    return outbox


def test_requests_beyond_the_window_wait_for_acknowledgements_and_the_earliest_message_comes_first() -> None:
    outbox = started(window=2)
    assert [outbox.request(message(i)) for i in (4, 1, 3, 0)] == [[Answer(message(4))], [Answer(message(1))], [], []]
    assert outbox.in_flight == {message(4), message(1)}
    assert outbox.acknowledged(message(1)) == [Answer(message(0))]
    assert outbox.acknowledged(message(4)) == [Answer(message(3))]
    assert outbox.in_flight == {message(3), message(0)}


def test_a_destination_takes_no_more_than_its_part_of_the_window() -> None:
    """Two destinations with two messages each at a time, although the first one has asked for all of its own before."""
    first, second = ([MessageId(1, 0, destination, sequence) for sequence in range(4)] for destination in (2, 3))
    outbox = Outbox(0, window=4)
    assert outbox.begin(1, {2: 4, 3: 4}, to_one=2) == []
    assert [bool(outbox.request(message)) for message in first] == [True, True, False, False]
    assert [bool(outbox.request(message)) for message in second[1:]] == [True, True, False]
    assert outbox.request(second[0]) == []
    assert outbox.acknowledged(first[1]) == [Answer(first[2])]
    assert outbox.acknowledged(second[1]) == [Answer(second[0])]
    assert outbox.acknowledged(first[0]) == [Answer(first[3])]
    assert outbox.acknowledged(first[2]) == outbox.acknowledged(first[3]) == []
    # A request that waited too long lifts the limit for its destination: an acknowledgement may be lost.
    assert outbox.request(second[3]) == []
    outbox.withdraw(second[3])
    assert outbox.request(second[3]) == [Answer(second[3])]
    # The limit is that of one run.
    outbox.end()
    outbox.begin(2, {2: 4})
    assert all(outbox.request(MessageId(2, 0, 2, sequence)) for sequence in range(4))


def test_requests_that_come_before_the_run_are_answered_when_it_begins() -> None:
    outbox = Outbox(0, window=2)
    early = [message(0), message(7), message(1), message(2), message(0, run_id=2)]
    assert [outbox.request(m) for m in early] == [[]] * 5
    [sent, refused, also_sent] = outbox.begin(1, {2: 3})
    assert [sent, also_sent] == [Answer(message(0)), Answer(message(1))]
    assert refused == Answer(message(7), "this run has 3 messages for destination 2")
    assert outbox.acknowledged(message(0)) == [Answer(message(2))]
    # The request for the run after this one still waits.
    outbox.end()
    assert outbox.begin(2, {2: 1}) == [Answer(message(0, run_id=2))]


@pytest.mark.parametrize("ended", [False, True])
def test_an_older_run_is_refused(ended: bool) -> None:
    outbox = started(run_id=3)
    if ended:
        outbox.end()
    for run_id in (0, 2) + (3,) * ended:
        [refusal] = outbox.request(message(0, run_id=run_id))
        assert refusal == Answer(message(0, run_id=run_id), f"stale: rank 0 is past run {run_id}")
    assert not outbox.in_flight


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (message(9), "this run has 9 messages for destination 2"),
        (message(-1), "this run has 9 messages for destination 2"),
        (message(0, destination=4), "this run has 0 messages for destination 4"),
    ],
)
def test_a_refusal_names_the_reason(bad: MessageId, reason: str) -> None:
    outbox = started()
    assert outbox.request(bad) == [Answer(bad, reason)]
    assert not outbox.in_flight


def test_a_lost_reply_is_repeated_without_taking_more_of_the_window() -> None:
    outbox = started(window=1)
    outbox.request(message(0))
    assert outbox.request(message(0)) == [Answer(message(0))]
    assert outbox.in_flight == {message(0)}
    assert outbox.request(message(1)) == []
    assert outbox.acknowledged(message(0)) == [Answer(message(1))]


def test_the_end_refuses_what_waits_and_leaves_nothing_behind() -> None:
    outbox = started(window=1)
    for sequence in range(3):
        outbox.request(message(sequence))
    assert outbox.end() == [Answer(message(i), "stale: rank 0 is past run 1") for i in (1, 2)]
    assert not outbox.in_flight
    assert outbox.acknowledged(message(0)) == []  # too late
    assert outbox.end() == []
    assert outbox.begin(2, {2: 1}) == []
    assert outbox.request(message(0, run_id=2)) == [Answer(message(0, run_id=2))]


def test_closing_refuses_requests_for_runs_that_never_begin():
    outbox = Outbox(0, window=2)
    outbox.begin(1, {1: 1})
    early = MessageId(2, 0, 1, 0)
    assert outbox.request(early) == []
    assert outbox.end() == []
    assert outbox.end(closes=True) == [Answer(early, "stale: rank 0 is past run 2")]
    assert outbox.end(closes=True) == []
    assert outbox.request(early) != []


# -- gates ---------------------------------------------------------------------------------------------------------


def gated(*gates: int, window: int = 4) -> Outbox:
    """A started outbox whose message i for participant 2 waits for the i-th gate; those for 3 wait for none."""
    outbox = Outbox(0, window=window)
    assert outbox.begin(1, {2: len(gates), 3: 2}, gates={2: gates}) == []
    return outbox


def test_a_message_waits_while_its_gate_is_shut_and_goes_when_it_opens() -> None:
    outbox = gated(0, 1, -1, 0)
    assert [outbox.request(message(i)) for i in range(4)] == [[], [], [Answer(message(2))], []]
    assert outbox.open_gate(1, 0) == [Answer(message(0)), Answer(message(3))]
    assert outbox.open_gate(1, 0) == []
    assert outbox.in_flight == {message(0), message(2), message(3)}
    assert outbox.request(message(1)) == []  # asked for again, it still waits
    assert outbox.acknowledged(message(2)) == []
    assert outbox.open_gate(1, 1) == [Answer(message(1))]
