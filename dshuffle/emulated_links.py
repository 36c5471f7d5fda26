"""Links and stores of a chosen rate on any machine, without root: bytes wait as long as a link would take for them.

Sample bytes between workers and chunks of the store wait. Chunks pass the link into
their worker as well, as they would pass its network card. Small messages, such as those of Dask itself, do not wait.
The rates are in Dask's configuration, as ``dshuffle.emulated-links`` and ``dshuffle.emulated-store``, in every worker's
process.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from typing import Literal

import dask
from distributed import Worker

from dshuffle.errors import InvalidParameter
from dshuffle.units import parse_rate

HEADERS = 1514 / 1448
"""Bytes on the wire for each byte of payload: Ethernet, IP and TCP headers of full frames of 1,500 bytes."""

TURN_SECONDS = 0.005
"""Messages that are sent at the same time take turns of this length, so they share the link as TCP connections do."""

KEPT = 64
"""Periods of being busy that a link remembers."""


class EmulatedLink:
    """A link that passes bytes at a fixed rate, in bytes per second with headers."""

    def __init__(self, rate: float) -> None:
        self._seconds_per_byte = HEADERS / rate
        self._turn_nbytes = max(1, int(rate * TURN_SECONDS))
        self._busy: list[tuple[float, float]] = []  # in the order of time, without overlaps
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, *, begin: float) -> float:
        """Take the first free time on the link from a time on, and return when all bytes have passed."""
        with self._lock:
            end, left = begin, nbytes * self._seconds_per_byte
            before, after = [], []
            for busy in self._busy[-KEPT:]:
                if busy[1] < begin:
                    before.append(busy)
                elif busy[0] - end >= left:
                    after.append(busy)
                else:
                    left -= max(0.0, busy[0] - end)
                    begin, end = min(begin, busy[0]), busy[1]
            self._busy = [*before, (begin, end + left), *after]
            return end + left

    async def send(self, nbytes: int) -> float:
        """Wait until some bytes have left, and return the seconds from the first to the last."""
        began = end = time.monotonic()
        while nbytes > 0:
            # The next turn begins where the last one ended, also if the event loop woke up late.
            end = self.reserve(min(nbytes, self._turn_nbytes), begin=end)
            nbytes -= self._turn_nbytes
            await asyncio.sleep(end - time.monotonic())
        return end - began

    async def receive(self, nbytes: int, seconds: float) -> None:
        """Wait until some bytes have come through that left the sender within the last seconds."""
        if nbytes:
            end = self.reserve(nbytes, begin=time.monotonic() - seconds)
            await asyncio.sleep(end - time.monotonic())


class EmulatedStore(EmulatedLink):
    """A store of a fixed rate, from which bytes also pass the link into the only worker of this process."""

    async def send(self, nbytes: int) -> float:
        """Wait until some bytes have been read, and return the seconds in which they left the store."""
        seconds = await super().send(nbytes)
        addresses = [worker.address for worker in Worker._instances]
        if len(addresses) == 1 and (link := emulated("links", f"into {addresses[0]}")) is not None:
            await link.receive(nbytes, seconds)
        return seconds


def emulated(what: Literal["links", "store"], name: str = "") -> EmulatedLink | None:
    """The link of this name if links of this kind are emulated in this process, otherwise None."""
    rate = dask.config.get(f"dshuffle.emulated-{what}", None)
    if rate is not None and not isinstance(rate, str):
        raise InvalidParameter.of(f"dshuffle.emulated-{what}", rate, "a rate such as '100mbit' or '1.25GB/s'")
    return None if rate is None else _link(what, name, rate)


def check_emulated_rates() -> None:
    """Refuse wrong rates in this process, before any bytes are sent."""
    emulated("links")
    emulated("store")


@functools.cache
def _link(what: str, name: str, rate: str) -> EmulatedLink:
    kind = EmulatedStore if what == "store" else EmulatedLink
    return kind(parse_rate(f"dshuffle.emulated-{what}", rate))


os.register_at_fork(after_in_child=_link.cache_clear)  # another thread may hold the lock of a link
