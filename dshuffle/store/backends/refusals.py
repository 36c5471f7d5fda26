"""Refused requests (403): what was tried, and objects of which the store does not say whether they exist.

If a client may read the objects of a bucket but not list them, S3 answers a request for an object that does not exist
with 403 instead of 404.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype

from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.store.backends.wrapper import Wrapper

METADATA = frozenset({"zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata"})
"""Names of the objects of a Zarr store that are not chunks."""

ABSENT_CHUNKS = (None, "fill", "error")

SAME_ANSWER = "A store that may not be listed answers in the same way if the object does not exist"
"""What else a refusal may mean."""

_STATUS = (401, 403)
_CODE = re.compile(r"<Code>(.*?)</Code>")


class AccessRefused(DatasetError):
    """The store refuses access to an object, or does not say that the object does not exist."""


def is_refusal(error: BaseException) -> bool:
    """Whether a store has refused access to an object, and not a request with wrong credentials.

    Examples
    --------
    >>> is_refusal(PermissionError("Access Denied")), is_refusal(FileNotFoundError())
    (True, False)
    """
    code = _CODE.search(str(error))
    if code:
        return code[1] == "AccessDenied"
    if isinstance(error, PermissionError):
        return True
    if type(error).__module__.startswith("obstore"):
        return type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")
    return any(getattr(error, name, None) in _STATUS for name in ("status", "code"))


def checked_absent_chunks(absent_chunks: str | None) -> str | None:
    """Check what an absent chunk is."""
    if absent_chunks not in ABSENT_CHUNKS:
        raise InvalidParameter.of("absent_chunks", absent_chunks, '"fill", "error" or None')
    return absent_chunks


class RefusalsAsAbsence(Wrapper):
    """A store that takes refused objects for absent ones, as far as that is safe.

    Metadata are optional, so refused metadata are absent. A refused chunk is absent only if the user has said what
    absent chunks are, and if the store still grants access to the document of the group.

    Parameters
    ----------
    store
        Store to wrap.
    document
        Key of the metadata document of the group, which exists.
    absent_chunks
        What the user has said; None for nothing.
    """

    def __init__(self, store: Store, document: str, absent_chunks: str | None) -> None:
        super().__init__(store)
        self._document = document
        self._absent_chunks = absent_chunks
        self.batch_nbytes: int = getattr(store, "batch_nbytes", 0)

    def __str__(self) -> str:
        return str(self._store)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Fetch an object; ``None`` if it does not exist, or is refused and taken for absent."""
        try:
            return await self._store.get(key, prototype, byte_range)
        except AccessRefused as error:
            await self._check_absent(key, error, prototype)
            return None

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Fetch several objects or ranges."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def _check_absent(self, key: str, error: AccessRefused, prototype: BufferPrototype) -> None:
        """Raise the error unless the object counts as absent."""
        if key == self._document:
            raise error
        if key.rpartition("/")[2] in METADATA:
            return
        if self._absent_chunks is None:
            raise AccessRefused(
                f'{error}. To read such chunks as the fill value, open the dataset with absent_chunks="fill"'
            )
        # With lost credentials, all chunks would be taken for absent.
        await self._store.get(self._document, prototype)
