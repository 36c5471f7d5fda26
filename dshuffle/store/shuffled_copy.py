"""Write a dataset again in random order, in bounded memory.

The dataset is read once, in its own order, in slabs of whole chunks. Every row goes to a bucket, a range of positions
in the new order, in a file on a local disk. Then the buckets are read one after the other, and each is put in order in
memory. Who goes where is a function (:class:`~dshuffle.planning.randomness.Bijection`), so no list of positions is
kept, unless the order is by classes.

By default the files do not have names, and vanish when their process ends. In a folder of their own they stay, with a
note of how far the first pass has come. A later process with the same task then continues.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, Protocol, TypeVar, cast

import numpy as np
from dask.utils import parse_bytes
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.planning.exchange_epochs import ClassOrder
from dshuffle.planning.randomness import DRAW_VERSION, Bijection
from dshuffle.private_files import reserve, unnamed_file
from dshuffle.store.create import create_dataset
from dshuffle.store.dataset import Dataset
from dshuffle.store.open import as_dataset
from dshuffle.store.places import Place, canonical_url, is_local
from dshuffle.store.sources import read_array
from dshuffle.store.sources.source import RowSource, stream
from dshuffle.units import human_bytes

SAVE_EVERY = 15.0
"""Seconds between notes of how far the first pass has come. Each waits until the disk has the rows."""


class SampleType(Protocol):
    """What the samples of an array are."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Items of a sample."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample."""


class ArrayBuckets:
    """The rows of one array in a file, by bucket.

    Parameters
    ----------
    file
        The file, with room for all rows.
    bucket_rows, filled
        Number of rows in a bucket (the last one may have fewer), and ``(buckets,)`` how many each has so far.
    dtype, shape
        Items and shape of one sample.
    """

    def __init__(
        self,
        file: BinaryIO,
        bucket_rows: int,
        filled: NDArray[np.int64],
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
    ) -> None:
        self.file, self.filled = file, filled
        self._dtype = dtype
        self._shape = shape
        self._row_nbytes = dtype.itemsize * math.prod(shape)
        self._bucket_rows = bucket_rows

    def add(self, values: NDArray[Any], buckets: NDArray[np.int64]) -> None:
        """Append rows to their buckets, which are ascending. Rows of one bucket stay in their order."""
        distinct, firsts = np.unique(buckets, return_index=True)
        values = np.ascontiguousarray(values)
        for bucket, first, last in zip(distinct.tolist(), firsts, [*firsts[1:], len(buckets)], strict=True):
            place = bucket * self._bucket_rows + int(self.filled[bucket])
            self._write(values[first:last], place)
            self.filled[bucket] += last - first

    def read(self, bucket: int) -> NDArray[Any]:
        """Read the rows of a bucket, in the order in which they were added."""
        rows = np.empty((int(self.filled[bucket]), *self._shape), self._dtype)
        place, target = bucket * self._bucket_rows * self._row_nbytes, _bytes(rows)
        done = 0
        while done < len(target):
            count = os.preadv(self.file.fileno(), [target[done:]], place + done)
            if not count:
                raise DatasetError(f"bucket {bucket} of a shuffle is truncated")
            done += count
        return rows

    def _write(self, rows: NDArray[Any], place: int) -> None:
        source, offset, done = _bytes(rows), place * self._row_nbytes, 0
        while done < len(source):
            done += os.pwrite(self.file.fileno(), source[done:], offset + done)


class Buckets:
    """The rows of a dataset, by bucket.

    Parameters
    ----------
    folder
        Folder on a local disk.
    arrays
        The arrays of the dataset.
    n_rows, bucket_rows
        Number of rows in all, and in a bucket.
    key
        Name of what is being done, to continue what another process has begun; None to leave nothing behind.
    """

    def __init__(
        self, folder: str, arrays: Mapping[str, SampleType], n_rows: int, bucket_rows: int, key: str | None
    ) -> None:
        self.n_pieces = 0
        self._own = None if key is None else os.path.join(folder, f"dshuffle-buckets-{key}")
        self._lock: BinaryIO | None = None
        self._saved = time.monotonic()
        self._arrays: dict[str, ArrayBuckets] = {}
        n_buckets = -(-n_rows // bucket_rows)
        try:
            filled = self._begun(list(arrays), n_buckets)
            for number, (name, info) in enumerate(arrays.items()):
                file = self._opened(folder, number, n_rows * info.dtype.itemsize * math.prod(info.shape))
                self._arrays[name] = ArrayBuckets(file, bucket_rows, filled[number], info.dtype, info.shape)
        except OSError as error:
            self.close()
            raise DatasetError(
                f"the temporary folder {folder!r} cannot hold the dataset: {error}. Choose another folder "
                "(temporary=, --temporary)"
            ) from error

    def __getitem__(self, name: str) -> ArrayBuckets:
        return self._arrays[name]

    def piece_done(self, *, last: bool = False) -> None:
        """Count a piece of the dataset whose rows are in their buckets, and note it from time to time."""
        self.n_pieces += not last
        if self._own is None or not (last or time.monotonic() - self._saved > SAVE_EVERY):
            return
        for array in self._arrays.values():
            os.fdatasync(array.file.fileno())
        note = os.path.join(self._own, "note.npy")
        counts = np.array([array.filled for array in self._arrays.values()])
        with open(note + ".new", "wb") as file:
            np.save(file, np.append(counts.ravel(), self.n_pieces))
            file.flush()
            os.fsync(file.fileno())
        os.replace(note + ".new", note)
        self._saved = time.monotonic()

    def remove(self) -> None:
        """Remove the files: all is done."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    def close(self) -> None:
        """Close the files. Those with names stay."""
        for array in self._arrays.values():
            array.file.close()
        if self._lock is not None:
            self._lock.close()

    def _begun(self, names: list[str], n_buckets: int) -> NDArray[np.int64]:
        """Rows in the buckets of each array so far; sets the number of pieces that are done."""
        nothing = np.zeros((len(names), n_buckets), np.int64)
        if self._own is None:
            return nothing
        if not os.path.isdir(os.path.dirname(self._own)):
            raise FileNotFoundError("there is no such folder")
        os.makedirs(self._own, exist_ok=True)
        self._lock = open(os.path.join(self._own, "lock"), "wb")  # noqa: SIM115  # held until the end
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"another process uses {self._own!r} for the same shuffle") from error
        try:
            note = np.load(os.path.join(self._own, "note.npy"))
        except (FileNotFoundError, ValueError, EOFError):
            return nothing
        if note.shape != (nothing.size + 1,) or note.dtype != np.int64:
            return nothing
        self.n_pieces = int(note[-1])
        return np.ascontiguousarray(note[:-1].reshape(nothing.shape))

    def _opened(self, folder: str, number: int, nbytes: int) -> BinaryIO:
        if self._own is None:
            return unnamed_file(folder, nbytes)
        path = os.path.join(self._own, f"{number}.rows")
        fresh = not os.path.exists(path)
        if fresh and self.n_pieces:
            raise FileNotFoundError(f"{path} is missing; remove {self._own!r} to start again")
        file = cast(BinaryIO, open(path, "w+b" if fresh else "r+b", buffering=0))  # noqa: SIM115  # closed with the others
        reserve(file, nbytes, folder)
        return file


