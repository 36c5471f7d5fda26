"""Stores of other packages, where a request for the end of an object may not be longer than the object."""

from __future__ import annotations

from zarr.abc.store import ByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from dshuffle.store.backends.wrapper import Wrapper


class ShorterSuffixes(Wrapper):
    """A store that is never asked for a longer end of an object than there is. icechunk raises an error then."""

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Fetch an object or a range of it."""
        if isinstance(byte_range, SuffixByteRequest):
            try:
                nbytes = await self._store.getsize(key)
            except FileNotFoundError:
                return None
            byte_range = None if nbytes <= byte_range.suffix else byte_range
        return await self._store.get(key, prototype, byte_range)
