"""A sender's answers to requests that come twice, in vain or too late, and what becomes of its buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from dshuffle.exchange.comms import BufferPool, Refusal, Reply, RowsReply
from dshuffle.exchange.endpoints import JobQueue, Sender
from dshuffle.exchange.mailboxes import MessageId, Outbox, flows_of_samples
from dshuffle.exchange.transports import RowSource
from dshuffle.rows import RowLayout

LAYOUT = RowLayout.of({"x": (np.dtype("i8"), ())})
SAMPLES = np.arange(100, 108)  # four messages of two rows


class Source:
    """The row of a sample is its number. Nobody else is asked: it also stands in for the network."""

    def __init__(self, samples: np.ndarray) -> None:
        self.samples = samples

    def __call__(self, first: int, last: int, rows: np.ndarray, checksums: np.ndarray) -> None:
        LAYOUT.column(rows, "x")[:] = self.samples[first:last]

    def is_local(self, participant: int) -> bool:
        return False


def play(scenario: Callable[[Sender], Awaitable[None]], *, window: int) -> None:
    async def main() -> None:
        jobs, pool = JobQueue(1, "test"), BufferPool(LAYOUT, 2, window)
        sender = Sender(Outbox(0, window=window), pool, Source(SAMPLES), jobs)  # type: ignore[arg-type]
        begin(sender, 1, SAMPLES)
        await asyncio.wait_for(scenario(sender), 10)
        await jobs.close()

    asyncio.run(main())


def begin(sender: Sender, run_id: int, samples: np.ndarray) -> None:
    source: asyncio.Future[RowSource] = asyncio.get_running_loop().create_future()
    source.set_result(Source(samples))
    sender.begin(run_id, flows_of_samples({1: np.arange(len(samples))}, at_most=2)[1], source)


def message(sequence: int, run_id: int = 1) -> MessageId:
    return MessageId(run_id, 0, 1, sequence)


async def asking(sender: Sender, sequence: int, run_id: int = 1) -> asyncio.Task[Reply]:
    """A request that has reached the sender."""
    task = asyncio.ensure_future(sender.serve(message(sequence, run_id)))
    await asyncio.sleep(0)
    return task


def samples_of(reply: Reply) -> list[int]:
    assert isinstance(reply, RowsReply)
    return LAYOUT.column(reply.rows, "x").tolist()


def test_who_asks_again_while_waiting_takes_the_place_of_the_request_before() -> None:
    async def scenario(sender: Sender) -> None:
        await sender.serve(message(0))
        waiting = [await asking(sender, 1) for _ in range(3)]
        for abandoned in waiting[:-1]:
            assert await abandoned == Refusal("superseded by a newer request")
        assert not waiting[-1].done()
        sender.acknowledged(message(0))
        assert samples_of(await waiting[-1]) == [102, 103]

    play(scenario, window=1)


def test_who_waits_when_the_run_ends_is_refused() -> None:
    async def scenario(sender: Sender) -> None:
        await sender.serve(message(0))
        waiting, early = await asking(sender, 1), await asking(sender, 0, run_id=2)
        sender.end()
        assert await waiting == Refusal("stale: rank 0 is past run 1")
        assert not early.done()
        begin(sender, 2, SAMPLES[::-1])
        assert samples_of(await early) == [107, 106]

    play(scenario, window=1)


def test_a_message_that_is_asked_for_again_is_packed_once() -> None:
    async def scenario(sender: Sender) -> None:
        slow, again = await sender.serve(message(0)), await sender.serve(message(0))
        assert np.shares_memory(slow.rows, again.rows)
        sender.acknowledged(message(0))
        for sequence in (1, 2, 3):  # the buffer of the slow reply is never used again: it may still be on its way
            reply = await sender.serve(message(sequence))
            assert not np.shares_memory(reply.rows, slow.rows)
            sender.acknowledged(message(sequence))
        assert samples_of(slow) == [100, 101]

    play(scenario, window=1)


def test_rows_that_a_disk_cannot_read_are_refused_and_may_be_read_from_the_store() -> None:
    async def scenario(sender: Sender) -> None:
        def fail(first: int, last: int, rows: np.ndarray, checksums: np.ndarray) -> None:
            raise OSError("the disk fails")

        source = asyncio.get_running_loop().create_future()
        source.set_result(fail)
        sender.end()
        sender.begin(2, flows_of_samples({1: np.arange(len(SAMPLES))}, at_most=2)[1], source)
        for sequence in range(3):  # each gets the only place in the window
            reply = await sender.serve(message(sequence, 2))
            assert reply == Refusal("OSError: the disk fails", again=True)

    play(scenario, window=1)
