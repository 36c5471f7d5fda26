"""How a dataset was opened, so that other processes can open it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import zarr

from dshuffle.store.identity import identity_of
from dshuffle.store.patient_store import PatientStore
from dshuffle.store.places import Location
from dshuffle.store.sample_arrays import ArrayChoice, find_arrays


@dataclass(frozen=True, slots=True)
class Opening:
    """How a dataset was opened.

    Parameters
    ----------
    location
        Where it is.
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
