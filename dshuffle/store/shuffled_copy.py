"""Write a dataset again in random order, in bounded memory.

The dataset is read once, in its own order, in slabs of whole chunks. Every row goes to a bucket, a range of positions
in the new order, in a file on a local disk. Then the buckets are read one after the other, and each is put in order in
memory. Who goes where is a function (:class:`~dshuffle.planning.randomness.Bijection`), so no list of positions is
kept, unless the order is by classes.

By default the files do not have names, and vanish when their process ends. In a folder of their own they stay, with a
note of how many slabs have been read. A later process with the same task then continues.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
from dask.utils import parse_bytes
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.planning.exchange_epochs import ClassOrder
from dshuffle.planning.randomness import DRAW_VERSION, Bijection
from dshuffle.private_files import lock_file, replace_file, reserve
from dshuffle.store.create import create_dataset
from dshuffle.store.dataset import Dataset, as_dataset
from dshuffle.store.places import Place, canonical_url, is_local
from dshuffle.store.reader import ArrayInfo
from dshuffle.store.sources import read_array
from dshuffle.store.sources.source import RowSource, stream
from dshuffle.units import human_bytes

SAVE_EVERY = 15.0
"""Seconds between notes of how many slabs have been read. Each waits until the disk has the rows."""

PARTS = 8
"""Parts of the memory budget: rows that are read, sorted by bucket, ordered and written, with room for copies."""

MOST_BUCKETS = 1 << 16
"""With more, the rows of a bucket in a slab would be too few to write them quickly."""

Progress = Callable[[int, int, str], None]
T = TypeVar("T")
R = TypeVar("R")


class Buckets:
    """The rows of a dataset in files on a local disk, one for each array, by bucket.

    With a ``key``, they have names, so that another process can continue. All buckets have ``bucket_rows``, and the
    last one may have fewer.
    """

    def __init__(
        self, folder: str, arrays: Mapping[str, ArrayInfo], n_rows: int, bucket_rows: int, key: str | None
    ) -> None:
        self.n_slabs = 0
        self._arrays, self._bucket_rows, self._saved = arrays, bucket_rows, time.monotonic()
        self._filled = np.zeros(-(-n_rows // bucket_rows), np.int64)
        self._own = None if key is None else os.path.join(folder, f"dshuffle-buckets-{key}")
        self._files: dict[str, BinaryIO] = {}
        self._opened = ExitStack()
        try:
            if not os.path.isdir(folder):
                raise FileNotFoundError("there is no such folder")
            if self._own is not None:
                self._begin(self._own)
            for number, (name, info) in enumerate(arrays.items()):
                file = self._files[name] = self._opened.enter_context(self._file(folder, number))
                reserve(file, n_rows * _nbytes(info), folder)
        except OSError as error:
            self.close()
            raise DatasetError(
                f"the temporary folder {folder!r} cannot hold the dataset: {error}. Choose another folder "
                "(temporary=, --temporary)"
            ) from error

    def _begin(self, own: str) -> None:
        os.makedirs(own, exist_ok=True)
        lock = self._opened.enter_context(open(os.path.join(own, "lock"), "wb"))  # noqa: SIM115
        try:
            lock_file(lock.fileno())
        except BlockingIOError as error:
            raise BlockingIOError(f"another process uses {own!r} for the same shuffle") from error
        with suppress(FileNotFoundError, ValueError), open(os.path.join(own, "slabs"), "rb") as note:
            self.n_slabs = int(note.read())

    def _file(self, folder: str, number: int) -> BinaryIO:
        if self._own is None:
            return cast(BinaryIO, tempfile.TemporaryFile(dir=folder))  # closed with the others
        path = os.path.join(self._own, f"{number}.rows")
        fresh = not os.path.exists(path)
        if fresh and self.n_slabs:
            raise FileNotFoundError(f"{path} is missing; remove {self._own!r} to start again")
        return open(path, "w+b" if fresh else "r+b")

    def skip(self, buckets: NDArray[np.int64]) -> None:
        """Count the rows of a slab that another process has read, which are in these buckets."""
        self._filled += np.bincount(buckets, minlength=len(self._filled))

    def add(self, buckets: NDArray[np.int64], rows: Mapping[str, NDArray[Any]]) -> None:
        """Append the rows of a slab to their buckets, which are ascending. Rows of one bucket stay in their order."""
        distinct, firsts = np.unique(buckets, return_index=True)
        places = distinct * self._bucket_rows + self._filled[distinct]
        for name, values in rows.items():
            file, nbytes, flat = self._files[name], _nbytes(self._arrays[name]), _bytes(values)
            for place, first, last in zip(places.tolist(), firsts, [*firsts[1:], len(buckets)], strict=True):
                file.seek(place * nbytes)
                file.write(flat[first * nbytes : last * nbytes])
        self.skip(buckets)
        self.n_slabs += 1
        if time.monotonic() - self._saved > SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Note how many slabs have been read."""
        if self._own is not None:
            for file in self._files.values():
                file.flush()
                os.fdatasync(file.fileno())
            replace_file(os.path.join(self._own, "slabs"), str(self.n_slabs).encode())
        self._saved = time.monotonic()

    def read(self, name: str, bucket: int) -> NDArray[Any]:
        """Read the rows of a bucket, in the order in which they were added."""
        info, file = self._arrays[name], self._files[name]
        rows = np.empty((int(self._filled[bucket]), *info.shape), info.dtype)
        file.seek(bucket * self._bucket_rows * _nbytes(info))
        if file.readinto(_bytes(rows)) != rows.nbytes:  # type: ignore[attr-defined]
            raise DatasetError(f"bucket {bucket} of a shuffle is truncated")
        return rows

    def close(self, *, remove: bool = False) -> None:
        """Close the files. Those with names stay, unless all is done."""
        self._opened.close()
        if remove and self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)


