"""Open a dataset, and describe it as JSON can hold it: what was opened, and which of its samples were selected."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import zarr
from zarr.abc.store import Store
from zarr.storage import StorePath

from dshuffle.errors import DatasetError, DatasetNotFound, InvalidParameter
from dshuffle.redaction import hide_secrets
from dshuffle.rows import RowLayout
from dshuffle.store.cf import Decoding, attributes_of, encoding_of
from dshuffle.store.dataset import Dataset
from dshuffle.store.identity import Mark, Opening, identity_of
from dshuffle.store.patient_store import Meter
from dshuffle.store.places import ARRAY, GROUP, Location, Place, is_memory
from dshuffle.store.sample_arrays import ArrayChoice, SampleArrays, find_arrays
from dshuffle.store.stored_array import StoredArray
from dshuffle.store.view import View

logger = logging.getLogger(__name__)


def open_dataset(
    url: Place,
    *,
    arrays: Sequence[str] | None = None,
    sample_dim: str | int | None = None,
    decode: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    absent_chunks: str | None = None,
) -> Dataset:
    """Open a dataset: any Zarr group (v2 or v3) with arrays that share a dimension of samples.

    The group does not have to come from dshuffle. Its arrays may be chunked in any way, sharded or compressed.

    Parameters
    ----------
    url
        A local path (including mounted file systems) or a URL: ``file://``, ``s3://bucket/prefix``, ``memory://name``
        (this process only), or any scheme that fsspec knows. Or a Zarr store object (of zarr, obstore, icechunk, ...),
        a ``zarr.storage.StorePath`` for a group in it, or a ``zarr.Group``. Workers open a store object from its
        pickle, so it must have one.
    arrays
        Names of arrays, or their paths below the group, such as ``"obsm/X_pca"``. By default all arrays directly below
        the group that have the sample dimension. Others (coordinates of other dimensions, scalars, strings) are left
        out; :attr:`Dataset.skipped` says why. From an AnnData store, the arrays in ``obs``, ``obsm`` and ``layers`` are
        taken as well.
    sample_dim
        Name of the sample dimension (``dimension_names``, or ``_ARRAY_DIMENSIONS`` as xarray writes it), or its number.
        By default the first dimension of the largest array. It may be any axis of an array.
    decode
        Whether values are decoded by the CF conventions, as xarray does: ``scale_factor``, ``add_offset``,
        ``_FillValue``, ``missing_value`` and times. Workers cache and exchange the stored numbers. Times that cannot be
        decoded stay numbers; a warning in the log and :attr:`Dataset.undecoded` say why.
    storage_options
        Options of the store. For S3: ``access_key_id``, ``secret_access_key``, ``session_token``, ``region``,
        ``endpoint``, ``skip_signature`` and obstore's other options, or s3fs's names for them (``key``, ``secret``,
        ``endpoint_url``, ``client_kwargs``, ...). Missing options come from ``AWS_ACCESS_KEY_ID``,
        ``AWS_ENDPOINT_URL``, .... The URL of an endpoint without TLS must begin with ``http://``. For other schemes:
        the options of fsspec. For all stores: ``max_retries`` (7), ``timeout`` (60 s), and ``connections``, the largest
        number of requests of a process at one server at a time (16 for HTTP, otherwise 64).
    absent_chunks
        What a chunk is that the store does not have: ``"fill"`` for the fill value, ``"error"`` for a
        :class:`CorruptChunk`. By default an error in a dataset from :func:`create_dataset`, and the fill value in any
        other group, as the Zarr specification says. Some stores do not say whether a chunk exists, and refuse access to
        it (403). Such a chunk is absent if you set this option. By default it is a :class:`DatasetError`.

    Raises
    ------
    InvalidParameter
        If an option is unknown, or no array has a name or a dimension that is asked for.
    DatasetNotFound
        If nothing exists at the URL, or something other than a Zarr group.
    DatasetError
        If the store cannot be reached or refuses access, the group has no arrays of samples, or those that are asked
        for cannot be opened together.

    Examples
    --------
    >>> import numpy as np
    >>> from dshuffle.store import create_dataset
    >>> arrays = {"x": np.ones((10, 3), "f4"), "y": np.arange(10)}
    >>> _ = create_dataset("memory://doc-open", arrays, overwrite=True)
    >>> dataset = open_dataset("memory://doc-open")
    >>> dataset
    <Dataset 'memory://doc-open', 10 samples of 20 bytes (x: float32 (3,), y: int64 ())>
    >>> dataset.arrays["x"]
    ArrayInfo(dtype=dtype('<f4'), shape=(3,), chunk_rows=10, shard_rows=None)
    """
    choice = ArrayChoice(arrays, sample_dim, decode)
    location = Location.of(url, storage_options)
    if absent_chunks not in (None, "fill", "error"):
        raise InvalidParameter.of("absent_chunks", absent_chunks, '"fill", "error" or None')
    return open_stored(Opening(location, choice, absent_chunks))


def as_dataset(dataset: Dataset | Place) -> Dataset:
    """Open a dataset, unless it is open."""
    if isinstance(dataset, Dataset):
        return dataset
    if not isinstance(dataset, str | os.PathLike | Store | StorePath | zarr.Group):
        raise InvalidParameter.of("dataset", dataset, "a Dataset, or the path, URL or Zarr store of one")
    return open_dataset(dataset)


def open_stored(opening: Opening, decoding: Decoding | None = None) -> Dataset:
    """Open a dataset, as :func:`open_dataset` does."""
    url, choice = opening.url, opening.choice
    meter = Meter()
    store, standing = opening.location.open_to_read(opening.absent_chunks, meter)
    if standing.kind != GROUP:
        raise _not_found(opening.location, standing.kind)
    try:
        group = opening.group(store, standing.zarr_format)
        mark = Mark.of(group.attrs)
        if mark is not None and not mark.complete:
            raise DatasetError(
                f"the dataset at {url} was never finished, or is still being written; if nothing writes it, create "
                "it again with overwrite=True"
            )
        chosen = find_arrays(group, url, choice)
        identity = identity_of(store.bare, group, chosen, choice)
    except (DatasetError, InvalidParameter):
        raise
    except Exception as exc:
        raise DatasetError(f"cannot open the Zarr group at {url}: {type(exc).__name__}: {exc}") from exc
    store.absent_is_error = (opening.absent_chunks or ("fill" if mark is None else "error")) == "error"
    if chosen.n_samples == 0:
        raise DatasetError(f"the dataset at {url} has no samples")
    skipped = dict(chosen.skipped)
    if decoding is None:
        decoding, refused = _decoding(chosen, choice)
        skipped |= refused
        for reason in dict.fromkeys(decoding.undecoded.values()):
            names = ", ".join(repr(name) for name, its in decoding.undecoded.items() if its == reason)
            logger.warning("Array %s of %s is not decoded: %s", names, hide_secrets(url), reason)
    encodings = {name: how for name, how in decoding.encodings.items() if name in chosen.arrays}
    sources = {
        name: StoredArray.of(url, name, chosen.arrays[name], axis=chosen.axes[name], encoding=encoding)
        for name, encoding in encodings.items()
    }
    return Dataset(
        url=url,
        n_samples=chosen.n_samples,
        arrays=MappingProxyType({name: source.info for name, source in sources.items()}),
        skipped=MappingProxyType(skipped),
        undecoded=MappingProxyType(decoding.undecoded),
        layout=RowLayout.of(
            {name: (source.dtype, source.info.shape) for name, source in sources.items()},
            {name: encoding for name, encoding in encodings.items() if encoding is not None},
        ),
        _stored_identity=identity,
        _store=store,
        _sources=sources,
        _meter=meter,
        _opening=opening,
        _open=open_stored,
        _view=View(chosen.n_samples),
    )


def _not_found(location: Location, kind: str) -> DatasetNotFound:
    """The error for a place where something else exists, or nothing."""
    url, hint = location.url, ""
    if not kind and location.store is not None:
        return DatasetNotFound(f"no Zarr group exists at {url}")
    if not kind:
        if is_memory(url):
            hint = " (memory:// URLs exist only in the process that created them)"
        return DatasetNotFound(
            f"no dataset exists at {url}{hint}; create one with create_dataset (dshuffle dataset create)"
        )
    if kind == ARRAY:
        hint = ". If a group contains it, open that, with arrays=[...] for this array alone"
    elif kind == "a file" and url.endswith(".zip"):
        hint = f". Open a ZIP file with open_dataset(zarr.storage.ZipStore({url!r}))"
    return DatasetNotFound(f"{url} is {kind}, but a dataset is a Zarr group of arrays{hint}")


def _decoding(chosen: SampleArrays, choice: ArrayChoice) -> tuple[Decoding, dict[str, str]]:
    """How the numbers of each array become values, and why arrays are left out."""
    decoding, refused = Decoding({}, {}), dict[str, str]()
    if not choice.decode:
        return Decoding(dict.fromkeys(chosen.arrays), {}), refused
    for name, attributes in attributes_of(chosen.arrays).items():
        try:
            decoding.encodings[name], undecoded = encoding_of(chosen.arrays[name], attributes)
        except DatasetError as error:
            if choice.arrays is not None or len(chosen.arrays) == 1:
                raise
            refused[name] = str(error)
            continue
        if undecoded:
            decoding.undecoded[name] = undecoded
    if not decoding.encodings:
        raise DatasetError(f"no array can be decoded: {'; '.join(refused.values())}")
    return decoding, refused
