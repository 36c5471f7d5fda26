"""A dataset as JSON can hold it: what was opened, and which of its samples were selected."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from dshuffle.errors import DatasetChanged, InvalidParameter
from dshuffle.store.dataset import Dataset
from dshuffle.store.open import open_dataset
from dshuffle.store.sample_arrays import ArrayChoice
from dshuffle.store.view import Selection


def describe(dataset: Dataset) -> str | dict[str, Any]:
    """What :func:`dataset_of` opens again: the URL, or a mapping if more was chosen than that.

    Storage options, which may be secrets, are left out.

    Raises
    ------
    InvalidParameter
        If the dataset was opened from a store object.
    """
    opening, view = dataset._opening, dataset._view
    windows, patches, selection = view.windows, view.patches, view.selection
    if opening.location.store is not None:
        raise InvalidParameter.because(
            "dataset",
            f"it was opened from a store object, {opening.url}, which JSON cannot describe",
            "Open it by its URL, or open it yourself where the description is read.",
        )
    chosen = {
        **dataclasses.asdict(opening.choice),
        "absent_chunks": opening.absent_chunks,
    }
    defaults = {**dataclasses.asdict(ArrayChoice()), "absent_chunks": None}
    fields = {name: value for name, value in chosen.items() if value != defaults[name]}
    if windows is not None:
        fields["windows"] = dict(windows.offsets)
    if patches is not None:
        fields["patches"] = {dim.name: [dim.size, dim.stride] for dim in patches.dims}
    if selection is not None:
        packed = base64.b64encode(zlib.compress(selection.bits.tobytes())).decode()
        fields |= {"stored_samples": selection.n_stored, "selected": packed}
    return {"url": opening.url, **fields} if fields else opening.url


def dataset_of(fields: Mapping[str, Any]) -> Dataset:
    """Open the dataset that :func:`describe` described.

    Raises
    ------
    InvalidParameter
        If a name or a value is not allowed.
    DatasetChanged
        If the stored dataset has another number of samples, so that the selection says nothing.
    DatasetError
        If it cannot be opened.

    Examples
    --------
    >>> from dshuffle.store import create_dataset
    >>> dataset = create_dataset("memory://doc-describe", {"x": np.arange(10)}, overwrite=True)
    >>> describe(dataset)
    'memory://doc-describe'
    >>> test = dataset.select([2, 5, 7])
    >>> dataset_of(describe(test)).read_rows([0, 1, 2])["x"].tolist()
    [2, 5, 7]
    """
    options = dict(fields)
    packed, n_stored = options.pop("selected", None), options.pop("stored_samples", None)
    windows, patches = options.pop("windows", None), options.pop("patches", None)
    try:
        opened = open_dataset(options.pop("url", ""), **options)
    except TypeError as error:  # an unknown name
        raise InvalidParameter.because("dataset", f"its description is not one that to_dict wrote: {error}") from error
    if windows is not None:
        opened = opened.windows(windows)
    if patches is not None:
        strides = {name: stride for name, (_, stride) in patches.items()}
        opened = opened.patches(stride=strides, **{name: size for name, (size, _) in patches.items()})
    if packed is None:
        return opened
    if n_stored != opened.n_samples:
        raise DatasetChanged(
            f"the dataset at {opened.url} has {opened.n_samples} samples, but a part of {n_stored} samples was "
            "selected. Select the part again"
        )
    try:
        bits = np.frombuffer(zlib.decompress(base64.b64decode(packed, validate=True)), np.uint8)
    except (binascii.Error, zlib.error, ValueError, TypeError) as error:
        raise InvalidParameter.because("dataset", f"its selection of samples is damaged: {error}") from error
    if len(bits) != -(-opened.n_samples // 8):
        raise InvalidParameter.because("dataset", f"its selection of samples is damaged: it has {len(bits)} bytes")
    return opened.select(Selection(opened.n_samples, bits).ids)
