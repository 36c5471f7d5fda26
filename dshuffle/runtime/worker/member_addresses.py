"""The addresses of a session's participants, as one of its workers knows them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from dshuffle.exchange.forwarder import with_forwarders


class MemberAddresses(Mapping[int, str]):
    """Address of each participant and of each rank's forwarder.

    Parameters
    ----------
    addresses
        Addresses of the ranks, and of the server.
    """

    def __init__(self, addresses: Mapping[int, str]) -> None:
        self._addresses = with_forwarders(addresses)
        self._changed = asyncio.Event()
        self._closed = False

    def __getitem__(self, participant: int) -> str:
        return self._addresses[participant]

    def __iter__(self) -> Iterator[int]:
        return iter(self._addresses)

    def __len__(self) -> int:
        return len(self._addresses)

    def change(self, addresses: Mapping[int, str]) -> None:
        """Use the addresses of workers that have taken lost ranks."""
        self._addresses.update(with_forwarders(addresses))
        self._wake()

    def close(self) -> None:
        """Note that the session is closed on this worker, so that nobody waits for other addresses."""
        self._closed = True
        self._wake()

    async def until_left(self, participant: int, address: str) -> None:
        """Wait until a participant is not at an address any more, or the session is closed."""
        while not self._closed and self._addresses.get(participant) == address:
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
