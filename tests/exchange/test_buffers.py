"""Buffers of messages: never two messages in one, used again when given back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.exchange.buffers import Buffer, BufferPool
from dshuffle.exchange.messages import MessageId
from dshuffle.rows import RowLayout

LAYOUT = RowLayout.of({"x": (np.dtype("f4"), (3,))})
ROWS = 10


def message(sequence: int, run_id: int = 1) -> MessageId:
    return MessageId(run_id, 0, 1, sequence)


def address(buffer: Buffer) -> tuple[int, int]:
    return buffer[0].ctypes.data, buffer[1].ctypes.data


def share_memory(a: Buffer, b: Buffer) -> bool:
    return np.shares_memory(a[0], b[0]) or np.shares_memory(a[1], b[1])


@given(data=st.data(), size=st.integers(0, 3))
def test_no_two_messages_in_use_share_a_buffer(data: st.DataObject, size: int) -> None:
    pool = BufferPool(LAYOUT, ROWS, size)
    in_use: dict[MessageId, Buffer] = {}
    abandoned: list[Buffer] = []  # somebody may still be reading them
    for _ in range(data.draw(st.integers(0, 30))):
        m = message(data.draw(st.integers(0, 5)))
        match data.draw(st.sampled_from(["take", "take", "give back", "give back", "forget"])):
            case "take":
                n_rows = data.draw(st.integers(1, ROWS))
                buffer = pool.take(m, n_rows)
                assert buffer[0].shape == (n_rows, LAYOUT.nbytes)
                assert (buffer[1].shape, buffer[1].dtype) == ((n_rows,), np.uint32)
                assert not any(share_memory(buffer, other) for other in [*in_use.values(), *abandoned])
                if m in in_use:  # packed again, and the first reply may still be under way
                    abandoned.append(in_use[m])
                in_use[m] = buffer
            case "give back":
                pool.give_back(m)
                in_use.pop(m, None)
            case "forget":
                pool.forget()
                abandoned += in_use.values()
                in_use.clear()


def test_a_buffer_that_is_given_back_is_used_again() -> None:
    pool = BufferPool(LAYOUT, ROWS, size=2)
    first = pool.take(message(0), ROWS)
    pool.give_back(message(0))
    again = pool.take(message(1), ROWS - 7)  # also for a message that is smaller
    assert address(again) == address(first)
    assert len(again[0]) == len(again[1]) == ROWS - 7
    pool.give_back(message(1))
    assert address(pool.take(message(2), ROWS)) == address(first)


def test_a_repeated_return_does_not_double_a_buffer() -> None:
    pool = BufferPool(LAYOUT, ROWS, size=4)
    pool.take(message(0), ROWS)
    pool.give_back(message(0))
    pool.give_back(message(0))
    assert not share_memory(pool.take(message(1), ROWS), pool.take(message(2), ROWS))


def test_no_more_idle_buffers_are_kept_than_asked_for() -> None:
    pool = BufferPool(LAYOUT, ROWS, size=2)
    buffers = [pool.take(message(i), ROWS) for i in range(5)]
    for i in range(5):
        pool.give_back(message(i))
    again = [pool.take(message(i), ROWS) for i in range(3)]
    assert [any(share_memory(a, b) for b in buffers) for a in again] == [True, True, False]


@pytest.mark.parametrize("rows_per_message", [ROWS, ROWS // 3])
def test_shorter_messages_may_keep_more_buffers_in_the_same_room(rows_per_message: int) -> None:
    pool = BufferPool(LAYOUT, ROWS, size=2)
    pool.fit(rows_per_message)
    kept = 2 * ROWS // rows_per_message
    buffers = [pool.take(message(i), rows_per_message) for i in range(kept + 2)]
    for i in range(kept + 2):
        pool.give_back(message(i))
    again = [pool.take(message(i), rows_per_message) for i in range(kept + 1)]
    assert [any(share_memory(a, b) for b in buffers) for a in again] == [True] * kept + [False]


@pytest.mark.parametrize(("n_rows", "kept"), [(4, False), (5, True), (ROWS, True)])
def test_a_small_last_message_takes_little_room_and_is_not_kept(n_rows: int, kept: bool) -> None:
    pool = BufferPool(LAYOUT, ROWS, size=2)
    rows, _ = small = pool.take(message(0), n_rows)
    assert rows.base is not None
    assert rows.base.size == (ROWS if kept else n_rows) * LAYOUT.nbytes
    pool.give_back(message(0))
    assert share_memory(pool.take(message(1), ROWS), small) == kept


def test_what_is_forgotten_is_not_used_again() -> None:
    pool = BufferPool(LAYOUT, ROWS, size=2)
    abandoned = pool.take(message(0), ROWS)
    pool.forget()
    pool.give_back(message(0))  # an acknowledgement of the run before
    assert not share_memory(pool.take(message(0, run_id=2), ROWS), abandoned)
