"""Which dataset this is: copies have the same identity, and a dataset that was written again has another one.

dshuffle marks the groups that it writes with an attribute, so that unfinished ones are recognised. A group from
elsewhere may have an attribute of the same name. So the mark is recognised by all of its fields.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import zarr
from zarr import Array
from zarr.abc.store import Store, SuffixByteRequest
from zarr.core.sync import sync

from dshuffle.store.cf import DECISIVE, attributes_of
from dshuffle.store.patient_store import PROTOTYPE, AccessRefused, PatientStore
from dshuffle.store.places import Location
from dshuffle.store.sample_arrays import ArrayChoice, SampleArrays, find_arrays

ATTRIBUTE = "dshuffle"
"""Name of the group attribute."""

_VERSION = 1
_UUID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Mark:
    """What dshuffle says about a group that it writes.

    Parameters
    ----------
    complete
        Whether all of the group has been written.
    uuid
        Random name of the dataset, 32 hexadecimal digits. None for unfinished datasets, and for shardings.
    """

    complete: bool
    uuid: str | None = None

    @classmethod
    def of(cls, attributes: Mapping[str, Any]) -> Self | None:
        """The mark among the attributes of a group; None if dshuffle did not write the group."""
        fields = attributes.get(ATTRIBUTE)
        if not isinstance(fields, Mapping) or fields.keys() - {"uuid"} != {"version", "complete"}:
            return None
        version, complete, name = fields["version"], fields["complete"], fields.get("uuid")
        if type(version) is not int or version < 1 or type(complete) is not bool:
            return None
        if name is not None and not (complete and isinstance(name, str) and _UUID.fullmatch(name)):
            return None
        return cls(complete, name)

    @classmethod
    def unfinished(cls) -> Self:
        """The mark of a group that is being written."""
        return cls(complete=False)

    @classmethod
    def of_new_dataset(cls) -> Self:
        """The mark of a complete dataset, with a new name."""
        return cls(complete=True, uuid=uuid.uuid4().hex)

    def attributes(self) -> dict[str, Any]:
        """The group attribute."""
        fields: dict[str, Any] = {"version": _VERSION, "complete": self.complete}
        return {ATTRIBUTE: fields if self.uuid is None else {**fields, "uuid": self.uuid}}


SAMPLED = 8
"""Stored objects of a group from elsewhere that its digest looks at, spread over each array."""

SAMPLED_BY_ALL = 3
"""Stored objects of an array of which every worker compares the end before a session opens, for the largest arrays."""

SAMPLED_NBYTES = 4096
"""Bytes at the end of each of these objects."""


def identity_of(store: Store, group: zarr.Group, chosen: SampleArrays, choice: ArrayChoice) -> str:
    """The identity of a dataset.

    A dataset from :func:`~dshuffle.store.create_dataset` carries a random one in its metadata. For any other group it
    is a digest of its arrays' metadata, and of the last bytes of a few chunks: so a change of other chunks alone is not
    noticed.
    """
    mark = Mark.of(group.attrs)
    meaning = _meaning(chosen, choice)
    if mark is not None:
        if mark.uuid is not None:
            choices = _in_words(choice)
            if not choices and not meaning:
                return mark.uuid
            return hashlib.sha256(f"{mark.uuid}{choices}{meaning}".encode()).hexdigest()[:32]
        if not mark.complete:
            return "incomplete"
    digest = hashlib.sha256(_in_words(choice).encode())
    digest.update(meaning.encode())
    for name, array in sorted(chosen.arrays.items()):
        metadata = {key: value for key, value in array.metadata.to_dict().items() if key != "attributes"}
        digest.update(f"{name}={json.dumps(metadata, sort_keys=True, default=str)};".encode())
        for end in sync(_sampled_chunks(store, array)):
            digest.update(end)
    return digest.hexdigest()[:32]


def _in_words(choice: ArrayChoice) -> str:
    """The choice as part of an identity, which must never change: checkpoints have it. Empty for the default."""
    if choice == ArrayChoice():
        return ""
    return f"Wanted(arrays={choice.arrays!r}, sample_dim={choice.sample_dim!r}, decode={choice.decode!r})"


def _meaning(chosen: SampleArrays, choice: ArrayChoice) -> str:
    """What decides the values of stored numbers beside the metadata; empty if they are the values, row by row."""
    meaning = {}
    attributes = attributes_of(chosen.arrays) if choice.decode else {}
    for name in sorted(chosen.arrays):
        decisive = {key: value for key, value in attributes.get(name, {}).items() if key in DECISIVE}
        if decisive or chosen.axes[name]:
            meaning[name] = [chosen.axes[name], decisive]
    return json.dumps(meaning, sort_keys=True, default=str) if meaning else ""


def ends_of(store: Store, arrays: Iterable[Array[Any]]) -> str:
    """Digest of the last bytes of a few chunks: those of a copy that is damaged or out of date may differ.

    A dataset from :func:`~dshuffle.store.create_dataset` has the checksums of chunks there. Whole chunks are not read,
    since every worker looks at them.
    """
    digest = hashlib.sha256()
    largest = sorted(arrays, key=lambda array: (-array.nbytes, array.path))[:SAMPLED]
    for array in largest:
        for end in sync(_sampled_chunks(store, array, SAMPLED_BY_ALL)):
            digest.update(end)
    return digest.hexdigest()[:32]


async def _sampled_chunks(store: Store, array: Array[Any], n_sampled: int = SAMPLED) -> list[bytes]:
    stored = array.shards or array.chunks
    grid = [math.ceil(size / each) for size, each in zip(array.shape, stored, strict=True)]
    total = math.prod(grid)
    if not total:
        return []
    numbers = sorted({i * (total - 1) // max(1, n_sampled - 1) for i in range(min(n_sampled, total))} | {total - 1})
    steps = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
    indices = (tuple(n // step % size for step, size in zip(steps, grid, strict=True)) for n in numbers)
    keys = [f"{array.path}/{array.metadata.encode_chunk_key(index)}" for index in indices]
    return await asyncio.gather(*(_last_bytes(store, key) for key in keys))


async def _last_bytes(store: Store, key: str) -> bytes:
    """The end of a stored object, which is where chunks have their checksums; only these bytes are read."""
    try:
        buffer = await store.get(key, PROTOTYPE, SuffixByteRequest(SAMPLED_NBYTES))
    except AccessRefused:  # as some stores answer for absent objects
        buffer = None
    return b"absent;" if buffer is None else buffer.to_bytes()


@dataclass(frozen=True, slots=True)
class Opening:
    """How a dataset was opened.

    Parameters
    ----------
    choice
        Which arrays, and what they mean.
    absent_chunks
        What an absent chunk is, ``"fill"`` or ``"error"``; None for what suits the group and the store.
    """

    location: Location
    choice: ArrayChoice
    absent_chunks: str | None = None

    @property
    def url(self) -> str:
        """Canonical URL, or the name of a store object."""
        return self.location.url

    def identity(self, store: PatientStore) -> str:
        """The identity of what is stored now."""
        group = self.group(store, None)
        return identity_of(store.bare, group, find_arrays(group, self.url, self.choice), self.choice)

    def group(self, store: PatientStore, zarr_format: Literal[2, 3] | None) -> zarr.Group:
        """The group in a store that was opened."""
        path = self.location.path
        try:
            return zarr.open_group(store=store, path=path, mode="r", zarr_format=zarr_format)
        except ValueError:
            # Consolidated metadata may have an array that zarr does not understand; then find_arrays leaves it out.
            return zarr.open_group(store=store, path=path, mode="r", zarr_format=zarr_format, use_consolidated=False)
