"""Write a dataset again in random order, in bounded memory.

The dataset is read once, in its own order, in slabs of whole chunks. Every row goes to a bucket, a range of positions
in the new order, in a file on a local disk. Then the buckets are read one after the other, and each is put in order in
memory. Who goes where is a function (:class:`~dshuffle.planning.bijection.Bijection`), so no list of positions is kept,
unless the order is by classes.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from dask.utils import parse_bytes
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.planning.bijection import Bijection
from dshuffle.planning.class_order import ClassOrder
from dshuffle.store.backends import canonical_url, is_local
from dshuffle.store.create import create_dataset
from dshuffle.store.dataset import Dataset
from dshuffle.store.open import open_dataset
from dshuffle.store.sources.source import StreamSource
from dshuffle.store.sources.zarr_nodes import read_array
from dshuffle.units import human_bytes
from dshuffle.unnamed_file import unnamed_file

T = TypeVar("T")
R = TypeVar("R")

PARTS = 8
"""Parts of the memory budget: rows that are read, sorted by bucket, ordered and written, with room for copies."""

MOST_BUCKETS = 1 << 16
"""With more, the rows of a bucket in a slab would be too few to write them quickly."""

Progress = Callable[[int, int, str], None]


class ArrayBuckets:
    """The rows of one array in a file without a name, by bucket.

    Parameters
    ----------
    folder
        Folder on a local disk.
    n_rows, bucket_rows
        Number of rows in all, and in a bucket (the last one may have fewer).
    dtype, shape
        Items and shape of one sample.

    Raises
    ------
    DatasetError
        If the disk does not have enough room.
    """

    def __init__(
        self, folder: str, n_rows: int, bucket_rows: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        self._dtype = dtype
        self._shape = shape
        self._row_nbytes = dtype.itemsize * math.prod(shape)
        self._bucket_rows = bucket_rows
        self._filled = np.zeros(-(-n_rows // bucket_rows), np.int64)
        try:
            self._file = unnamed_file(folder, n_rows * self._row_nbytes)
        except OSError as error:
            raise DatasetError(
                f"the temporary folder {folder!r} cannot hold the dataset: {error}. Choose another folder "
                "(temporary=, --temporary)"
            ) from error

    def add(self, values: NDArray[Any], buckets: NDArray[np.int64]) -> None:
        """Append rows to their buckets, which are ascending. Rows of one bucket stay in their order."""
        found, firsts = np.unique(buckets, return_index=True)
        values = np.ascontiguousarray(values)
        for bucket, first, last in zip(found.tolist(), firsts, [*firsts[1:], len(buckets)], strict=True):
            place = bucket * self._bucket_rows + int(self._filled[bucket])
            self._write(values[first:last], place)
            self._filled[bucket] += last - first

    def read(self, bucket: int) -> NDArray[Any]:
        """Read the rows of a bucket, in the order in which they were added."""
        rows = np.empty((int(self._filled[bucket]), *self._shape), self._dtype)
        place, target = bucket * self._bucket_rows * self._row_nbytes, _bytes(rows)
        done = 0
        while done < len(target):
            count = os.preadv(self._file.fileno(), [target[done:]], place + done)
            if not count:
                raise DatasetError(f"bucket {bucket} of a shuffle is truncated")
            done += count
        return rows

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def _write(self, rows: NDArray[Any], place: int) -> None:
        source, offset, done = _bytes(rows), place * self._row_nbytes, 0
        while done < len(source):
            done += os.pwrite(self._file.fileno(), source[done:], offset + done)


def shuffle_dataset(
    source: Dataset | str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    seed: int = 0,
    by: str | None = None,
    chunk_rows: int | None = None,
    shard_rows: int | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    memory_budget: int | str = "1 GiB",
    temporary: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Write a dataset again, with its samples in random order.

    Parameters
    ----------
    source
        A dataset, or the URL of one. It is not changed. Encoded values (scale, offset) are written decoded.
    url
        Where to write, other than the source; as for :func:`create_dataset`. Arrays that cannot be opened
        (:attr:`Dataset.skipped`), attributes and stored shardings are not written.
    seed
        Random seed. The order depends on it and on the number of samples.
    by
        Name of an array with one value for each sample. The order is then random, with each value spread evenly: the
        number of samples with a value in a chunk stays within about two of its share. By default all orders are about
        equally likely. With ``by``, the order takes up to 80 bytes of memory for each sample, beside ``memory_budget``.
    chunk_rows, shard_rows, overwrite, storage_options
        As for :func:`create_dataset`.
    memory_budget
        Bytes of memory to use: an integer, or text such as ``"1 GiB"``. A chunk that is larger than an eighth of it
        takes more, because chunks are read whole.
    temporary
        Folder on a local disk with room for the whole dataset. By default the system's folder for temporary files.
    progress
        Called as ``progress(rows done, all rows, text)``. Every array counts twice: it is read, and written.

    Returns
    -------
    Dataset
        The new dataset.

    Raises
    ------
    InvalidParameter
        If a parameter is not allowed.
    DatasetError
        If the dataset cannot be read or written, or the disk does not have enough room.

    Notes
    -----
    One shuffle on disk makes reading in chunks (the assignment ``chunks``, or another loader that shuffles chunks)
    nearly as good as a random order: Corgi², below.

    References
    ----------
    Livne et al. (2023), "Corgi²: a hybrid offline-online approach to storage-aware data shuffling for SGD". They
    shuffle blocks offline; here all samples are shuffled.

    Examples
    --------
    >>> from dshuffle.store import create_dataset
    >>> _ = create_dataset("memory://doc-sorted", {"x": np.arange(8)}, overwrite=True)
    >>> shuffled = shuffle_dataset("memory://doc-sorted", "memory://doc-shuffled", seed=1, overwrite=True)
    >>> sorted(shuffled.read_rows(np.arange(8))["x"].tolist())
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    opened = source if isinstance(source, Dataset) else open_dataset(source)
    _check_target(opened, url)
    order = _order(opened, by, as_integer("seed", seed))
    widest = max(info.dtype.itemsize * math.prod(info.shape) for info in opened.arrays.values())
    least_rows = -(-opened.n_samples // MOST_BUCKETS)  # of a bucket
    part = _budget(memory_budget, least=PARTS * (1 if least_rows == 1 else least_rows * max(1, widest))) // PARTS
    bucket_rows = max(1, part // max(1, widest))
    q, total, done = opened.n_samples, 2 * len(opened.arrays) * opened.n_samples, 0
    folder = tempfile.gettempdir() if temporary is None else os.fspath(temporary)
    buckets: dict[str, ArrayBuckets] = {}

    def say(n_rows: int, text: str) -> None:
        nonlocal done
        done += n_rows
        if progress is not None:
            progress(done, total, text)

    def spread() -> None:
        """Read all rows, and write them to their buckets."""
        for name, info in opened.arrays.items():
            buckets[name] = ArrayBuckets(folder, q, bucket_rows, info.dtype, info.shape)

        def by_bucket(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
            places = order.forward(ids) // bucket_rows
            sorting = np.argsort(places, kind="stable")
            return places[sorting], opened.read_rows(ids[sorting], memory_budget=part)

        for places, rows in _ahead(by_bucket, opened.slabs(part)):
            for name, values in rows.items():
                buckets[name].add(values, places)
                say(len(places), "rows read")
        opened.check_unchanged()

    def blocks(name: str) -> Iterator[NDArray[Any]]:
        if not buckets:  # not earlier: by now the target has been checked
            spread()

        def ordered(bucket: int) -> NDArray[Any]:
            first = bucket * bucket_rows
            ids = order.inverse(np.arange(first, min(first + bucket_rows, q)))
            # The bucket has these samples in ascending order.
            places = np.empty(len(ids), np.int64)
            places[np.argsort(ids)] = np.arange(len(ids))
            return buckets[name].read(bucket)[places]

        for rows in _ahead(ordered, range(-(-q // bucket_rows))):
            yield rows
            say(len(rows), "rows written")

    def stream(name: str) -> StreamSource:
        info = opened.arrays[name]
        return StreamSource(opened.url, (q, *info.shape), info.dtype, lambda: blocks(name))

    try:
        return create_dataset(
            url,
            {name: stream(name) for name in opened.arrays},
            chunk_rows=chunk_rows,
            shard_rows=shard_rows,
            overwrite=overwrite,
            storage_options=storage_options,
        )
    finally:
        for one in buckets.values():
            one.close()


def _order(opened: Dataset, by: str | None, seed: int) -> Bijection | ClassOrder:
    if by is None:
        return Bijection.of(opened.n_samples, "shuffle dataset", seed)
    if by not in opened.scalars:
        allowed = f"None, or one of the arrays with one value for each sample: {opened.scalars}"
        raise InvalidParameter.of("by", by, allowed)
    return ClassOrder.of(read_array(opened, by)[: opened.n_samples], "shuffle dataset", seed)


def _check_target(opened: Dataset, url: str | os.PathLike[str]) -> None:
    """Refuse the source: the copy may lack arrays, attributes, shardings or samples that it has."""
    target = canonical_url(url)
    same = os.path.realpath(target) == os.path.realpath(opened.url) if is_local(target) else target == opened.url
    if same:
        raise InvalidParameter.of("url", os.fspath(url), "another place than the source's")


def _ahead(function: Callable[[T], R], values: Iterable[T]) -> Iterator[R]:
    """The results of a function, of which the next one is computed in a thread while one is used."""
    with ThreadPoolExecutor(1) as thread:
        coming: Future[R] | None = None
        for value in values:
            following = thread.submit(function, value)
            if coming is not None:
                yield coming.result()
            coming = following
        if coming is not None:
            yield coming.result()


def _budget(memory_budget: int | str, least: int) -> int:
    try:
        nbytes = int(parse_bytes(memory_budget))
    except (ValueError, TypeError):
        raise InvalidParameter.of("memory_budget", memory_budget, 'a number of bytes, such as "1 GiB"') from None
    if nbytes < least:
        raise InvalidParameter.of("memory_budget", memory_budget, f"at least {human_bytes(least)} for this dataset")
    return nbytes


def _bytes(rows: NDArray[Any]) -> memoryview:
    flat: Any = rows.reshape(-1).view(np.uint8)
    return memoryview(flat)
