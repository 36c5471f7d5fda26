"""Open a dataset."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import zarr

from dshuffle.errors import DatasetError, DatasetNotFound, InvalidParameter
from dshuffle.redaction import hide_secrets
from dshuffle.rows import RowLayout
from dshuffle.store.backends import GROUP, canonical_url, open_store, standing_at
from dshuffle.store.backends.chunk_cache import ChunkCache, cache_nbytes
from dshuffle.store.backends.metered import Meter, MeteredStore
from dshuffle.store.both_ways import FirstReads
from dshuffle.store.cf import Decoding, attributes_of, encoding_of
from dshuffle.store.dataset import Dataset
from dshuffle.store.identity import MARK, identity_of
from dshuffle.store.sample_arrays import SampleArrays, Wanted, find_arrays
from dshuffle.store.stored_array import StoredArray
from dshuffle.store.view import View

logger = logging.getLogger(__name__)


def open_dataset(
    url: str | os.PathLike[str],
    *,
    arrays: Sequence[str] | None = None,
    sample_dim: str | int | None = None,
    decode: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    chunk_cache: int | str | None = None,
) -> Dataset:
    """Open a dataset: any Zarr group (v2 or v3) with arrays that share a dimension of samples.

    The group does not have to come from dshuffle. Its arrays may be chunked in any way, sharded or compressed. In a
    dataset from :func:`create_dataset` a missing chunk is an error. In any other group a missing chunk is read as the
    fill value, as the Zarr specification says.

    Parameters
    ----------
    url
        A local path (including mounted file systems) or a URL: ``file://``, ``s3://bucket/prefix``,
        ``nfs://server/export/path``, ``memory://name`` (this process only), or any scheme that fsspec knows.
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
        the options of fsspec. For all stores except ``memory://``: ``max_retries`` (7) and ``timeout`` (60 s); see
        ``Patience``.
    chunk_cache
        Bytes (or ``"256 MiB"``) of stored chunks that each process keeps in memory between epochs; by default none.
        It applies to arrays whose chunks span all axes except the first.

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
    wanted = Wanted(arrays, sample_dim, decode)
    return Opening(canonical_url(url), wanted, storage_options, cache_nbytes(chunk_cache)).open()


@dataclass(frozen=True, slots=True)
class Opening:
    """How a dataset was opened, so that other processes can open it again.

    Parameters
    ----------
    url
        Canonical URL.
    wanted
        Which arrays, and what they mean.
    storage_options
        Options of the store. They may hold secrets.
    chunk_cache
        Bytes of chunks that each process keeps; 0 for none.
    """

    url: str
    wanted: Wanted
    storage_options: Mapping[str, Any] | None = field(repr=False)
    chunk_cache: int

    def identity(self, store: MeteredStore) -> str:
        """The identity of what is stored now."""
        group = zarr.open_group(store=store, mode="r")
        return identity_of(store.bare, group, find_arrays(group, self.url, self.wanted), self.wanted)

    def open(self, decoding: Decoding | None = None) -> Dataset:
        """Open the dataset, as :func:`open_dataset` does.

        Parameters
        ----------
        decoding
            What the process that opened it first has decided, so that values are the same everywhere.
        """
        url, wanted, storage_options, nbytes = self.url, self.wanted, self.storage_options, self.chunk_cache
        found = standing_at(url, storage_options)
        if not found:
            private = url.startswith("memory://")
            hint = " (memory:// URLs exist only in the process that created them)" if private else ""
            raise DatasetNotFound(
                f"no dataset exists at {url}{hint}; create one with create_dataset (dshuffle dataset create)"
            )
        if found != GROUP:
            raise DatasetNotFound(f"{url} is {found}, but a dataset is a Zarr group of arrays")
        meter = Meter()
        store = MeteredStore(open_store(url, storage_options, read_only=True, on_retry=meter.count_retry), meter)
        cache = ChunkCache(store, nbytes, meter) if nbytes else None
        try:
            group = zarr.open_group(store=store, mode="r")
            mark = group.attrs.get(MARK)
            chosen = find_arrays(group, url, wanted)
            identity = identity_of(store.bare, group, chosen, wanted)
        except (DatasetError, InvalidParameter):
            raise
        except Exception as exc:
            raise DatasetError(f"cannot open the Zarr group at {url}: {type(exc).__name__}: {exc}") from exc
        if isinstance(mark, Mapping):
            if not mark.get("complete"):
                raise DatasetError(f"the dataset at {url} was never finished; create it again with overwrite=True")
            store.absent_is_error = True
        if chosen.n_samples == 0:
            raise DatasetError(f"the dataset at {url} has no samples")
        skipped = dict(chosen.skipped)
        if decoding is None:
            decoding, refused = _decoding(chosen, wanted)
            skipped |= refused
            for name, reason in decoding.undecoded.items():
                logger.warning("Array %r of %s is not decoded: %s", name, hide_secrets(url), reason)
        encodings = {name: how for name, how in decoding.encodings.items() if name in chosen.arrays}
        sources = {
            name: StoredArray.of(url, name, chosen.arrays[name], cache, axis=chosen.axes[name], encoding=encoding)
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
            _cache=cache,
            _first_reads=FirstReads(store.bare),
            _opening=self,
            _view=View(chosen.n_samples),
        )


def _decoding(chosen: SampleArrays, wanted: Wanted) -> tuple[Decoding, dict[str, str]]:
    """How the numbers of each array become values, and why arrays are left out."""
    decoding, refused = Decoding({}, {}), dict[str, str]()
    if not wanted.decode:
        return Decoding(dict.fromkeys(chosen.arrays), {}), refused
    for name, attributes in attributes_of(chosen.arrays).items():
        try:
            decoding.encodings[name], undecoded = encoding_of(chosen.arrays[name], attributes)
        except DatasetError as error:
            if wanted.arrays is not None or len(chosen.arrays) == 1:
                raise
            refused[name] = str(error)
            continue
        if undecoded:
            decoding.undecoded[name] = undecoded
    if not decoding.encodings:
        raise DatasetError(f"no array can be decoded: {'; '.join(refused.values())}")
    return decoding, refused
