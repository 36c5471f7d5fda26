"""Write a dataset again in random order, in bounded memory.

The dataset is read once, in its own order, in slabs of whole chunks. Every row goes to a bucket, a range of positions
in the new order, in a file on a local disk. Then the buckets are read one after the other, and each is put in order in
memory. Who goes where is a function (:class:`~dshuffle.planning.randomness.Bijection`), so no list of positions is
kept, unless the order is by classes. The files do not have names, and vanish when their process ends.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, BinaryIO

import numpy as np
from dask.utils import parse_bytes
from numpy.typing import NDArray

from dshuffle.checks import as_integer
from dshuffle.errors import DatasetError, InvalidParameter
from dshuffle.planning.exchange_epochs import ClassOrder
from dshuffle.planning.randomness import Bijection
from dshuffle.private_files import reserve
from dshuffle.store.create import create_dataset
from dshuffle.store.dataset import Dataset, as_dataset
from dshuffle.store.places import Place, canonical_url, is_local
from dshuffle.store.reader import ArrayInfo
from dshuffle.store.sources import RowSource, read_array, stream

PARTS = 8
"""Parts of the memory budget: rows that are read, sorted by bucket, ordered and written, with room for copies."""

MOST_BUCKETS = 1 << 16
"""With more, the rows of a bucket in a slab would be too few to write them quickly."""


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
    progress: Callable[[int, int, str], None] | None = None,
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
        Folder on a local disk with room for the whole dataset, by default the system's folder for temporary files.
        Nothing is left there whatever happens.
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
    target = canonical_url(url)
    if is_local(target) and os.path.realpath(target) == os.path.realpath(opened.url):
        # The copy may lack arrays, attributes, shardings or samples that the source has.
        raise InvalidParameter.of("url", os.fspath(url), "another place than the source's")
    if by is None:
        order: Bijection | ClassOrder = Bijection.of(opened.n_samples, "shuffle dataset", as_integer("seed", seed))
    elif by in opened.scalars:
        labels = read_array(opened, by)[: opened.n_samples]
        order = ClassOrder.of(labels, "shuffle dataset", as_integer("seed", seed))
    else:
        raise InvalidParameter.of(
            "by", by, f"None, or one of the arrays with one value for each sample: {opened.scalars}"
        )
    try:
        part = int(parse_bytes(memory_budget)) // PARTS
    except (ValueError, TypeError):
        part = 0
    if part < 1:
        raise InvalidParameter.of("memory_budget", memory_budget, f'a number of bytes >= {PARTS}, such as "1 GiB"')
    folder = tempfile.gettempdir() if temporary is None else os.fspath(temporary)
    arrays, q, done = opened.arrays, opened.n_samples, 0
    bucket_rows = max(1, part // max(1, *map(_nbytes, arrays.values())), -(-q // MOST_BUCKETS))
    filled = np.zeros(-(-q // bucket_rows), np.int64)  # rows of each bucket so far
    sizes = [q * _nbytes(info) for info in arrays.values()]
    begins = {name: sum(sizes[:number]) for number, name in enumerate(arrays)}
    spread_out: list[BinaryIO] = []

    def say(n_rows: int, text: str) -> None:
        nonlocal done
        done += n_rows
        if progress is not None:
            progress(done, 2 * len(arrays) * q, text)

    def by_bucket(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        buckets = order.forward(ids) // bucket_rows
        sorting = np.argsort(buckets, kind="stable")
        return buckets[sorting], opened.read_rows(ids[sorting], memory_budget=part)

    def spread() -> BinaryIO:
        """Read all rows, and append them to their buckets, in ascending order of their samples."""
        try:
            file: BinaryIO = resources.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
            reserve(file, sum(sizes), folder)
        except OSError as error:
            hint = "Choose another folder (temporary=, --temporary)"
            raise DatasetError(f"the temporary folder {folder!r} cannot hold the dataset: {error}. {hint}") from error
        for buckets, rows in _ahead(by_bucket, _slabs(opened, part)):
            distinct, firsts = np.unique(buckets, return_index=True)
            places = (distinct * bucket_rows + filled[distinct]).tolist()
            for name, values in rows.items():
                nbytes, flat = _nbytes(arrays[name]), _bytes(values)
                for place, first, last in zip(places, firsts, [*firsts[1:], len(buckets)], strict=True):
                    file.seek(begins[name] + place * nbytes)
                    file.write(flat[first * nbytes : last * nbytes])
            filled[distinct] += np.diff([*firsts, len(buckets)])
            say(len(buckets) * len(arrays), "rows read")
        opened.check_unchanged()
        return file

    def blocks(name: str) -> Iterator[NDArray[Any]]:
        if not spread_out:  # not earlier: by now the target has been checked
            spread_out.append(spread())
        [file] = spread_out

        def ordered(bucket: int) -> NDArray[Any]:
            first = bucket * bucket_rows
            ids = order.inverse(np.arange(first, min(first + bucket_rows, q)))
            rows = np.empty((len(ids), *arrays[name].shape), arrays[name].dtype)
            file.seek(begins[name] + first * _nbytes(arrays[name]))
            if file.readinto(_bytes(rows)) != rows.nbytes:  # type: ignore[attr-defined]
                raise DatasetError(f"bucket {bucket} of a shuffle is truncated")
            # The bucket has these samples in ascending order.
            places = np.empty(len(ids), np.int64)
            places[np.argsort(ids)] = np.arange(len(ids))
            return rows[places]

        for rows in _ahead(ordered, range(len(filled))):
            say(len(rows), "rows written")
            yield rows

    def rows_of(name: str, info: ArrayInfo) -> RowSource:
        return stream(opened.url, (q, *info.shape), info.dtype, lambda: blocks(name))

    with ExitStack() as resources:
        return create_dataset(
            url,
            {name: rows_of(name, info) for name, info in arrays.items()},
            chunk_rows=chunk_rows,
            shard_rows=shard_rows,
            overwrite=overwrite,
            storage_options=storage_options,
        )


def _slabs(dataset: Dataset, nbytes: int) -> Iterator[NDArray[np.int64]]:
    """All samples in ascending order, in pieces of about so many bytes that divide few chunks.

    Slabs begin where chunks of the largest array begin (anchors of windows do), and have at least the samples of one.
    If several chunks of another array fit, they begin where its chunks begin.
    """
    view, most = dataset._view, nbytes // max(1, dataset.row_nbytes)
    unit = dataset.arrays[dataset._widest.name].chunk_rows
    unit = max([unit, *(info.chunk_rows for info in dataset.arrays.values() if info.chunk_rows <= most)])
    step = max(1, most // unit) * unit
    for begin in range(-view.before, view.n_items, step):
        bounds = np.clip([begin, begin + step], 0, view.n_whole)
        first, last = bounds if view.ids is None else np.searchsorted(view.ids, bounds)
        if first < last:
            yield np.arange(first, last)


def _nbytes(info: ArrayInfo) -> int:
    return info.dtype.itemsize * math.prod(info.shape)


def _bytes(rows: NDArray[Any]) -> memoryview:
    flat: Any = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    return memoryview(flat)


def _ahead(function: Callable[[Any], Any], values: Iterable[Any]) -> Iterator[Any]:
    """The results of a function, of which the next one is computed in a thread while one is used."""
    with ThreadPoolExecutor(1) as thread:
        coming = None
        for value in values:
            coming, previous = thread.submit(function, value), coming
            if previous is not None:
                yield previous.result()
        if coming is not None:
            yield coming.result()
