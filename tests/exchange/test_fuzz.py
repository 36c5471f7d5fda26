"""Malformed messages: no crash, no wrong row, and no memory beyond the window.

    python tests/exchange/test_fuzz.py 1000000

throws that many messages. Three kinds of messages are thrown: answers with wrong arrays, answers with rows that are
nearly right, and requests, acknowledgements and arrivals that name anything.
"""

from __future__ import annotations

import random
import sys
from collections import Counter

import numpy as np

from dshuffle.errors import ExchangeError
from dshuffle.exchange.cache_partition import CachePartition
from dshuffle.exchange.comms import from_fields
from dshuffle.exchange.mailboxes import Arrived, Fetch, Inbox, MessageId, Outbox
from dshuffle.exchange.transports import ArrivingRows
from dshuffle.rows import RowLayout, checksum_rows

LAYOUT = RowLayout.of({"x": (np.dtype("f4"), (3,)), "y": (np.dtype("i2"), ())})
N = 8
DTYPES = ["u1", "i1", "u2", "f8", "u4", "i8", "?", "O", "S5", "M8[s]"]
NUMBERS = [-(2**63), -2, -1, 0, 1, 2, 3, 7, 10**6, 2**63]


class Fuzzer:
    """A receiver of eight rows, and a sender of messages, with everything that may come over the network."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.noise = np.random.default_rng(seed)
        self.seen: Counter[str] = Counter()
        self.cache = CachePartition(LAYOUT, capacity=N, incoming=N)
        self.samples = np.arange(N) * 3
        self.truth = self.noise.integers(0, 256, (N, LAYOUT.nbytes), np.uint8)
        self.checksums = checksum_rows(self.truth, self.samples)
        self.slots = self.cache.reserve(self.samples)
        self.sink = ArrivingRows(self.cache, self.samples, self.slots, lambda *_: None)
        self.outbox = Outbox(0, window=3)
        self.outbox.begin(5, {1: 4, 2: 4})
        self.inbox = Inbox(1, window=3)
        self.inbox.begin(5, {0: 4, 2: 4})

    def message(self) -> None:
        self.rng.choice([self.wrong_arrays, self.nearly_right, self.any_event])()

    def wrong_arrays(self) -> None:
        """Arrays of any dtype, shape and strides, or no arrays."""
        rng = self.rng

        def anything() -> object:
            if rng.random() < 0.1:
                return rng.choice([None, b"", "rows", 3.0, [1, 2], {}])
            shape = tuple(rng.choice([0, 1, N, LAYOUT.nbytes, 3]) for _ in range(rng.choice([0, 1, 2, 2, 3])))
            array = np.zeros(shape, rng.choice(DTYPES))
            return array.T if rng.random() < 0.3 else array[::-1] if array.ndim and rng.random() < 0.2 else array

        self.deliver({"rows": anything(), "checksums": anything()}, right=False)

    def nearly_right(self) -> None:
        """The right rows with bytes flipped, exchanged or cut off; sometimes quite right."""
        rng, rows, checksums = self.rng, self.truth.copy(), self.checksums.copy()
        how = rng.choice(["right", "flip", "swap", "cut", "sum", "repeat"])
        if how == "flip":
            rows[rng.randrange(N), rng.randrange(LAYOUT.nbytes)] ^= 1 << rng.randrange(8)
        elif how == "swap":
            i, j = rng.sample(range(N), 2)
            rows[[i, j]], checksums[[i, j]] = rows[[j, i]], checksums[[j, i]]
        elif how == "cut":
            rows, checksums = rows[: rng.randrange(N)], checksums[: rng.randrange(N)]
        elif how == "sum":
            checksums[rng.randrange(N)] ^= np.uint32(1 << rng.randrange(32))
        elif how == "repeat":
            rows, checksums = np.repeat(rows, 2, axis=0), np.repeat(checksums, 2)
        self.deliver({"rows": rows, "checksums": checksums}, right=how == "right")

    def deliver(self, reply: dict[str, object], *, right: bool) -> None:
        self.cache.rows[self.slots] = 0
        try:
            read = from_fields({"status": "OK", **reply}, "rank 1")
            self.sink.unpack(0, N, read.rows, read.checksums)
        except ExchangeError:
            assert not right
            self.seen["refused"] += 1
        else:
            assert right, f"accepted {reply}"
            np.testing.assert_array_equal(self.cache.rows[self.slots], self.truth)
            self.seen["accepted"] += 1

    def any_event(self) -> None:
        """Requests, acknowledgements, arrivals and failures of messages that exist or do not."""
        rng = self.rng
        message = MessageId(*(rng.choice(NUMBERS) if rng.random() < 0.5 else rng.randrange(8) for _ in range(4)))
        match rng.randrange(6):
            case 0 | 1:
                found = self.outbox.request(message)
                sent = [one.message for one in found if one.refusal is None]
                assert all(m.run_id == 5 and m.destination in (1, 2) for m in sent)
            case 2:
                self.outbox.acknowledged(message)
            case 3:
                self.outbox.withdraw(message)
            case 4:
                before = self.inbox.outstanding
                found = self.inbox.arrived(message)
                assert message in before or not found
            case 5:
                found = self.inbox.failed(message, "noise", again=rng.random() < 0.9)
                assert all(isinstance(one, Fetch | Arrived) for one in found)
        assert len(self.outbox.in_flight) <= 3
        assert len(self.inbox.outstanding) <= 3
        self.seen["events"] += 1


def fuzz(count: int, seed: int = 0) -> Counter[str]:
    """Throw messages; a new sender and receiver for every ten thousand."""
    seen: Counter[str] = Counter()
    for first in range(0, count, 10_000):
        fuzzer = Fuzzer(seed + first)
        for _ in range(min(10_000, count - first)):
            fuzzer.message()
        seen += fuzzer.seen
    return seen


def test_malformed_messages() -> None:
    seen = fuzz(20_000)
    assert min(seen["refused"], seen["accepted"], seen["events"]) > 500


if __name__ == "__main__":
    print(dict(fuzz(int(sys.argv[1]))))
