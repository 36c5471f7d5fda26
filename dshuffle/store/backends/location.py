"""Where a dataset is: at a URL, or in a Zarr store object."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import zarr
from zarr.abc.store import Store
from zarr.core.sync import sync
from zarr.storage import LocalStore, StorePath

from dshuffle.errors import InvalidParameter
from dshuffle.redaction import hide_secrets, option_values
from dshuffle.store.backends import open_store
from dshuffle.store.backends.patient_store import Meter, Patience, PatientStore
from dshuffle.store.backends.standing import Standing, standing_in
from dshuffle.store.backends.store_errors import SAME_ANSWER
from dshuffle.store.backends.urls import canonical_url, is_local, is_memory

Place = str | os.PathLike[str] | Store | StorePath | zarr.Group
"""What users pass as the place of a dataset."""

_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Location:
    """Where a dataset is.

    Parameters
    ----------
    url
        Canonical URL. For a store object, the text that names it in messages.
    storage_options
        Options of the store. They may hold secrets.
    store
        Store object that the user passed; None for URLs.
    path
        Path of the group in this store object.
    """

    url: str
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    store: Store | None = field(default=None, repr=False)
    path: str = ""

    @classmethod
    def of(cls, place: Place, storage_options: Mapping[str, Any] | None = None) -> Self:
        """Check a place.

        Raises
        ------
        InvalidParameter
            If it is none, or a store object that cannot be pickled or has no read-only copy.
        """
        if isinstance(place, zarr.Group):
            place = place.store_path
        store, path = (place.store, place.path) if isinstance(place, StorePath) else (place, "")
        if not isinstance(store, Store):
            return cls(canonical_url(store), storage_options)
        if type(store) is LocalStore:
            return cls(canonical_url(os.path.join(store.root, path)), storage_options)
        name = " ".join(hide_secrets(repr(store)).split())
        name = name if len(name) <= _LONGEST_NAME else f"<{type(store).__module__}.{type(store).__name__}>"
        location = cls(f"{name}/{path}" if path else name, storage_options, store, path)
        location._check_store(store)
        return location

    @property
    def is_remote(self) -> bool:
        """Whether its store may be one that does not say which objects do not exist."""
        return self.store is not None or not (is_local(self.url) or is_memory(self.url))

    def child(self, path: str) -> str:
        """How to open a group below, as Python code."""
        if self.store is None:
            return f"open_dataset({hide_secrets(self.url) + '/' + path!r})"
        return f"open_dataset(zarr.storage.StorePath(store, {'/'.join(filter(None, (self.path, path)))!r}))"

    def open(self, *, read_only: bool, meter: Meter | None = None) -> PatientStore:
        """Open the store."""
        if self.store is None:
            return open_store(self.url, self.storage_options, read_only=read_only, meter=meter)
        patience, _ = Patience.of(self.storage_options)
        store = _read_only(self.store) if read_only else self.store
        opened = PatientStore(
            store,
            self.url,
            patience,
            secrets=_secrets(store),
            access=f"The store has its own credentials. {SAME_ANSWER}",
            meter=meter,
        )
        sync(opened._ensure_open())  # as zarr does; a ZipStore cannot be read otherwise
        return opened

    def open_to_read(self, absent_chunks: str | None, meter: Meter | None = None) -> tuple[PatientStore, Standing]:
        """Open the store, and find out what exists at the location.

        ``absent_chunks`` is what an absent chunk is, if the user has said so.
        """
        store = self.open(read_only=True, meter=meter)
        standing = standing_in(store, self.url, self.path)
        if self.is_remote:
            store.document, store.absent_chunks = standing.document, absent_chunks
        return store, standing

    def _check_store(self, store: Store) -> None:
        _, options = Patience.of(self.storage_options)
        if options:
            # Values may be secrets, so show only the names of the options.
            hint = "Set other options where you make the store."
            raise InvalidParameter.of(
                "storage_options", sorted(options), "max_retries, timeout or connections for a store", hint
            )
        kind = f"this {type(store).__name__}"
        try:
            _read_only(store)
        except NotImplementedError as error:
            raise InvalidParameter.because("url", f"{kind} has no read-only copy", "Open it read-only.") from error
        try:
            pickle.Pickler(_NullFile()).dump(store)
        except Exception as error:  # whatever its class raises
            raise InvalidParameter.because(
                "url",
                f"{kind} cannot be pickled, so workers cannot open it ({type(error).__name__}: {error})",
                "Give the store of a read-only session."
                if type(store).__module__.startswith("icechunk")
                else "Open the dataset by its URL, or from a store that can be pickled.",
            ) from error


class _NullFile:
    """A file that keeps nothing."""

    def write(self, data: bytes) -> int:
        return len(data)


def _read_only(store: Store) -> Store:
    return store if store.read_only else store.with_read_only(True)


def _secrets(store: Store) -> tuple[str, ...]:
    """Strings among the options of a store of obstore or fsspec."""
    inner = getattr(store, "store", None)
    options = getattr(inner, "config", None) or getattr(getattr(store, "fs", None), "storage_options", None)
    return option_values(options) if isinstance(options, Mapping) else ()
