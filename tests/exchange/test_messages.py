"""How a flow of rows is cut into messages, and what a message is called."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.errors import InvalidParameter
from dshuffle.exchange.messages import Cut, MessageId


@given(rows_per_message=st.integers(1, 9), n_rows=st.integers(0, 60))
def test_the_messages_of_a_flow_tile_its_rows(rows_per_message: int, n_rows: int) -> None:
    cut = Cut(rows_per_message)
    bounds = [cut.bounds(sequence, n_rows) for sequence in range(cut.count(n_rows))]
    assert [row for first, last in bounds for row in range(first, last)] == list(range(n_rows))
    # All are full but perhaps the last, and none is empty.
    assert all(last - first == rows_per_message for first, last in bounds[:-1])
    assert all(0 < last - first <= rows_per_message for first, last in bounds)


@pytest.mark.parametrize("sequence", [-1, 3])
def test_a_message_beyond_the_flow_is_refused(sequence: int) -> None:
    with pytest.raises(InvalidParameter, match=rf"sequence={sequence} is not allowed.*\[0, 3\)"):
        Cut(4).bounds(sequence, 12)


def test_an_empty_flow_has_no_message() -> None:
    assert Cut(4).count(0) == 0
    with pytest.raises(InvalidParameter, match="sequence=0"):
        Cut(4).bounds(0, 0)


@given(row_nbytes=st.integers(1, 5000), message_bytes=st.integers(1, 5000))
def test_a_message_is_as_close_below_its_size_as_whole_rows_allow(row_nbytes: int, message_bytes: int) -> None:
    rows = Cut.of(row_nbytes=row_nbytes, message_bytes=message_bytes).rows_per_message
    assert rows * row_nbytes <= message_bytes or rows == 1
    assert (rows + 1) * row_nbytes > message_bytes


def test_rows_without_bytes_can_be_cut() -> None:
    assert Cut.of(row_nbytes=0, message_bytes=64).rows_per_message == 64


def test_a_message_holds_at_least_a_row() -> None:
    with pytest.raises(InvalidParameter, match="rows_per_message=0"):
        Cut(0)


def test_a_message_id_says_where_it_goes_and_travels() -> None:
    message = MessageId(3, -1, 2, 7)
    assert str(message) == "run 3, -1 -> 2, message 7"
    assert pickle.loads(pickle.dumps(message)) == message
    assert len({message, MessageId(3, -1, 2, 7), MessageId(4, -1, 2, 7)}) == 2