def _bytes(rows: NDArray[Any]) -> memoryview:
    flat: Any = rows.reshape(-1).view(np.uint8)
    return memoryview(flat)


T = TypeVar("T")
R = TypeVar("R")

PARTS = 8
"""Parts of the memory budget: rows that are read, sorted by bucket, ordered and written, with room for copies."""

MOST_BUCKETS = 1 << 16
"""With more, the rows of a bucket in a slab would be too few to write them quickly."""

Progress = Callable[[int, int, str], None]


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
    widest = max(info.dtype.itemsize * math.prod(info.shape) for info in opened.arrays.values())
    least_rows = -(-opened.n_samples // MOST_BUCKETS)  # of a bucket
    part = _budget(memory_budget, least=PARTS * (1 if least_rows == 1 else least_rows * max(1, widest))) // PARTS
    bucket_rows = max(1, part // max(1, widest))
    q, total, done = opened.n_samples, 2 * len(opened.arrays) * opened.n_samples, 0
    folder = tempfile.gettempdir() if temporary is None else os.fspath(temporary)
    made: list[Buckets] = []

    def say(n_rows: int, text: str) -> None:
        nonlocal done
        done += n_rows
        if progress is not None:
            progress(done, total, text)

    def spread() -> None:
        """Read all rows, and write them to their buckets."""
        key = None if temporary is None else _key(opened, seed, by, bucket_rows, part)
        buckets = Buckets(folder, opened.arrays, q, bucket_rows, key)
        made.append(buckets)
        slabs = opened.slabs(part)
        for ids in itertools.islice(slabs, buckets.n_pieces):
            say(len(ids) * len(opened.arrays), "rows read before")

        def by_bucket(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
            places = order.forward(ids) // bucket_rows
            sorting = np.argsort(places, kind="stable")
            return places[sorting], opened.read_rows(ids[sorting], memory_budget=part)

        for places, rows in _ahead(by_bucket, slabs):
            for name, values in rows.items():
                buckets[name].add(values, places)
                say(len(places), "rows read")
            buckets.piece_done()
        opened.check_unchanged()
        buckets.piece_done(last=True)

    def blocks(name: str) -> Iterator[NDArray[Any]]:
        if not made:  # not earlier: by now the target has been checked
            spread()

        def ordered(bucket: int) -> NDArray[Any]:
            first = bucket * bucket_rows
            ids = order.inverse(np.arange(first, min(first + bucket_rows, q)))
            # The bucket has these samples in ascending order.
            places = np.empty(len(ids), np.int64)
            places[np.argsort(ids)] = np.arange(len(ids))
            return made[0][name].read(bucket)[places]

        for rows in _ahead(ordered, range(-(-q // bucket_rows))):
            yield rows
            say(len(rows), "rows written")

    def rows_of(name: str) -> RowSource:
        info = opened.arrays[name]
        return stream(opened.url, (q, *info.shape), info.dtype, lambda: blocks(name))

    try:
        written = create_dataset(
            url,
            {name: rows_of(name) for name in opened.arrays},
            chunk_rows=chunk_rows,
            shard_rows=shard_rows,
            overwrite=overwrite,
            storage_options=storage_options,
        )
        for buckets in made:
            buckets.remove()
        return written
    finally:
        for buckets in made:
            buckets.close()


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
