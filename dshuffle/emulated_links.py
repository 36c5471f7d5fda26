"""Links and stores of a chosen rate on any machine, without root: bytes wait as long as a link would take for them.

What waits is the sample bytes between workers, the probes that measure links, and chunks of the store. Small messages,
such as those of Dask itself, do not. The rates are in Dask's configuration, as ``dshuffle.emulated-links`` and
``dshuffle.emulated-store``, in every worker's process.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from typing import Literal

import dask

from dshuffle.units import parse_rate

HEADERS = 1514 / 1448
"""Bytes on the wire for each byte of payload: Ethernet, IP and TCP headers of full frames of 1,500 bytes."""


TURN_SECONDS = 0.005
"""Messages that are sent at once take turns of this length, so they share the link as TCP connections do."""


class EmulatedLink:
    """A link that passes bytes at a fixed rate.

    Parameters
    ----------
    rate
        Bytes per second, headers included.

    Examples
    --------
    >>> link = EmulatedLink(1e6 * HEADERS)
    >>> round(link.reserve(100_000, begin=5.0) - 5.0, 3)
    0.1
    >>> round(link.reserve(100_000, begin=5.05) - 5.0, 3)  # waits for the first to pass
    0.2
    """

    def __init__(self, rate: float) -> None:
        self._seconds_per_byte = HEADERS / rate
        self._turn_nbytes = max(1, int(rate * TURN_SECONDS))
        self._free_at = 0.0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int, *, begin: float) -> float:
        """Take the next place on the link, not before a time, and return the time at which all bytes have passed."""
        with self._lock:
            self._free_at = max(self._free_at, begin) + nbytes * self._seconds_per_byte
            return self._free_at

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
        end = self.reserve(nbytes, begin=time.monotonic() - seconds)
        await asyncio.sleep(end - time.monotonic())


def emulated(what: Literal["links", "store"], name: str = "") -> EmulatedLink | None:
    """The link of this name if links of this kind are emulated in this process, otherwise None.

    Raises
    ------
    InvalidParameter
        If the configured rate is not a rate.
    """
    rate = dask.config.get(f"dshuffle.emulated-{what}", None)
    return None if rate is None else _link(what, name, str(rate))


@functools.cache
def _link(what: str, name: str, rate: str) -> EmulatedLink:
    return EmulatedLink(parse_rate(f"dshuffle.emulated-{what}", rate))
