"""Messages over Dask: short ones in one string, long ones of this host through shared memory, and acknowledgements.

Acknowledgements travel with the next request to the same sender, or at once, and are not lost with a request.
"""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Status
from distributed.protocol import dumps, loads

from dshuffle.errors import ExchangeError
from dshuffle.exchange.comms import (
    Buffer,
    DaskNetwork,
    Later,
    Place,
    Refusal,
    Reply,
    RowsReply,
    SharedMemory,
    buffer_nbytes,
    from_fields,
    host,
    may_share,
    to_fields,
)
from dshuffle.exchange.mailboxes import MessageId


class FakeWorker:
    """A worker whose rpc notes what is sent."""

    address = "here"
    status = Status.running

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[tuple[int, ...]]]] = []
        self.broken = False
        self._ongoing_background_tasks = SimpleNamespace(call_soon=lambda fn, *args: asyncio.ensure_future(fn(*args)))

    def rpc(self, address: str) -> Any:
        async def dshuffle_fetch(acknowledged: list[tuple[int, ...]], **_: Any) -> dict[str, str]:
            if self.broken:
                raise OSError("cut off")
            self.sent.append(("fetch", list(acknowledged)))
            return {"status": "later"}

        async def dshuffle_acknowledge(acknowledged: list[tuple[int, ...]], **_: Any) -> None:
            self.sent.append(("acknowledge", list(acknowledged)))

        return SimpleNamespace(dshuffle_fetch=dshuffle_fetch, dshuffle_acknowledge=dshuffle_acknowledge)


def network_of(worker: Any, addresses: dict[int, str], *, shares_memory: bool = False) -> DaskNetwork:
    here: Any = None
    return DaskNetwork(worker, "s", addresses, serve_here=here, acknowledge_here=here, shares_memory=shares_memory)


def play(scenario: Any) -> list[tuple[str, list[tuple[int, ...]]]]:
    async def main() -> list[tuple[str, list[tuple[int, ...]]]]:
        worker = FakeWorker()
        network = network_of(worker, {0: "here", 1: "there", 2: "elsewhere"})
        await scenario(worker, network)
        await asyncio.sleep(0.01)
        return worker.sent

    return asyncio.run(main())


class SharingWorker:
    """A worker whose rpc answers from shared memory, if it is asked by this host and the memory is there."""

    status = Status.running

    def __init__(self, address: str, place: Place) -> None:
        self.address = address
        self.place = place
        self.asked: list[str] = []

    def rpc(self, address: str) -> Any:
        async def dshuffle_fetch(host: str, **_: Any) -> dict[str, Any]:
            self.asked.append(host)
            if may_share(host):
                return {"status": "OK", "acknowledge": True, "place": tuple(self.place)}
            rows = np.full((2, 8), 9, np.uint8)
            return to_fields(RowsReply(rows, np.zeros(2, np.uint32), acknowledge=True))

        return SimpleNamespace(dshuffle_fetch=dshuffle_fetch)


def fetched(worker: SharingWorker, *, shares_memory: bool = True) -> list[int]:
    """The first byte of three messages, of which the last two come from the same sender."""

    async def main() -> list[int]:
        network = network_of(worker, {0: worker.address, 1: "one", 2: "two"}, shares_memory=shares_memory)
        replies = [await network.fetch(message(sender, 0)) for sender in (1, 2, 2)]
        return [int(reply.rows[0, 0]) for reply in replies if isinstance(reply, RowsReply)]

    return asyncio.run(main())


@pytest.fixture
def buffer() -> Buffer:
    """A message in shared memory, all 7."""
    [buffer] = SharedMemory(buffer_nbytes(2, 8)).cut(2, 8)
    buffer[0][:] = 7
    return Buffer(*buffer)


def test_messages_of_this_host_are_mapped(buffer: Buffer) -> None:
    assert buffer.place is not None
    worker = SharingWorker("tcp://here", buffer.place)
    assert fetched(worker) == [7, 7, 7]
    assert worker.asked == [host()] * 3