def _nbytes(info: ArrayInfo) -> int:
    return info.dtype.itemsize * math.prod(info.shape)


def _bytes(rows: NDArray[Any]) -> memoryview:
    flat: Any = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    return memoryview(flat)


def shuffle_dataset(
    source: Dataset | Place,
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
        Folder on a local disk with room for the whole dataset. By default the system's folder for temporary files, and
        nothing is left there whatever happens. In a folder that is given, the rows that have been read stay until the
        copy is complete: if the process is stopped, the same call reads only the others.
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
    opened = as_dataset(source)
    _check_target(opened, url, overwrite)
    order = _order(opened, by, as_integer("seed", seed))
    widest = max(map(_nbytes, opened.arrays.values()))
    least_rows = -(-opened.n_samples // MOST_BUCKETS)  # of a bucket
    part = _budget(memory_budget, least=PARTS * (1 if least_rows == 1 else least_rows * max(1, widest))) // PARTS
    bucket_rows = max(1, part // max(1, widest))
    q, n_arrays, done = opened.n_samples, len(opened.arrays), 0
    made: list[Buckets] = []

    def say(n_rows: int, text: str) -> None:
        nonlocal done
        done += n_rows
        if progress is not None:
            progress(done, 2 * n_arrays * q, text)

    def buckets_of(ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return order.forward(ids) // bucket_rows

    def by_bucket(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        places = buckets_of(ids)
        sorting = np.argsort(places, kind="stable")
        return places[sorting], opened.read_rows(ids[sorting], memory_budget=part)

    def spread() -> Buckets:
        """Read all rows, and write them to their buckets."""
        key = None if temporary is None else _key(opened, seed, by, bucket_rows, part)
        folder = tempfile.gettempdir() if temporary is None else os.fspath(temporary)
        buckets = Buckets(folder, opened.arrays, q, bucket_rows, key)
        made.append(buckets)
        slabs = opened.slabs(part)
        for ids in itertools.islice(slabs, buckets.n_slabs):
            buckets.skip(buckets_of(ids))
            say(len(ids) * n_arrays, "rows read before")
        for places, rows in _ahead(by_bucket, slabs):
            buckets.add(places, rows)
            say(len(places) * n_arrays, "rows read")
        opened.check_unchanged()
        buckets.save()
        return buckets

    def blocks(name: str) -> Iterator[NDArray[Any]]:
        buckets = made[0] if made else spread()  # not earlier: by now the target has been checked

        def ordered(bucket: int) -> NDArray[Any]:
            first = bucket * bucket_rows
            ids = order.inverse(np.arange(first, min(first + bucket_rows, q)))
            # The bucket has these samples in ascending order.
            places = np.empty(len(ids), np.int64)
            places[np.argsort(ids)] = np.arange(len(ids))
            return buckets.read(name, bucket)[places]

        for rows in _ahead(ordered, range(-(-q // bucket_rows))):
            yield rows
            say(len(rows), "rows written")

    def rows_of(name: str) -> RowSource:
        info = opened.arrays[name]
        return stream(opened.url, (q, *info.shape), info.dtype, lambda: blocks(name))

    written = None
    try:
        written = create_dataset(
            url,
            {name: rows_of(name) for name in opened.arrays},
            chunk_rows=chunk_rows,
            shard_rows=shard_rows,
            overwrite=overwrite,
            storage_options=storage_options,
        )
        return written
    finally:
        for buckets in made:
            buckets.close(remove=written is not None)


def _key(opened: Dataset, seed: int, by: str | None, bucket_rows: int, part: int) -> str:
    """Name of a first pass: another process may continue it if all of this is the same."""
    arrays = [(name, info.dtype.str, info.shape) for name, info in opened.arrays.items()]
    what = repr((opened.identity, opened.n_samples, arrays, seed, by, bucket_rows, part, DRAW_VERSION))
    return hashlib.sha256(what.encode()).hexdigest()[:16]


def _order(opened: Dataset, by: str | None, seed: int) -> Bijection | ClassOrder:
    if by is None:
        return Bijection.of(opened.n_samples, "shuffle dataset", seed)
    if by not in opened.scalars:
        allowed = f"None, or one of the arrays with one value for each sample: {opened.scalars}"
        raise InvalidParameter.of("by", by, allowed)
    return ClassOrder.of(read_array(opened, by)[: opened.n_samples], "shuffle dataset", seed)


def _check_target(opened: Dataset, url: str | os.PathLike[str], overwrite: bool) -> None:
    """Refuse the source: the copy may lack arrays, attributes, shardings or samples that it has."""
    target = canonical_url(url)
    same = os.path.realpath(target) == os.path.realpath(opened.url) if is_local(target) else target == opened.url
    if same:
        raise InvalidParameter.of("url", os.fspath(url), "another place than the source's")
    if overwrite and not is_local(target) and opened._opening.location.store is not None:
        allowed = "a local path, as the source is a store object that may keep its data at this URL"
        raise InvalidParameter.of("url", os.fspath(url), allowed, "Leave overwrite out if nothing exists there.")


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
