"""Buffers of messages: never two messages in one, used again when given back, in shared memory where asked for."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshuffle.exchange import comms as buffers
from dshuffle.exchange.comms import Buffer, BufferPool
from dshuffle.exchange.mailboxes import MessageId
from dshuffle.rows import RowLayout

LAYOUT = RowLayout.of({"x": (np.dtype("u1"), (2**16,))})
ROWS = 10

both = pytest.mark.parametrize("shared", [False, True], ids=["own memory", "shared memory"])


def message(sequence: int, run_id: int = 1) -> MessageId:
    return MessageId(run_id, 0, 1, sequence)


def address(buffer: Buffer) -> tuple[int, int]:
    return buffer.rows.ctypes.data, buffer.checksums.ctypes.data


def share_memory(a: Buffer, b: Buffer) -> bool:
    return np.shares_memory(a.rows, b.rows) or np.shares_memory(a.checksums, b.checksums)


@given(data=st.data(), size=st.integers(0, 3))
def test_no_two_messages_in_use_share_a_buffer(data: st.DataObject, size: int) -> None:
    pool = BufferPool(LAYOUT, ROWS, size)
    in_use: dict[MessageId, Buffer] = {}
    abandoned: list[Buffer] = []  # somebody may still be reading them
    longest = ROWS
    for _ in range(data.draw(st.integers(0, 30))):
        m = message(data.draw(st.integers(0, 5)))
        match data.draw(st.sampled_from(["take", "take", "give back", "give back", "drop", "begin"])):
            case "take":
                n_rows = data.draw(st.integers(1, longest))
                buffer = pool.take(m, n_rows, shared=data.draw(st.booleans()))
                assert buffer.rows.shape == (n_rows, LAYOUT.nbytes)
                assert (buffer.checksums.shape, buffer.checksums.dtype) == ((n_rows,), np.uint32)
                assert buffer.place is None or buffer.place.n_rows == n_rows
                assert not any(share_memory(buffer, other) for other in [*in_use.values(), *abandoned])
                if m in in_use:  # packed again, and the first reply may still be under way
                    abandoned.append(in_use[m])
                in_use[m] = buffer
            case "give back":
                pool.give_back(m)
                in_use.pop(m, None)
            case "drop":
                pool.drop(m)
                abandoned += [in_use.pop(m)] if m in in_use else []
            case "begin":
                longest = data.draw(st.integers(1, ROWS))
                pool.begin(longest)
                abandoned += in_use.values()
                in_use.clear()


@both
def test_a_buffer_that_is_given_back_is_used_again(shared: bool) -> None:
    pool = BufferPool(LAYOUT, ROWS, size=2)
    first = pool.take(message(0), ROWS, shared=shared)
    pool.give_back(message(0))
    again = pool.take(message(1), ROWS - 5 if shared else ROWS - 7, shared=shared)  # also for a shorter message
    assert address(again) == address(first)
    assert len(again.rows) == len(again.checksums) == (ROWS - 5 if shared else ROWS - 7)
    pool.give_back(message(1))
    assert address(pool.take(message(2), ROWS, shared=shared)) == address(first)


@both
def test_what_was_not_given_back_is_not_used_again(shared: bool) -> None:
    pool = BufferPool(LAYOUT, ROWS, size=2)
    abandoned = pool.take(message(0), ROWS, shared=shared)
    pool.begin(ROWS)
    pool.give_back(message(0))  # an acknowledgement of the run before
    buffers = [pool.take(message(i, run_id=2), ROWS, shared=shared) for i in range(4)]
    assert not any(share_memory(buffer, abandoned) for buffer in buffers)
    assert sum(buffer.place is not None for buffer in buffers) == (2 if shared else 0)


def test_without_shared_memory_messages_get_other_buffers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(nbytes: int) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(buffers, "SharedMemory", refuse)
    pool = BufferPool(LAYOUT, ROWS, size=2)
    assert [pool.take(message(i), ROWS, shared=True).place for i in range(2)] == [None, None]
    assert caplog.text.count("use the network: too many open files") == 1


@pytest.mark.parametrize("ending", ["begin", "close"])
def test_memory_is_freed_at_once_and_a_buffer_that_is_still_read_stays(ending: str) -> None:
    pool = BufferPool(LAYOUT, ROWS, size=1)
    buffer = pool.take(message(0), ROWS, shared=True)
    buffer.rows[:] = 7
    assert buffer.place is not None
    name = f"/proc/self/fd/{buffer.place.fd}"
    inode = f" {buffer.place.inode} "
    assert os.readlink(name).startswith("/memfd:dshuffle")
    gc.disable()
    try:
        if ending == "begin":
            pool.begin(ROWS)  # without the buffer, which was not given back
        else:
            pool.close()
            assert pool.take(message(1), ROWS, shared=True).place is None
        assert not os.path.exists(name)
        assert inode in Path("/proc/self/maps").read_text()
        assert (buffer.rows == 7).all()
        del buffer
        assert inode not in Path("/proc/self/maps").read_text()
        pool.close()
    finally:
        gc.enable()