def test_what_cannot_be_mapped_is_asked_for_again_and_not_shared_any_more(
    buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    assert buffer.place is not None
    worker = SharingWorker("tcp://here", buffer.place._replace(inode=1))
    assert fetched(worker) == [9, 9, 9]
    assert worker.asked == [host(), "", host(), "", ""]
    assert caplog.text.count("messages from two use the network, not shared memory: process") == 1


@pytest.mark.parametrize(("address", "shares_memory"), [("tcp://here", False), ("inproc://here", True)])
def test_memory_is_not_shared_if_not_wanted_or_within_a_process(
    buffer: Buffer, address: str, shares_memory: bool
) -> None:
    assert buffer.place is not None
    worker = SharingWorker(address, buffer.place)
    assert fetched(worker, shares_memory=shares_memory) == [9, 9, 9]
    assert worker.asked == [""] * 3


def message(sender: int, sequence: int) -> MessageId:
    return MessageId(1, sender, 0, sequence)


@pytest.mark.parametrize(("n_rows", "row_nbytes"), [(1, 8), (3, 16), (5, 13), (16, 1024)])
def test_short_replies_travel_as_bytes(n_rows: int, row_nbytes: int) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (n_rows, row_nbytes), np.uint8)
    checksums = rng.integers(0, 2**32, n_rows, np.uint32)
    [frame] = map(bytes, dumps(to_fields(RowsReply(rows, checksums, acknowledge=False))))
    reply = from_fields(loads([frame]), "rank 1")
    assert isinstance(reply, RowsReply)
    np.testing.assert_array_equal(reply.rows, rows)
    np.testing.assert_array_equal(reply.checksums, checksums)
    assert reply.acknowledge is False
    assert reply.place is None
    assert reply.rows.ctypes.data % 8 == 0
    assert reply.rows.flags.writeable


ROWS, SUMS = np.zeros((2, 8), np.uint8), np.zeros(2, np.uint32)
PLACE = Place(1, 2, 3, 4, 0, 64, 2, 8)
PACKED = bytes(24)


@pytest.mark.parametrize(
    ("reply", "fields"),
    [
        (RowsReply(ROWS, SUMS, acknowledge=True), {"acknowledge": True, "packed": PACKED, "shape": (2, 8)}),
        (RowsReply(ROWS, SUMS, acknowledge=False, place=PLACE), {"acknowledge": False, "place": tuple(PLACE)}),
        (RowsReply(ROWS, SUMS), {"packed": PACKED, "shape": (2, 8)}),
        (RowsReply(ROWS[:0], SUMS[:0], True), {"acknowledge": True, "rows": ROWS[:0], "checksums": SUMS[:0]}),
        (RowsReply(ROWS, SUMS, link_seconds=0.5), {"packed": PACKED, "shape": (2, 8), "link_seconds": 0.5}),
    ],
)
def test_the_fields_of_rows_are_those_of_protocol_25(reply: RowsReply, fields: dict[str, Any]) -> None:
    """A worker with an earlier release of the same protocol reads these names."""
    written = {name: getattr(value, "data", value) for name, value in to_fields(reply).items()}
    assert written.keys() == {"status", "acknowledge", "link_seconds", *fields}
    for name, value in fields.items():
        np.testing.assert_array_equal(written[name], value)


@pytest.mark.parametrize("reply", [Refusal("closed"), Refusal("busy", again=True), Later()])
def test_replies_without_rows(reply: Reply) -> None:
    assert from_fields(loads([*map(bytes, dumps(to_fields(reply)))]), "rank 1") == reply


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"packed": b"short"}, "cannot be read: offset must be non-negative"),
        ({"shape": (3, 8)}, "cannot be read: buffer is smaller than requested size"),
        ({"packed": 7}, "rank 1 sent a reply that cannot be read: Expected `bytes | null`, got `int`"),
        ({"shape": (5,)}, "cannot be read: Expected `array` of length 2, got 1"),
        ({"shape": None}, "cannot be read: Expected `array`, got `null`"),
        ({"acknowledge": "yes"}, "cannot be read: Expected `bool | null`, got `str`"),
        ({"place": PLACE[:3]}, "cannot be read: Expected `array` of length 8, got 3"),
        ({"packed": None}, "its rows or checksums are missing"),
    ],
    ids=str,
)
def test_malformed_short_replies(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ExchangeError, match=re.escape(words)):
        from_fields(to_fields(RowsReply(ROWS, SUMS)) | changes, "rank 1")


def test_with_the_next_request_to_the_same_sender() -> None:
    async def scenario(worker: FakeWorker, network: DaskNetwork) -> None:
        await network.acknowledge(message(1, 0))
        await asyncio.create_task(network.fetch(message(1, 1)))

    assert play(scenario) == [("fetch", [(1, 1, 0, 0)])]


def test_again_if_the_request_failed() -> None:
    async def scenario(worker: FakeWorker, network: DaskNetwork) -> None:
        await network.acknowledge(message(1, 0))
        worker.broken = True
        with pytest.raises(OSError, match="cut off"):
            await asyncio.create_task(network.fetch(message(1, 1)))

    assert play(scenario) == [("acknowledge", [(1, 1, 0, 0)])]
